"""Terminal output of plans, diagnoses and traces."""
