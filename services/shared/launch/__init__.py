"""Runs torchrun for one attempt and says what became of it. Torch-free, lives in the Celery worker."""
