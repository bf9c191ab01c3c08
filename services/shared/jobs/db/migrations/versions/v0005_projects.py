"""Datasets, jobs, models and promotions belong to a project; promotions name who made them."""

from __future__ import annotations

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

# A constant default makes each column a change of the catalogue alone, and lets an API of the former
# version, which does not know the columns, go on inserting.
_COLUMNS = """
ALTER TABLE datasets ADD COLUMN project TEXT NOT NULL DEFAULT 'default';
ALTER TABLE jobs ADD COLUMN project TEXT NOT NULL DEFAULT 'default';
ALTER TABLE models ADD COLUMN project TEXT NOT NULL DEFAULT 'default';
ALTER TABLE promotions
    ADD COLUMN project TEXT NOT NULL DEFAULT 'default', ADD COLUMN promoted_by TEXT;
"""

_INDEXES = """
CREATE INDEX datasets_project_id_idx ON datasets (project, id);
CREATE INDEX jobs_project_id_idx ON jobs (project, id);
CREATE INDEX jobs_project_state_id_idx ON jobs (project, state, id);
CREATE INDEX models_project_id_idx ON models (project, id);
CREATE INDEX promotions_project_alias_seq_idx ON promotions (project, alias, seq);
"""


def upgrade() -> None:
    """Add the columns; what exists belongs to the project `default`."""
    op.execute(_COLUMNS)
    op.execute(_INDEXES)


def downgrade() -> None:
    """Drop the columns and their indexes: every resource is visible to every key again."""
    op.execute("ALTER TABLE promotions DROP COLUMN project, DROP COLUMN promoted_by")
    op.execute("ALTER TABLE models DROP COLUMN project")
    op.execute("ALTER TABLE jobs DROP COLUMN project")
    op.execute("ALTER TABLE datasets DROP COLUMN project")
