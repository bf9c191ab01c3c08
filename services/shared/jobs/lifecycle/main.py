"""`python -m services.shared.jobs.lifecycle.main gc|report`: what `stillhouse gc` and `doctor` run.

A process of its own, since the command line loads no database driver. Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterable

import structlog

from services.shared.jobs.db.lifecycle_store import LifecycleStore
from services.shared.jobs.db.store import Store, open_store
from services.shared.jobs.errors import StillhouseError
from services.shared.jobs.lifecycle.collect import Removal, find
from services.shared.jobs.lifecycle.epoch import adopt_epoch, check_epoch
from services.shared.jobs.lifecycle.report import storage_report
from services.shared.jobs.lifecycle.tidy import tidy
from services.shared.jobs.settings import JobSettings

_MOST_LISTED = 1000


def main() -> None:
    """Run one command; exit with code 1 and one line where it cannot be done."""
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("gc", "report"))
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--adopt", action="store_true")
    options = parser.parse_args()
    settings = JobSettings()
    settings = settings.model_copy(update={"data_dir": settings.data_dir.absolute()})
    store = open_store(settings)
    try:
        if options.command == "report":
            document = storage_report(LifecycleStore(store)).to_json()
        else:
            document = _collect(store, dry_run=options.dry_run, adopt=options.adopt)
    except (StillhouseError, OSError) as error:
        sys.exit(str(error))
    print(json.dumps(document))


def _collect(store: Store, *, dry_run: bool, adopt: bool) -> dict[str, object]:
    lifecycle = LifecycleStore(store)
    if adopt:
        adopt_epoch(lifecycle)
    check_epoch(lifecycle)
    found = find(lifecycle, now=lifecycle.now()) if dry_run else tidy(store)
    return {"dry_run": dry_run, **_summary(found)}


def _summary(found: Iterable[Removal]) -> dict[str, object]:
    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    listed: list[dict[str, object]] = []
    for removal in found:
        counts[removal.what] += 1
        sizes[removal.what] += removal.size_bytes
        if len(listed) < _MOST_LISTED:
            listed.append(
                {"what": removal.what, "id": removal.id, "size_bytes": removal.size_bytes}
            )
    totals = {what: {"count": counts[what], "size_bytes": sizes[what]} for what in sorted(counts)}
    return {"totals": totals, "items": listed}


if __name__ == "__main__":
    main()
