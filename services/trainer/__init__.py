"""Full fine-tuning of a teacher: the worker that supervises it and the ranks that do it."""
