"""Calls of our own functions in processes that the kernel limits and ends."""
