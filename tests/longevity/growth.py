"""What grows over the days of a platform, and should not."""

from __future__ import annotations

from collections.abc import Sequence

from tests.longevity.platform_days import Measurement

# The record of who promoted what, and of what was served: a row for each promotion, kept for ever. With them stay
# the rows of promoted models and of their jobs.
FOR_EVER = frozenset({"promotions", "servings", "models", "jobs", "datasets"})
_MOST_GROWTH = 1.25  # of a table or of the disk, between the steady state and the end
_MOST_MEMORY_GROWTH = 1.10


def faults_of(measurements: Sequence[Measurement], *, steady_from: int) -> list[str]:
    """Return what is larger at the end than in the steady state."""
    steady = [m for m in measurements if steady_from <= m.day < steady_from + 3]
    last = measurements[-1]
    promotions = last.rows["promotions"] - steady[0].rows["promotions"]
    faults = []
    for table, rows in last.rows.items():
        before = max(m.rows.get(table, 0) for m in steady)
        # A promoted model keeps its row, its job's, and whatever a retry of that job refers to.
        allowed = before * _MOST_GROWTH + 20 + (3 * promotions if table in FOR_EVER else 0)
        if table not in ("usage_samples", "audit") and rows > allowed:
            faults.append(f"table {table} grew from {before} to {rows} rows")
    sizes = [(m, sum(m.stored_bytes.values())) for m in (*steady, last)]
    before = max(size for m, size in sizes[:-1])
    if sizes[-1][1] > before * _MOST_GROWTH:
        faults.append(f"the files grew from {before:,} to {sizes[-1][1]:,} bytes")
    for name in ("api_bytes", "worker_bytes"):
        before = max(getattr(m, name) for m in steady)
        if getattr(last, name) > before * _MOST_MEMORY_GROWTH:
            faults.append(f"{name} grew from {before:,} to {getattr(last, name):,}")
    return faults
