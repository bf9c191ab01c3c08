"""Jobs: what they ask for, where they stand, where their files lie, and the only SQL."""
