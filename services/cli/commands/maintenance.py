"""`stillhouse maintenance`: stop writes and claims for a while, with a reason."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from services.cli.client import DEFAULT_URL, ApiKey, AsJson, Url, open_client, print_json
from services.cli.terminal import Console

app = typer.Typer(no_args_is_help=True, help="Stop writes and claims for a while.")


@app.command("on")
def turn_on(
    reason: Annotated[
        str, typer.Option("--reason", help="What every refused client is shown, and when it ends.")
    ],
    as_json: AsJson = False,
    url: Url = DEFAULT_URL,
    api_key: ApiKey = None,
) -> None:
    """Refuse writes and let workers claim nothing; running jobs, reads and predictions go on."""
    with open_client(url, api_key, as_json=as_json) as client:
        _show(client.post("/maintenance", json={"on": True, "reason": reason}), as_json=as_json)


@app.command("off")
def turn_off(as_json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Accept writes and claim jobs again."""
    with open_client(url, api_key, as_json=as_json) as client:
        _show(client.post("/maintenance", json={"on": False}), as_json=as_json)


@app.command("show")
def show(as_json: AsJson = False, url: Url = DEFAULT_URL, api_key: ApiKey = None) -> None:
    """Show whether maintenance mode is on."""
    with open_client(url, api_key, as_json=as_json) as client:
        _show(client.get("/maintenance"), as_json=as_json)


def _show(state: dict[str, Any], *, as_json: bool) -> None:
    if as_json:
        print_json(state)
        return
    current = state["current"]
    line = "Maintenance mode is off."
    if current is not None:
        since = current["started_at"][:16].replace("T", " ")
        line = f"Maintenance mode is on since {since} UTC by {current['started_by']}: {current['reason']}"
    Console().print(line, markup=False, highlight=False, soft_wrap=True)
