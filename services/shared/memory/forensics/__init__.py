"""Diagnosis of an out-of-memory failure: evidence, rules, hypotheses, remedies."""
