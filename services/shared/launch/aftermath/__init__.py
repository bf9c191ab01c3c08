"""After an attempt has ended: its outcome, and the diagnosis of a memory failure."""
