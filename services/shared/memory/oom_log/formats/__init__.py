"""The texts of memory failures as tables: what prints each, in which version, and how that is known."""
