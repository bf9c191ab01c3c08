"""Backups of database and files, and their restoration."""
