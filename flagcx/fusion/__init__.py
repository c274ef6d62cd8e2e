"""Many small arrays in few messages."""
