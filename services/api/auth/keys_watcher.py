"""Reads the keys file again when it changes or on SIGHUP, so that a key is added or revoked without a restart."""

from __future__ import annotations

import threading
from collections.abc import Callable

import structlog

from services.api.auth.keys import Keys, load_keys
from services.api.settings import ApiSettings
from services.shared.jobs.db.audit import AuditEntry, AuditOutcome

log = structlog.get_logger(__name__)

SERVER = "server"  # who reads the file, in the audit log
_Signature = tuple[int, int, int]


class KeysWatcher:
    """Keeps the keys in line with their file; a file that is invalid changes nothing, and is reported."""

    def __init__(
        self, keys: Keys, settings: ApiSettings, *, record: Callable[[AuditEntry], None]
    ) -> None:
        self._keys = keys
        self._settings = settings
        self._record = record
        self._seen = self._signature()
        self._wake = threading.Event()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="keys-watcher", daemon=True)

    def start(self) -> None:
        """Start watching; without a keys file there is nothing to watch."""
        if self._settings.api_keys_file is not None:
            self._thread.start()

    def stop(self) -> None:
        """Stop watching."""
        self._stopping = True
        self._wake.set()

    def request(self) -> None:
        """Read the file now, changed or not; for a signal handler."""
        self._wake.set()

    def check(self, *, force: bool = False) -> None:
        """Read the file if it has changed since it was last read."""
        signature = self._signature()
        if signature == self._seen and not force:
            return
        self._seen = signature
        former = self._keys.names
        try:
            self._keys.replace(self._read())
        except ValueError as error:
            self._keys.warning = (
                "The API keys file cannot be used; the former keys stay in force (see the log)."
            )
            log.error("keys_not_reloaded", why=str(error))
            self._record_reload("refused", str(error))
            return
        self._keys.warning = None
        names = self._keys.names
        changes = f"added {sorted(names - former)}, removed {sorted(former - names)}"
        log.info("keys_reloaded", keys=len(names), changes=changes)
        self._record_reload("done", changes)

    def _read(self) -> Keys:
        """Return the keys of the file. Raises ValueError."""
        keys = load_keys(self._settings)
        if keys.is_empty:
            # A server that starts without keys is open to this machine; a running one must not become so.
            raise ValueError("The API keys file has no keys any more; restart to run without keys.")
        return keys

    def _record_reload(self, outcome: AuditOutcome, detail: str) -> None:
        entry = AuditEntry(
            key_name=SERVER, action="reload_keys", outcome=outcome, detail=detail[:1000]
        )
        self._record(entry)

    def _signature(self) -> _Signature | None:
        path = self._settings.api_keys_file
        try:
            status = None if path is None else path.stat()
        except OSError:
            return None
        return status and (status.st_mtime_ns, status.st_size, status.st_ino)

    def _run(self) -> None:
        while True:
            forced = self._wake.wait(self._settings.api_keys_poll_seconds)
            if self._stopping:
                return
            self._wake.clear()
            try:
                self.check(force=forced)
            except Exception:
                log.exception("keys_watch_failed")
