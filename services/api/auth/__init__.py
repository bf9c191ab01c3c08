"""API keys and their authentication."""
