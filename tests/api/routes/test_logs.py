"""Log lines are JSON, and their tracebacks hold no local variables."""

from __future__ import annotations

import json
import subprocess
import sys

PROGRAM = """
import logging, structlog
from services.api.logs import configure_logs
configure_logs()
structlog.get_logger("ours").info("job_not_sent", job_id="job_1")
logging.getLogger("theirs").warning("said %s", "this")
def work(key):
    raise ValueError("no")
try:
    work("hush-" + "hush")
except ValueError:
    structlog.get_logger("ours").exception("request_failed")
"""


def test_our_events_and_those_of_libraries_have_one_format_and_no_local_variables() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["event"], line["level"]) for line in lines] == [
        ("job_not_sent", "info"),
        ("said this", "warning"),
        ("request_failed", "error"),
    ]
    assert lines[0]["job_id"] == "job_1"
    assert "ValueError: no" in lines[2]["exception"]
    assert "hush-hush" not in done.stderr
