"""One module per resource: validate, call, return."""
