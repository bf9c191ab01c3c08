"""Names that others chose reach the terminal without control characters, in every command."""

from __future__ import annotations

import ast
import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import RenderableType
from rich.progress import Progress
from rich.table import Table
from rich.text import Text

from services.cli.terminal import Console, printable

ROOT = Path(__file__).resolve().parents[2] / "services" / "cli"
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202egpj.exe\r\x08\x7f"


def _shown(renderable: RenderableType, **options: Any) -> str:
    out = io.StringIO()
    Console(file=out, width=200, **options).print(renderable)
    return out.getvalue()


@pytest.mark.parametrize("renderable", [HOSTILE, Text(HOSTILE)], ids=["string", "text"])
def test_a_console_shows_no_control_characters(renderable: RenderableType) -> None:
    table = Table("name", title=HOSTILE)
    table.add_row(renderable)
    for each in (renderable, table):
        shown = _shown(each)
        assert "owned" in shown
        assert not [c for c in shown if c != "\n" and (ord(c) < 32 or 0x7F <= ord(c) < 0xA0)]
        assert "\u202e" not in shown


def test_the_consoles_own_colours_and_controls_stay() -> None:
    shown = _shown(Text("red " + HOSTILE, "red"), force_terminal=True, color_system="standard")
    assert shown.startswith("\x1b[31mred ")
    assert "\x1b]" not in shown
    out = io.StringIO()
    with Progress(console=Console(file=out, force_terminal=True), transient=True) as bars:
        bars.add_task("loading", total=1)
    assert "\x1b[?25l" in out.getvalue()  # the cursor is hidden meanwhile


def test_a_name_is_no_markup() -> None:
    table = Table("name")
    table.add_row("[/x] [link=http://elsewhere]here[/link]")
    assert "[/x] [link=http://elsewhere]here[/link]" in _shown(table)


def test_tabs_and_line_feeds_stay() -> None:
    assert printable("a\tb\nc\x1b") == "a\tb\nc\ufffd"


def test_every_command_prints_to_this_console() -> None:
    for path in ROOT.rglob("*.py"):
        if path.name == "terminal.py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "rich.console":
                names = {each.name for each in node.names}
                assert "Console" not in names, path
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id != "print", path
