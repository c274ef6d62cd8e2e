"""Transports: each compiles one rank's program into a plan for its kind of array, and runs it."""
