"""The database: tables, queries, state transitions and migrations. The only SQL."""
