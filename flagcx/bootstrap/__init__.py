"""Each rank's place in its job, and the store through which the ranks find each other."""
