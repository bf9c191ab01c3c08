"""Optimizers: update rules, small-state AdamW variants, Adafactor."""
