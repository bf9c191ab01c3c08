"""One text of a memory failure, and where its wording is from."""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from services.shared.memory.oom_log.message_formats import Backend, MessageKind

BYTES = r"(?P<tried>[0-9]{1,18})\b"
GIB_NUMBER = r"[0-9]{1,9}(?:\.[0-9]{1,6})?"


class Verified(str, Enum):
    """How the wording of a text is known."""

    SOURCE = "source"  # read in the source file of the version named
    BINARY = "binary"  # a string of the released library of the version named
    REPORTS = "reports"  # quoted by several public reports; the source was not read
    DOCUMENTATION = "documentation"  # from the vendor's documentation of its codes

    __str__ = str.__str__


@dataclass(frozen=True)
class Origin:
    """The component that prints a text, its version, and how the wording is known."""

    component: str
    file: str
    versions: str
    verified: Verified


@dataclass(frozen=True)
class TextFormat:
    """One text: what it says, where it is from, and the words of it that a scan looks for.

    Named groups of `expression`: `tried` and `wanted` are a request in bytes; `size` is a printed size and
    `held` that of what was allocated; `free_gib`,
    `total_gib` and `wanted_gib` are numbers of gibibytes; `resident_kib` is what a killed process
    held, in kibibytes. Each of `examples` is read as this format.
    """

    format_id: str
    kind: MessageKind
    backend: Backend
    expression: re.Pattern[str]
    examples: tuple[str, ...]
    origins: tuple[Origin, ...]
    triggers: tuple[str, ...]


def source(component: str, file: str, versions: str) -> Origin:
    """Return an origin whose source file was read."""
    return Origin(component, file, versions, Verified.SOURCE)


def binary(component: str, file: str, versions: str) -> Origin:
    """Return an origin whose released library holds the text."""
    return Origin(component, file, versions, Verified.BINARY)


def reported(component: str, file: str, versions: str) -> Origin:
    """Return an origin that public reports quote."""
    return Origin(component, file, versions, Verified.REPORTS)


def documented(component: str, file: str, versions: str) -> Origin:
    """Return an origin that the vendor documents."""
    return Origin(component, file, versions, Verified.DOCUMENTATION)


def text_format(
    format_id: str,
    kind: MessageKind,
    backend: Backend,
    expression: str,
    *,
    examples: tuple[str, ...],
    origins: tuple[Origin, ...],
    triggers: tuple[str, ...],
) -> TextFormat:
    """Return a format; all quantifiers of `expression` have to be bounded."""
    compiled = re.compile(expression, re.ASCII)
    return TextFormat(format_id, kind, backend, compiled, examples, origins, triggers)
