"""Whose turn it is among the queued jobs of one kind.

Jobs of one project and priority form a line, first come, first served. Of all lines, only the heads are
compared, found by one probe of the index `jobs_turn_idx` each, however long the lines are:

1. the higher priority; a head gains a step of priority for each `aging_seconds` since its creation, up to
   the highest priority that is queued, so that no line waits for ever,
2. the project with fewer running jobs,
3. the project, then the line, whose last turn was longer ago.
"""

from __future__ import annotations

from collections.abc import Sequence

from sqlalchemy import func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from services.shared.jobs.db.tables import JobRow, QueueTurnRow

_NEXT = text("""
WITH RECURSIVE held AS (
    SELECT created_by FROM jobs WHERE id = ANY(:passed_over) AND running_quota IS NOT NULL
),
lines AS (
    (
        SELECT priority, project FROM jobs WHERE state = 'queued' AND kind = :kind
        ORDER BY priority, project LIMIT 1
    )
    UNION ALL
    SELECT following.priority, following.project
    FROM lines CROSS JOIN LATERAL (
        SELECT priority, project FROM jobs
        WHERE state = 'queued' AND kind = :kind
            AND (priority, project) > (lines.priority, lines.project)
        ORDER BY priority, project LIMIT 1
    ) AS following
),
busy AS (
    SELECT project, count(*) AS running FROM jobs
    WHERE state IN ('running', 'cancelling') AND kind = :kind GROUP BY project
),
turns AS (
    SELECT project, max(claimed_at) AS claimed_at FROM queue_turns WHERE kind = :kind GROUP BY project
)
SELECT head.id
FROM lines
CROSS JOIN LATERAL (
    SELECT id, created_at FROM jobs
    WHERE state = 'queued' AND kind = :kind AND priority = lines.priority AND project = lines.project
        AND NOT (id = ANY(:passed_over))
        AND (running_quota IS NULL OR NOT EXISTS (SELECT FROM held WHERE held.created_by = jobs.created_by))
    ORDER BY id LIMIT 1
) AS head
LEFT JOIN busy ON busy.project = lines.project
LEFT JOIN turns ON turns.project = lines.project
LEFT JOIN queue_turns AS line
    ON line.kind = :kind AND line.project = lines.project AND line.priority = lines.priority
WHERE NOT EXISTS (SELECT 1 FROM maintenance)
ORDER BY
    least(
        lines.priority + floor(extract(epoch FROM now() - head.created_at) / :aging_seconds),
        (SELECT max(priority) FROM lines)
    ) DESC,
    coalesce(busy.running, 0),
    turns.claimed_at NULLS FIRST,
    line.claimed_at NULLS FIRST,
    head.id
LIMIT 1
""")


def next_in_turn(
    session: Session, job_id: str, *, aging_seconds: float, passed_over: Sequence[str] = ()
) -> str | None:
    """Return the queued job, of the same kind as `job_id`, whose turn it is.

    Returns None if none is queued, except those `passed_over`, and during maintenance. With a job
    passed over whose key may run only some at once, all others of that key are.
    """
    kind = session.scalar(select(JobRow.kind).where(JobRow.id == job_id))
    values = {"kind": kind, "aging_seconds": aging_seconds, "passed_over": list(passed_over)}
    found: str | None = session.execute(_NEXT, values).scalar_one_or_none()
    return found


def take_turn(session: Session, job: JobRow) -> None:
    """Record that a job of this line has been claimed."""
    now = func.clock_timestamp()  # not that of the transaction's start: claims may overlap
    session.execute(
        insert(QueueTurnRow)
        .values(kind=job.kind, project=job.project, priority=job.priority, claimed_at=now)
        .on_conflict_do_update(
            index_elements=["kind", "project", "priority"], set_={"claimed_at": now}
        )
    )
