"""Serving: batching, inference engines, the active models, and the rollout of promotions."""
