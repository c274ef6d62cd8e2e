"""Which algorithm runs, and why."""
