"""From a job spec to its memory plan, and what was measured against it."""
