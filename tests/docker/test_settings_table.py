"""docs/containers.md names every variable that the compose files read, and no other."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_the_table_of_settings_is_complete() -> None:
    files = [*ROOT.glob("compose*.yaml")]
    read = {
        name for file in files for name in re.findall(r"\$\{([A-Z_]+)", file.read_text("utf-8"))
    }
    document = (ROOT / "docs" / "containers.md").read_text("utf-8")
    described = set(re.findall(r"^\| `([A-Z_]+)` \|", document, re.MULTILINE))
    assert len(files) == 5
    assert described == read


def test_defaults_in_the_table_are_those_of_the_files() -> None:
    text = (ROOT / "compose.yaml").read_text("utf-8")
    document = (ROOT / "docs" / "containers.md").read_text("utf-8")
    defaults = dict(re.findall(r"\$\{([A-Z_]+):-([^}]+)\}", text))
    assert defaults
    for name, default in defaults.items():
        row = re.search(rf"^\| `{name}` \|([^|]*)\|", document, re.MULTILINE)
        assert row is not None
        assert f"`{default}`" in row[1], name
