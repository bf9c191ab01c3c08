"""Pages point to files that exist, and their diagrams are Mermaid."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("examples/*.md")])
_PATH = re.compile(r"`((?:services|tests|tools|docs|examples|docker)/[\w./-]+)`")
_LINK = re.compile(r"\]\((?!https?:|#)([^)#\s]+)")
# The forms that our diagrams use, a line each (the grammar of Mermaid 11 for them).
_NODE = r"\w+(?:\[\"[^\"\]]+\"\])?"
_FLOWCHART = re.compile(
    rf"flowchart (?:TD|LR)|{_NODE}|{_NODE}(?: & {_NODE})* --> {_NODE}(?: & {_NODE})*"
)
_SEQUENCE = re.compile(
    r"sequenceDiagram|participant \w+ as [^;#]+|\w+--?>>\w+: [^;#]+|(?:alt|else|loop|opt) [^;#]+|end"
)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_paths_that_a_page_names_exist(page: Path) -> None:
    text = page.read_text("utf-8")
    named = {ROOT / path for path in _PATH.findall(text)}
    linked = {(page.parent / path).resolve() for path in _LINK.findall(text)}
    missing = sorted(str(path) for path in named | linked if not path.exists())
    assert missing == []


def _diagrams() -> list[str]:
    return [
        block
        for page in PAGES
        for block in re.findall(r"```mermaid\n(.*?)```", page.read_text("utf-8"), re.DOTALL)
    ]


def test_there_is_a_diagram_of_the_packages_and_one_of_the_path_of_a_job() -> None:
    assert {block.split()[0] for block in _diagrams()} == {"flowchart", "sequenceDiagram"}


@pytest.mark.parametrize("block", _diagrams(), ids=lambda block: str(block).split()[0])
def test_a_diagram_parses(block: str) -> None:
    form = _FLOWCHART if block.startswith("flowchart") else _SEQUENCE
    lines = [line.strip() for line in block.splitlines() if line.strip()]
    assert [line for line in lines if not form.fullmatch(line)] == []
    opened = sum(line.split()[0] in ("alt", "loop", "opt") for line in lines)
    assert opened == lines.count("end")
