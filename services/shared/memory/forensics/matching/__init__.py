"""Matching the size of a refused request to the tensors of the job."""
