"""Runs calls: finds the plan of a call, keeps the order of calls, and ends a communicator."""
