"""What to change after a failure, in the form that each launcher takes."""
