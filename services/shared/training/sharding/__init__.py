"""Sharding a model over ranks, loading its weights and exporting them again."""
