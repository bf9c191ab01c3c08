"""The order of queued jobs: priorities, and turns between projects."""

from __future__ import annotations

from alembic import op

revision = "0007"
down_revision = "0006"
branch_labels = None
depends_on = None

_ORDER = """
ALTER TABLE jobs ADD COLUMN priority INTEGER NOT NULL DEFAULT 0;
CREATE INDEX jobs_turn_idx ON jobs (kind, priority, project, id) WHERE state = 'queued';
CREATE TABLE queue_turns (
    kind TEXT NOT NULL,
    project TEXT NOT NULL,
    priority INTEGER NOT NULL,
    claimed_at TIMESTAMPTZ NOT NULL,
    CONSTRAINT queue_turns_pkey PRIMARY KEY (kind, project, priority)
);
"""


def upgrade() -> None:
    """Add the column, its index and the table; jobs that are queued already have priority 0."""
    op.execute(_ORDER)


def downgrade() -> None:
    """Drop them; jobs are claimed in the order of their messages again."""
    op.execute("DROP TABLE queue_turns")
    op.execute("DROP INDEX jobs_turn_idx")
    op.execute("ALTER TABLE jobs DROP COLUMN priority")
