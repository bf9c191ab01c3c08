"""Training checkpoints: what is saved, and how a loop resumes from it."""
