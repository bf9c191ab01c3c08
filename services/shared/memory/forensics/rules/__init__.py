"""Rules that turn the evidence of a failure into hypotheses."""
