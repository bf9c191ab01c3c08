"""Checks what works on this machine, and says how to fix what does not.

Checks that need torch run in a separate process, since a broken runtime may crash or hang it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

from services.shared.launch.devices import DeviceKind
from services.shared.launch.doctor.device_checks import check_devices
from services.shared.launch.doctor.host_checks import check_host
from services.shared.launch.doctor.machine import Finding, Machine, Status, failed
from services.shared.launch.doctor.package_checks import check_packages
from services.shared.launch.doctor.storage_checks import check_storage
from services.shared.launch.processes import guarded

_SELFCHECK = (
    "services.shared.training.selfcheck.checks"  # named, since launch must not import training
)
_SELFCHECK_SECONDS = 300.0

Measurements = dict[str, int | bool | None]


class CheckDict(TypedDict):
    """A finding as JSON."""

    name: str
    status: str
    detail: str
    remedy: str


class DoctorDocument(TypedDict):
    """The document of `stillhouse doctor --json`."""

    healthy: bool
    device_kind: str
    dtk: str | None
    checks: list[CheckDict]
    measured: Measurements


class SelfcheckMessage(TypedDict, total=False):
    """A line that the checks with torch print: `begins`, `measured`, or the fields of a finding."""

    begins: str
    measured: Measurements
    name: str
    status: str
    detail: str
    remedy: str


def examine(machine: Machine, *, with_torch: bool = True) -> tuple[list[Finding], Measurements]:
    """Return all findings and all measurements."""
    findings = [
        finding
        for check in (check_packages, check_devices, check_host, check_storage)
        for finding in check(machine)
    ]
    measured: Measurements = {}
    for item in _selfcheck(machine) if with_torch else ():
        if isinstance(item, Finding):
            findings.append(item)
        else:
            measured |= item
    return findings, measured


def to_json(machine: Machine, findings: list[Finding], measured: Measurements) -> DoctorDocument:
    """Return the document of `stillhouse doctor --json`."""
    return {
        "healthy": all(finding.status is not Status.FAILED for finding in findings),
        "device_kind": str(machine.kind),
        "dtk": machine.dtk_version(),
        "checks": [
            {
                "name": finding.name,
                "status": str(finding.status),
                "detail": finding.detail,
                "remedy": finding.remedy,
            }
            for finding in findings
        ],
        "measured": measured,
    }


def _selfcheck(machine: Machine) -> Iterator[Finding | Measurements]:
    """Run the checks that need torch; yield their findings and measurements.

    If the process crashes or hangs, the last check that began without a result is reported as failed.
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
            status = Status(message["status"])
            yield Finding(message["name"], status, message["detail"], message["remedy"])
    if ending is not None:
        yield failed(begun, f"the check {ending}: {_last_line(errors)}", _remedy_of(errors))


def _message(line: str) -> SelfcheckMessage:
    try:
        message: SelfcheckMessage = json.loads(line)
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
