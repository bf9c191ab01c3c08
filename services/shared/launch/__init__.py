"""Runs torchrun for one attempt and reports its outcome. Torch-free; part of the Celery worker."""
