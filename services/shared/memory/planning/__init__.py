"""The memory plan of one rank: the allocations of a training step, and what would make it smaller."""
