"""SECURITY.md promises nothing without a test, and names no test that is not there."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "SECURITY.md").read_text("utf-8")
ROWS = [line for line in PAGE.splitlines() if line.startswith("| ") and "`tests/" in line]
NAMED = sorted(set(re.findall(r"`(tests/[a-z_/]+\.py)::(test_\w+)`", PAGE)))


def test_every_guarantee_names_its_tests() -> None:
    tables = [line for line in PAGE.splitlines() if line.startswith("| ")]
    promises = [line for line in tables if not line.startswith("| promise")]
    assert len(promises) > 20
    assert promises == ROWS


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[name for _, name in NAMED])
def test_every_named_test_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    found = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}
    assert name in found
