"""Examines this machine: what works, what does not, and how to fix it.

Checks that need torch run in a process of their own, since a broken runtime may crash or hang it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from services.shared.launch.devices import DeviceKind
from services.shared.launch.doctor.device_checks import check_devices
from services.shared.launch.doctor.host_checks import check_host
from services.shared.launch.doctor.machine import Finding, Machine, Status, failed
from services.shared.launch.doctor.package_checks import check_packages
from services.shared.launch.processes import guarded

_SELFCHECK = "services.shared.training.selfcheck.checks"  # by name: launch must not import training
_SELFCHECK_SECONDS = 300.0


def examine(machine: Machine, *, with_torch: bool = True) -> tuple[list[Finding], dict[str, Any]]:
    """Return all findings, and what was measured as JSON values."""
    findings = [
        finding
        for check in (check_packages, check_devices, check_host)
        for finding in check(machine)
    ]
    measured: dict[str, Any] = {}
    for item in _selfcheck(machine) if with_torch else ():
        if isinstance(item, Finding):
            findings.append(item)
        else:
            measured |= item
    return findings, measured


def to_json(machine: Machine, findings: list[Finding], measured: dict[str, Any]) -> dict[str, Any]:
    """Return the document of `stillhouse doctor --json`."""
    return {
        "healthy": all(finding.status is not Status.FAILED for finding in findings),
        "device_kind": str(machine.kind),
        "dtk": machine.dtk_version(),
        "checks": [asdict(finding) | {"status": str(finding.status)} for finding in findings],
        "measured": measured,
    }


def _selfcheck(machine: Machine) -> Iterator[Finding | dict[str, Any]]:
    """Run the checks that need torch and yield what they print, one JSON object a line.

    A check that began and reported nothing is the one that crashed or hung.
    """
    device = "cpu" if machine.kind is DeviceKind.CPU else "accelerator"
    process = subprocess.Popen(
        guarded([sys.executable, "-m", _SELFCHECK, device]),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).resolve().parents[4],
        env={"OMP_NUM_THREADS": "1", **machine.env, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    try:
        output, errors = process.communicate(timeout=_SELFCHECK_SECONDS)
        ending = f"ended with code {process.returncode}" if process.returncode else None
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, errors = process.communicate()
        ending = f"did not end within {_SELFCHECK_SECONDS:.0f} s"
    begun = "import torch"
    for line in output.splitlines():
        message = _message(line)
        if "begins" in message:
            begun = message["begins"]
        elif "measured" in message:
            yield message["measured"]
        elif "name" in message:
            yield Finding(**message | {"status": Status(message["status"])})
    if ending is not None:
        yield failed(begun, f"the check {ending}: {_last_line(errors)}", _remedy_of(errors))


def _message(line: str) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except ValueError:  # libraries print to standard output, too
        return {}
    return message if isinstance(message, dict) else {}


def _last_line(text: str) -> str:
    lines = text.strip().splitlines()
    return lines[-1] if lines else "no error output"


_KNOWN_ERRORS = (
    ("libgalaxyhip.so", "source /opt/dtk/env.sh before starting; see `DTK environment`."),
    ("librocm_smi64.so", "Mount /opt/hyhal, and keep /opt/hyhal/lib on LD_LIBRARY_PATH."),
    ("undefined symbol", "A wheel was built for another torch; see `companion wheels`."),
    ("flash_attn_2_cuda", "Install the DAS flash_attn wheel, or disable the flash back-end."),
    ("hipErrorNoBinaryForGpu", "This torch was not built for this card's architecture."),
    ("Hip error(100)", "Unset an empty CUDA_VISIBLE_DEVICES."),
    ("out of memory", "Another process holds the card; see `memory in use`."),
)


def _remedy_of(errors: str) -> str:
    for text, remedy in _KNOWN_ERRORS:
        if text in errors:
            return remedy
    return "Run `python -m services.shared.training.selfcheck.checks` manually and read its whole output."
