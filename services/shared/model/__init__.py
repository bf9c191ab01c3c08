"""The classifier (a backbone with heads), its artifact on disk, and tokenised batches."""
