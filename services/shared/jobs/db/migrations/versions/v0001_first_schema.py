"""The first schema: datasets, jobs, attempts, events, models, promotions.

`tables.py` says what each column holds; a test compares the two.
"""

from __future__ import annotations

from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None

_TABLES = """
CREATE TABLE datasets (
    id TEXT NOT NULL,
    card JSONB NOT NULL,
    created_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    CONSTRAINT datasets_pkey PRIMARY KEY (id)
);

CREATE TABLE jobs (
    id TEXT NOT NULL,
    kind TEXT NOT NULL,
    name TEXT,
    state TEXT NOT NULL,
    phase TEXT,
    reason TEXT,
    message TEXT,
    spec JSONB NOT NULL,
    recipe JSONB NOT NULL,
    plan JSONB,
    progress JSONB,
    metrics JSONB,
    measured JSONB,
    observed JSONB,
    diagnosis JSONB,
    dataset_id TEXT NOT NULL,
    parent_job_id TEXT,
    teacher_model_id TEXT,
    retry_of TEXT,
    attempt INTEGER NOT NULL DEFAULT 0,
    used_attempts INTEGER NOT NULL DEFAULT 0,
    max_attempts INTEGER NOT NULL,
    worker TEXT,
    token TEXT,
    lease_until TIMESTAMPTZ,
    idempotency_key TEXT,
    spec_sha256 TEXT NOT NULL,
    created_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    sent_at TIMESTAMPTZ,
    started_at TIMESTAMPTZ,
    ended_at TIMESTAMPTZ,
    CONSTRAINT jobs_pkey PRIMARY KEY (id),
    CONSTRAINT jobs_idempotency_key_key UNIQUE (idempotency_key),
    CONSTRAINT jobs_dataset_id_fkey FOREIGN KEY (dataset_id) REFERENCES datasets (id),
    CONSTRAINT jobs_parent_job_id_fkey FOREIGN KEY (parent_job_id) REFERENCES jobs (id),
    CONSTRAINT jobs_retry_of_fkey FOREIGN KEY (retry_of) REFERENCES jobs (id),
    CONSTRAINT jobs_kind_known CHECK (kind IN ('teacher', 'distill')),
    CONSTRAINT jobs_state_known CHECK (
        state IN (
            'waiting', 'queued', 'running', 'cancelling', 'succeeded', 'failed', 'cancelled'
        )
    ),
    CONSTRAINT jobs_ended_when_terminal CHECK (
        (state IN ('succeeded', 'failed', 'cancelled')) = (ended_at IS NOT NULL)
    ),
    CONSTRAINT jobs_reason_when_not_succeeded CHECK (
        (state IN ('failed', 'cancelled')) = (reason IS NOT NULL)
    ),
    CONSTRAINT jobs_leased_while_running CHECK (
        (state IN ('running', 'cancelling')) = (token IS NOT NULL)
        AND (token IS NULL) = (lease_until IS NULL)
        AND (token IS NULL) = (worker IS NULL)
    ),
    CONSTRAINT jobs_waits_for_a_parent CHECK (
        state <> 'waiting' OR (parent_job_id IS NOT NULL AND teacher_model_id IS NULL)
    ),
    CONSTRAINT jobs_started_when_running CHECK (
        state NOT IN ('running', 'cancelling', 'succeeded')
        OR (attempt >= 1 AND started_at IS NOT NULL)
    ),
    CONSTRAINT jobs_attempts_in_bounds CHECK (
        0 <= used_attempts AND used_attempts <= attempt
        AND max_attempts >= 1 AND used_attempts <= max_attempts
    ),
    CONSTRAINT jobs_not_its_own_relative CHECK (parent_job_id <> id AND retry_of <> id)
);
CREATE INDEX jobs_state_id_idx ON jobs (state, id);
CREATE INDEX jobs_kind_state_id_idx ON jobs (kind, state, id);
CREATE INDEX jobs_kind_id_idx ON jobs (kind, id);
CREATE INDEX jobs_parent_job_id_idx ON jobs (parent_job_id) WHERE parent_job_id IS NOT NULL;
CREATE INDEX jobs_queued_idx ON jobs (kind, sent_at, id) WHERE state = 'queued';
CREATE INDEX jobs_leased_idx ON jobs (lease_until) WHERE state IN ('running', 'cancelling');

CREATE TABLE attempts (
    job_id TEXT NOT NULL,
    number INTEGER NOT NULL,
    worker TEXT NOT NULL,
    recipe JSONB NOT NULL,
    started_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    ended_at TIMESTAMPTZ,
    ending TEXT,
    reason TEXT,
    message TEXT,
    exit_code INTEGER,
    failed_rank INTEGER,
    measured JSONB,
    observed JSONB,
    diagnosis JSONB,
    CONSTRAINT attempts_pkey PRIMARY KEY (job_id, number),
    CONSTRAINT attempts_job_id_fkey FOREIGN KEY (job_id) REFERENCES jobs (id),
    CONSTRAINT attempts_number_positive CHECK (number >= 1),
    CONSTRAINT attempts_ending_when_ended CHECK ((ended_at IS NULL) = (ending IS NULL))
);

CREATE TABLE events (
    seq BIGINT GENERATED ALWAYS AS IDENTITY,
    job_id TEXT NOT NULL,
    attempt INTEGER NOT NULL,
    type TEXT NOT NULL,
    data JSONB NOT NULL,
    created_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    CONSTRAINT events_pkey PRIMARY KEY (seq),
    CONSTRAINT events_job_id_fkey FOREIGN KEY (job_id) REFERENCES jobs (id),
    CONSTRAINT events_type_known CHECK (type IN ('state', 'phase', 'evaluation'))
);
CREATE INDEX events_job_id_seq_idx ON events (job_id, seq);

CREATE TABLE models (
    id TEXT NOT NULL,
    job_id TEXT NOT NULL,
    kind TEXT NOT NULL,
    name TEXT,
    dataset_id TEXT NOT NULL,
    teacher_model_id TEXT,
    heads JSONB NOT NULL,
    parameters BIGINT NOT NULL,
    size_bytes BIGINT NOT NULL,
    manifest_sha256 TEXT,
    metrics JSONB NOT NULL,
    gate JSONB,
    created_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    CONSTRAINT models_pkey PRIMARY KEY (id),
    CONSTRAINT models_job_id_key UNIQUE (job_id),
    CONSTRAINT models_job_id_fkey FOREIGN KEY (job_id) REFERENCES jobs (id),
    CONSTRAINT models_dataset_id_fkey FOREIGN KEY (dataset_id) REFERENCES datasets (id),
    CONSTRAINT models_teacher_model_id_fkey FOREIGN KEY (teacher_model_id) REFERENCES models (id),
    CONSTRAINT models_kind_known CHECK (kind IN ('teacher', 'distill')),
    CONSTRAINT models_counts_not_negative CHECK (parameters >= 0 AND size_bytes >= 0)
);
ALTER TABLE jobs ADD CONSTRAINT jobs_teacher_model_id_fkey
    FOREIGN KEY (teacher_model_id) REFERENCES models (id);

CREATE TABLE promotions (
    seq BIGINT GENERATED ALWAYS AS IDENTITY,
    id TEXT NOT NULL,
    alias TEXT NOT NULL,
    model_id TEXT NOT NULL,
    forced BOOLEAN NOT NULL,
    reason TEXT,
    created_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    CONSTRAINT promotions_pkey PRIMARY KEY (seq),
    CONSTRAINT promotions_id_key UNIQUE (id),
    CONSTRAINT promotions_model_id_fkey FOREIGN KEY (model_id) REFERENCES models (id),
    CONSTRAINT promotions_force_has_a_reason CHECK (NOT forced OR reason IS NOT NULL)
);
CREATE INDEX promotions_alias_seq_idx ON promotions (alias, seq);
"""

_APPEND_ONLY = """
CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RAISE EXCEPTION '% is append-only', TG_TABLE_NAME USING ERRCODE = 'restrict_violation';
END
$$;
CREATE TRIGGER promotions_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON promotions
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
"""


def upgrade() -> None:
    """Create everything."""
    op.execute(_TABLES)
    op.execute(_APPEND_ONLY)


def downgrade() -> None:
    """Refuse: there is nothing before the first schema but losing all data."""
    raise NotImplementedError("the first schema has nothing to go back to")
