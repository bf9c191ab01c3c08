"""A deletion as lines of text."""

from __future__ import annotations

from services.cli.responses import DeletionResponse


def format_deletion(deletion: DeletionResponse) -> str:
    """Return what was deleted, until when that can be undone, and with which command."""
    group = f"{deletion['resource']}s"
    until = deletion["gone_after"][:19].replace("T", " ")
    lines = [
        f"Deleted {deletion['resource']} {deletion['id']}. Its files are removed after {until} UTC; "
        f"until then: stillhouse {group} restore {deletion['id']}"
    ]
    return "\n".join([*lines, *(f"  {note}" for note in deletion["notes"])])
