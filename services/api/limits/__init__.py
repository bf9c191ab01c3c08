"""Limits on requests: body size, request rate, concurrent uploads."""
