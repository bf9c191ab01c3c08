"""Whether a model directory that a user names may be loaded at all; read before anything large is."""
