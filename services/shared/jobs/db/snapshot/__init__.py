"""The tables of the database as files: written from one snapshot, read into an empty database."""
