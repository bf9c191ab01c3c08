"""`stillhouse audit`: who wrote what."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.table import Column, Table

from services.cli.client import DEFAULT_URL, ApiKey, AsJson, Url, open_client, print_json
from services.cli.terminal import Console


def audit(
    key: Annotated[str | None, typer.Option("--key", help="Only by the key of this name.")] = None,
    project: Annotated[
        str | None, typer.Option("--project", help="Only by keys of this project.")
    ] = None,
    action: Annotated[
        str | None, typer.Option("--action", help="Only this action, for example promote_model.")
    ] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Only what changed or created this id.")
    ] = None,
    limit: Annotated[int, typer.Option("--limit", min=1, max=500)] = 50,
    cursor: Annotated[
        str | None, typer.Option("--cursor", help="The next_cursor of the previous page.")
    ] = None,
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """List who wrote what, newest first; needs a key with the scope admin."""
    wanted = {"key": key, "project": project, "action": action, "target": target}
    with open_client(url, api_key, as_json=as_json) as client:
        page = client.get("/audit", params=wanted | {"limit": limit, "cursor": cursor})
    if as_json:
        print_json(page)
        return
    table = Table("time", "key", "project", "action", Column("target", no_wrap=True), "outcome")
    for entry in page["items"]:
        ids = [entry[name] for name in ("target", "created") if entry[name]]
        table.add_row(
            entry["created_at"][:19].replace("T", " "),
            entry["key_name"],
            entry["project"],
            entry["action"],
            " -> ".join(ids),
            f"{entry['outcome']} {entry['status'] or ''}",
        )
    Console().print(table)
    if page["next_cursor"]:
        Console(stderr=True).print(f"More: --cursor {page['next_cursor']}")
