"""Distillation of a teacher into a student: the worker, the loop, the losses, the evaluation."""
