"""How long files and records stay: retention, removal, disk use, and the epoch that ties both together."""
