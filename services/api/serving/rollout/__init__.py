"""Rollout of promotions: loading a student, checking its golden outputs, swapping it in."""
