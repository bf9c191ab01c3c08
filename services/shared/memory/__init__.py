"""The memory arithmetic: shapes, plans, budgets, remedies and forensics. Standard library only."""
