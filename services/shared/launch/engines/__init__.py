"""Engines: what starts the ranks of an attempt, behind one port."""
