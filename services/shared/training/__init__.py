"""What runs on the ranks: process group, sharding, loading, optimizers, checkpoints, probe, progress."""
