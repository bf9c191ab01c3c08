"""The audit log of writes, and maintenance mode."""

from __future__ import annotations

from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None

_AUDIT = """
CREATE TABLE audit (
    seq BIGINT GENERATED ALWAYS AS IDENTITY,
    created_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    key_name TEXT NOT NULL,
    key_id TEXT,
    project TEXT NOT NULL,
    action TEXT NOT NULL,
    target TEXT,
    created TEXT,
    address TEXT,
    request_id TEXT,
    outcome TEXT NOT NULL,
    status INTEGER,
    detail TEXT,
    CONSTRAINT audit_pkey PRIMARY KEY (seq),
    CONSTRAINT audit_outcome_known CHECK (outcome IN ('done', 'refused', 'failed'))
);
CREATE INDEX audit_created_at_idx ON audit (created_at);
CREATE INDEX audit_target_seq_idx ON audit (target, seq);
"""

# Rows go only by `audit.expire`, which names the moment before which they may.
_APPEND_ONLY = """
CREATE FUNCTION refuse_change_of_audit() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE'
        AND OLD.created_at < NULLIF(current_setting('stillhouse.audit_expiry', true), '')::timestamptz
    THEN
        RETURN OLD;
    END IF;
    RAISE EXCEPTION 'audit is append-only' USING ERRCODE = 'restrict_violation';
END
$$;
CREATE TRIGGER audit_append_only BEFORE UPDATE OR DELETE ON audit
    FOR EACH ROW EXECUTE FUNCTION refuse_change_of_audit();
CREATE TRIGGER audit_not_truncated BEFORE TRUNCATE ON audit
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
"""

_MAINTENANCE = """
CREATE TABLE maintenance (
    only_row BOOLEAN NOT NULL DEFAULT true,
    reason TEXT NOT NULL,
    started_by TEXT NOT NULL,
    started_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    CONSTRAINT maintenance_pkey PRIMARY KEY (only_row),
    CONSTRAINT maintenance_one_row CHECK (only_row)
);
"""


def upgrade() -> None:
    """Add both tables; nothing is known of earlier writes."""
    op.execute(_AUDIT)
    op.execute(_APPEND_ONLY)
    op.execute(_MAINTENANCE)


def downgrade() -> None:
    """Drop both, with everything that was recorded."""
    op.execute("DROP TABLE maintenance")
    op.execute("DROP TABLE audit")
    op.execute("DROP FUNCTION refuse_change_of_audit()")
