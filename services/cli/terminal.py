"""The console that every command prints to: names and messages cannot drive the reader's terminal.

A label, a file name or a rank's output may hold escape sequences, which retitle a window, hide lines or
answer as if typed. They may also hold bidirectional controls, which show text in another order.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console as _Console
from rich.console import ConsoleOptions, RenderableType
from rich.segment import Segment

_REPLACEMENT = "\ufffd"
# C0 except tab and line feed, DEL, C1 (U+009B begins a sequence too), and bidirectional controls.
_CONTROLS = [
    *(code for code in range(0x20) if chr(code) not in "\t\n"),
    *range(0x7F, 0xA0),
    *(0x061C, 0x200E, 0x200F, 0x2028, 0x2029),
    *range(0x202A, 0x202F),
    *range(0x2066, 0x206A),
]
_TABLE = dict.fromkeys(_CONTROLS, _REPLACEMENT)


def printable(text: str) -> str:
    """Return `text` with each control character replaced by U+FFFD; tabs and line feeds stay."""
    return text.translate(_TABLE)


class Console(_Console):
    """A rich console whose texts hold no control characters; its own colours stay.

    Markup is off unless asked for: a name like `[/x]` would end a command with an error.
    """

    def __init__(self, *, markup: bool = False, **options: Any) -> None:
        super().__init__(markup=markup, **options)

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterable[Segment]:
        """Render without control characters."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control else Segment(printable(text), style)
