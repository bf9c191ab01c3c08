"""`python -m services.shared.jobs.backup.main create|verify|restore DIR`: what the command line runs.

Prints one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from services.shared.jobs.backup.create import create_backup
from services.shared.jobs.backup.layout import BackupRecord, find_backup
from services.shared.jobs.backup.restore import restore_backup
from services.shared.jobs.backup.verify import verify_backup
from services.shared.jobs.errors import StillhouseError
from services.shared.jobs.settings import JobSettings


def main() -> None:
    """Run one command; exit with code 1 and one line where it cannot be done."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("command", choices=("create", "verify", "restore"))
    parser.add_argument("directory", type=Path)
    parser.add_argument("--replace", action="store_true")
    options = parser.parse_args()
    started = time.monotonic()
    try:
        document = _run(options.command, options.directory, replace=options.replace)
    except (StillhouseError, OSError) as error:
        sys.exit(str(error))
    print(json.dumps({**document, "seconds": round(time.monotonic() - started, 1)}))


def _run(command: str, directory: Path, *, replace: bool) -> dict[str, object]:
    if command == "verify":
        backup = find_backup(directory)
        return {"backup": str(backup), **_summary(verify_backup(backup))}
    settings = JobSettings()
    settings = settings.model_copy(update={"data_dir": settings.data_dir.absolute()})
    if command == "create":
        backup, record = create_backup(settings, directory)
        return {"backup": str(backup), **_summary(record)}
    backup = find_backup(directory)
    restored = restore_backup(settings, backup, replace=replace)
    return {
        "backup": str(backup),
        **_summary(restored.record),
        "requeued_jobs": restored.requeued_jobs,
        "replaced": None if restored.replaced is None else str(restored.replaced),
    }


def _summary(record: BackupRecord) -> dict[str, object]:
    fields = record.model_dump(mode="json", exclude={"format", "tables", "files_sha256"})
    return {**fields, "rows": {table.name: table.rows for table in record.tables}}


if __name__ == "__main__":
    main()
