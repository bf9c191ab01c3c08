"""What a killed process leaves of an upload is removed; what a living one reads is not."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
from pathlib import Path

from services.api.limits.spool import remove_abandoned, spooled

_HOLD = """
import io, sys, time
from pathlib import Path
from services.api.limits.spool import spooled
with spooled(io.BytesIO(b"x" * 1000), Path(sys.argv[1])) as path:
    (path.with_name(path.name + ".unpacked")).mkdir()
    print(path, flush=True)
    time.sleep(60)
"""


def test_the_copy_of_a_killed_process_is_removed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _HOLD, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None
        path = Path(holder.stdout.readline().strip())
        assert remove_abandoned(tmp_path) == []  # it is being read
        assert path.stat().st_size == 1000
        os.kill(holder.pid, signal.SIGKILL)
    unpacked = path.with_name(f"{path.name}.unpacked")
    assert set(remove_abandoned(tmp_path)) == {path, unpacked}
    assert list(tmp_path.iterdir()) == []


def test_a_copy_is_removed_when_it_has_been_read(tmp_path: Path) -> None:
    with spooled(io.BytesIO(b"text"), tmp_path) as path:
        assert path.read_bytes() == b"text"
    assert list(tmp_path.iterdir()) == []
