"""Labelled text: reading, validating, splitting and storing it. Torch-free."""
