"""What became of promotions when the API loaded them, and whether a model may serve in 8 bits."""

from __future__ import annotations

from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_SERVINGS = """
CREATE TABLE servings (
    seq BIGINT GENERATED ALWAYS AS IDENTITY,
    promotion_id TEXT NOT NULL,
    outcome TEXT NOT NULL,
    engine TEXT,
    why TEXT,
    transient BOOLEAN NOT NULL,
    created_at TIMESTAMPTZ NOT NULL DEFAULT now(),
    CONSTRAINT servings_pkey PRIMARY KEY (seq),
    CONSTRAINT servings_promotion_id_fkey FOREIGN KEY (promotion_id) REFERENCES promotions (id),
    CONSTRAINT servings_outcome_known CHECK (outcome IN ('served', 'refused')),
    CONSTRAINT servings_served_by_an_engine CHECK ((outcome = 'served') = (engine IS NOT NULL)),
    CONSTRAINT servings_refused_for_a_reason CHECK ((outcome = 'refused') = (why IS NOT NULL))
);
CREATE INDEX servings_promotion_id_seq_idx ON servings (promotion_id, seq);
CREATE INDEX promotions_model_id_idx ON promotions (model_id);
CREATE TRIGGER servings_append_only BEFORE UPDATE OR DELETE OR TRUNCATE ON servings
    FOR EACH STATEMENT EXECUTE FUNCTION refuse_change();
ALTER TABLE models ADD COLUMN int8_gate JSONB;
"""


def upgrade() -> None:
    """Add the table and the column; of what was promoted before nothing is known."""
    op.execute(_SERVINGS)


def downgrade() -> None:
    """Drop both, with what they know."""
    op.execute("DROP TABLE servings")
    op.execute("DROP INDEX promotions_model_id_idx")
    op.execute("ALTER TABLE models DROP COLUMN int8_gate")
