"""bandit, a scanner for insecure Python, finds nothing but what is explained here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]

# Kinds that are no fault anywhere in this code.
NO_FAULT = {
    "B101": "an assert states what our own code guarantees; input is checked by exceptions",
    "B105": "words like <pad>, None or a tensor's name, where the variable is called `token`",
    "B404": "subprocesses are what a job service is about",
    "B603": "commands are lists without a shell; ruff's S602, S604 and S605 refuse shells",
}
# (kind, file) -> why it is no fault there.
EXPLAINED = {
    ("B310", "services/cli/embedded/platform.py"): "the URL is that of our own API on loopback",
    ("B606", "services/shared/launch/guard.py"): "exec of the command that it guards, a list",
    (
        "B108",
        "services/shared/launch/doctor/host_checks.py",
    ): "the size of /dev/shm is measured; nothing is opened there",
    (
        "B108",
        "services/shared/memory/forensics/rules/texts.py",
    ): "a path within a message for people",
    (
        "B108",
        "services/shared/memory/oom_log/formats/host.py",
    ): "a path within a pattern of messages",
    ("B615", "services/shared/model/artifact.py"): "loads a local directory",
    ("B615", "services/shared/model/known_outputs.py"): "loads a local directory",
    ("B615", "services/shared/model/tokens.py"): "loads a local directory",
    ("B615", "services/shared/training/job_setup.py"): "loads a local directory",
    ("B615", "services/shared/training/vocabulary.py"): "loads a local directory",
}


def test_bandit_finds_only_what_is_explained() -> None:
    done = subprocess.run(
        [
            *(sys.executable, "-m", "bandit", "-q", "-r", "services", "tools"),
            *("-s", ",".join(NO_FAULT), "-f", "json"),
        ],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    report = json.loads(done.stdout)
    assert not report["errors"]
    assert len(report["metrics"]) > 300  # it has read the code
    found = {
        (each["test_id"], str(Path(each["filename"]))): f"line {each['line_number']}: "
        + each["issue_text"]
        for each in report["results"]
    }
    assert {key: text for key, text in found.items() if key not in EXPLAINED} == {}
    assert set(EXPLAINED) - set(found) == set(), "explained, but no longer found"
