"""The machine that the doctor examines: its files, environment, packages and vendor tools."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from importlib import metadata
from pathlib import Path

from services.shared.launch.devices import DeviceKind, detect_device_kind, run_tool


class Status(str, Enum):
    """What a check found."""

    OK = "ok"
    WARNING = "warning"  # works, but something will be slower, larger or fail later
    FAILED = "failed"
    NOT_APPLICABLE = "not_applicable"

    __str__ = str.__str__


@dataclass(frozen=True)
class Finding:
    """The result of one check, with a remedy where something is wrong."""

    name: str
    status: Status
    detail: str
    remedy: str = ""


def ok(name: str, detail: str) -> Finding:
    return Finding(name, Status.OK, detail)


def warning(name: str, detail: str, remedy: str) -> Finding:
    return Finding(name, Status.WARNING, detail, remedy)


def failed(name: str, detail: str, remedy: str) -> Finding:
    return Finding(name, Status.FAILED, detail, remedy)


def not_applicable(name: str, why: str) -> Finding:
    return Finding(name, Status.NOT_APPLICABLE, f"does not apply here: {why}")


@dataclass(frozen=True)
class Machine:
    """What the checks read; tests substitute other files and tool output."""

    kind: DeviceKind
    root: Path = Path("/")
    env: Mapping[str, str] = field(default_factory=lambda: dict(os.environ))
    packages: Mapping[str, str] = field(default_factory=lambda: installed())
    run_tool: Callable[[list[str]], str] = run_tool

    @classmethod
    def detect(cls) -> Machine:
        return cls(kind=detect_device_kind())

    @property
    def is_hip(self) -> bool:
        return self.kind in (DeviceKind.DCU, DeviceKind.ROCM)

    def read(self, path: str) -> str:
        """Return a text file, or '' where there is none."""
        try:
            return (self.root / path).read_text("utf-8", "replace")
        except OSError:
            return ""

    def exists(self, path: str) -> bool:
        return (self.root / path).exists()

    def version(self, package: str) -> tuple[int, ...]:
        """Return the leading numbers of a package's version; () where it is not installed."""
        return numbers(self.packages.get(package, ""))

    def dtk_version(self) -> str | None:
        """Return the version of DTK, read from whichever of its three places exists."""
        for path in ("opt/dtk/.dtk_version", "opt/dtk/.info/version"):
            found = re.search(r"\d+\.\d+(\.\d+)?", self.read(path))
            if found:
                return found.group()
        if self.exists("opt/dtk"):
            found = re.search(r"dtk-(\d+\.\d+(\.\d+)?)", str((self.root / "opt/dtk").resolve()))
            return found.group(1) if found else "unknown"
        return None


def installed() -> dict[str, str]:
    """Return the distributions of this environment by lower-case name, without importing any."""
    return {
        str(found.metadata["Name"]).lower().replace("_", "-"): found.version
        for found in metadata.distributions()
    }


def numbers(version: str) -> tuple[int, ...]:
    """Return the leading numbers of a version: (2, 5, 1) of 2.5.1+das.opt1.dtk2604."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in found.group().split(".")) if found else ()
