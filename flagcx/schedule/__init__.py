"""Schedules: the types, how they are put together, verified, lowered and drawn."""
