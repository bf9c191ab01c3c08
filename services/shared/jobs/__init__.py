"""Jobs: their specs, states, run directories, plans and queue, and the only SQL."""
