"""Deletion in two steps, who created what, the epoch of database and files, and samples of disk use."""

from __future__ import annotations

from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

# Only nullable columns and columns with a default: processes of the previous version go on writing.
_COLUMNS = """
ALTER TABLE datasets
    ADD COLUMN created_by TEXT,
    ADD COLUMN size_bytes BIGINT NOT NULL DEFAULT 0,
    ADD COLUMN deleted_at TIMESTAMPTZ,
    ADD COLUMN deleted_by TEXT,
    ADD COLUMN purged_at TIMESTAMPTZ,
    ADD CONSTRAINT datasets_deleted_by_someone CHECK ((deleted_at IS NULL) = (deleted_by IS NULL)),
    ADD CONSTRAINT datasets_purged_after_deletion CHECK (purged_at IS NULL OR deleted_at IS NOT NULL);
ALTER TABLE jobs
    ADD COLUMN created_by TEXT,
    ADD COLUMN running_quota INTEGER,
    ADD COLUMN deleted_at TIMESTAMPTZ,
    ADD COLUMN deleted_by TEXT,
    ADD COLUMN purged_at TIMESTAMPTZ,
    ADD CONSTRAINT jobs_deleted_by_someone CHECK ((deleted_at IS NULL) = (deleted_by IS NULL)),
    ADD CONSTRAINT jobs_purged_after_deletion CHECK (purged_at IS NULL OR deleted_at IS NOT NULL);
ALTER TABLE models
    ADD COLUMN deleted_at TIMESTAMPTZ,
    ADD COLUMN deleted_by TEXT,
    ADD COLUMN purged_at TIMESTAMPTZ,
    ADD CONSTRAINT models_deleted_by_someone CHECK ((deleted_at IS NULL) = (deleted_by IS NULL)),
    ADD CONSTRAINT models_purged_after_deletion CHECK (purged_at IS NULL OR deleted_at IS NOT NULL);
CREATE INDEX datasets_deleted_at_idx ON datasets (deleted_at) WHERE deleted_at IS NOT NULL;
CREATE INDEX jobs_deleted_at_idx ON jobs (deleted_at) WHERE deleted_at IS NOT NULL;
CREATE INDEX models_deleted_at_idx ON models (deleted_at) WHERE deleted_at IS NOT NULL;
CREATE INDEX jobs_ended_at_idx ON jobs (ended_at) WHERE ended_at IS NOT NULL;
CREATE INDEX jobs_retry_of_idx ON jobs (retry_of) WHERE retry_of IS NOT NULL;
CREATE INDEX jobs_dataset_id_idx ON jobs (dataset_id);
CREATE INDEX jobs_teacher_model_id_idx ON jobs (teacher_model_id) WHERE teacher_model_id IS NOT NULL;
CREATE INDEX models_dataset_id_idx ON models (dataset_id);
CREATE INDEX models_teacher_model_id_idx ON models (teacher_model_id)
    WHERE teacher_model_id IS NOT NULL;
"""

_TABLES = """
CREATE TABLE epochs (
    id TEXT NOT NULL,
    counter BIGINT NOT NULL DEFAULT 0,
    ticked_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    only_row BOOLEAN NOT NULL DEFAULT true,
    CONSTRAINT epochs_pkey PRIMARY KEY (id),
    CONSTRAINT epochs_only_row_key UNIQUE (only_row),
    CONSTRAINT epochs_one_row CHECK (only_row)
);
CREATE TABLE usage_samples (
    taken_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    disk_total_bytes BIGINT NOT NULL,
    disk_used_bytes BIGINT NOT NULL,
    stored_bytes JSONB NOT NULL,
    CONSTRAINT usage_samples_pkey PRIMARY KEY (taken_at)
);
"""


def upgrade() -> None:
    """Add the columns and tables; nothing is known of who created what was there before."""
    op.execute(_COLUMNS)
    op.execute(_TABLES)


def downgrade() -> None:
    """Drop them: what was deleted but is not gone yet comes back, and what is gone stays listed."""
    op.execute("DROP TABLE usage_samples")
    op.execute("DROP TABLE epochs")
    op.execute("""
        DROP INDEX jobs_ended_at_idx, jobs_retry_of_idx, jobs_dataset_id_idx,
            jobs_teacher_model_id_idx, models_dataset_id_idx, models_teacher_model_id_idx
    """)
    op.execute("""
        ALTER TABLE models DROP COLUMN deleted_at, DROP COLUMN deleted_by, DROP COLUMN purged_at
    """)
    op.execute("""
        ALTER TABLE jobs DROP COLUMN created_by, DROP COLUMN running_quota, DROP COLUMN deleted_at,
            DROP COLUMN deleted_by, DROP COLUMN purged_at
    """)
    op.execute("""
        ALTER TABLE datasets DROP COLUMN created_by, DROP COLUMN size_bytes, DROP COLUMN deleted_at,
            DROP COLUMN deleted_by, DROP COLUMN purged_at
    """)
