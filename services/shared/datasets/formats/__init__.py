"""Readers of uploads: one module per family of formats; `source` selects among them by content."""
