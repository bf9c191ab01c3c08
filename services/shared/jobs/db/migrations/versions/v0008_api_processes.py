"""Which processes of the API run, and what each of them serves."""

from __future__ import annotations

from alembic import op

revision = "0008"
down_revision = "0007"
branch_labels = None
depends_on = None

_TABLES = """
CREATE TABLE api_processes (
    name TEXT NOT NULL,
    started_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    seen_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    CONSTRAINT api_processes_pkey PRIMARY KEY (name)
);
CREATE TABLE process_servings (
    process TEXT NOT NULL,
    promotion_id TEXT NOT NULL,
    outcome TEXT NOT NULL,
    engine TEXT,
    why TEXT,
    transient BOOLEAN NOT NULL,
    created_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    CONSTRAINT process_servings_pkey PRIMARY KEY (process, promotion_id),
    CONSTRAINT process_servings_process_fkey FOREIGN KEY (process)
        REFERENCES api_processes (name) ON DELETE CASCADE,
    CONSTRAINT process_servings_promotion_id_fkey FOREIGN KEY (promotion_id)
        REFERENCES promotions (id),
    CONSTRAINT process_servings_outcome_known CHECK (outcome IN ('served', 'refused'))
);
CREATE INDEX process_servings_promotion_id_idx ON process_servings (promotion_id);
"""


def upgrade() -> None:
    """Add both tables; each process fills them from its start on."""
    op.execute(_TABLES)


def downgrade() -> None:
    """Drop both; `servings` still says what became of a promotion in any process."""
    op.execute("DROP TABLE process_servings")
    op.execute("DROP TABLE api_processes")
