"""Every guarantee in SECURITY.md names its tests, and every named test exists."""

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
    guarantees = [line for line in tables if not line.startswith("| guarantee")]
    assert len(guarantees) > 20
    assert guarantees == ROWS


@pytest.mark.parametrize(("path", "name"), NAMED, ids=[name for _, name in NAMED])
def test_every_named_test_exists(path: str, name: str) -> None:
    tree = ast.parse((ROOT / path).read_text("utf-8"))
    found = {
        node.name
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert name in found
