"""Inference engines: forward passes over a batch of texts."""
