"""Batching of prediction requests: queue, token budget, thread allocation, shadow traffic."""
