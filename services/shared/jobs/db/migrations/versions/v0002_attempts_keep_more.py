"""Attempts keep the plan they ran with and the failure record of the rank that caused it."""

from __future__ import annotations

from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the columns; attempts made before know neither."""
    op.execute("ALTER TABLE attempts ADD COLUMN plan JSONB, ADD COLUMN failure JSONB")


def downgrade() -> None:
    """Drop the columns."""
    op.execute("ALTER TABLE attempts DROP COLUMN plan, DROP COLUMN failure")
