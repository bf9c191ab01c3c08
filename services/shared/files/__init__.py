"""Reading and writing files: atomic replacement, the end of a log. Standard library only."""
