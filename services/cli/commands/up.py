"""`stillhouse up`: the embedded platform on this machine, until Ctrl-C or SIGTERM."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.console import Console

from services.cli.embedded.platform import Platform, start_platform
from services.cli.embedded.servers import StartFailed
from services.shared.files.atomic_write import write_text

_LOOK_SECONDS = 0.5


class _StopRequested(BaseException):
    """A signal asked us to stop; raised wherever we are, so that waiting ends at once."""


def up(
    data_dir: Annotated[
        Path, typer.Option("--data-dir", help="Database, queue, datasets, runs, models, logs.")
    ] = Path(".stillhouse/data"),
    port: Annotated[
        int, typer.Option("--port", min=0, max=65_535, help="Of the API; 0 takes a free one.")
    ] = 8000,
    models: Annotated[
        list[Path] | None,
        typer.Option(
            "--models", help="Directory below which jobs may name base models; repeatable."
        ),
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option("--ready-file", help="Write URL and pids there, as JSON, once all is ready."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print the same JSON line on standard output.")
    ] = False,
) -> None:
    """Run database, queue, API and workers on this machine until Ctrl-C."""
    console = Console(stderr=True, highlight=False)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _request_stop)
    platform: Platform | None = None
    try:
        platform = start_platform(data_dir, port=port, models=models or [], say=say)
        _announce(platform, ready_file, as_json=as_json)
        say(f"Stillhouse is ready at {platform.url} (docs: {platform.url}/docs). Ctrl-C stops it.")
        while True:
            time.sleep(_LOOK_SECONDS)
            if platform.look_after(say):
                _announce(platform, ready_file, as_json=False)
    except StartFailed as error:
        say(f"up: {error}")
        raise typer.Exit(1) from error
    except _StopRequested:
        say("Stopping; a job under way saves a checkpoint first.")
    finally:
        _ignore_signals()
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)
        if platform is not None:
            platform.stop()
    say("Stopped.")


def _request_stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  (signal's signature)
    _ignore_signals()
    raise _StopRequested


def _ignore_signals() -> None:
    """Let a stop run to its end: a second Ctrl-C must not leave half of it."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _announce(platform: Platform, ready_file: Path | None, *, as_json: bool) -> None:
    if ready_file is not None:
        write_text(ready_file, platform.to_json() + "\n")
    if as_json:
        sys.stdout.write(platform.to_json() + "\n")
        sys.stdout.flush()
