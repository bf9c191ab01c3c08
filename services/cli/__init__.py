"""The `stillhouse` command."""
