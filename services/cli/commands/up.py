"""`stillhouse up`: runs the embedded platform on this machine until Ctrl-C or SIGTERM."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer

from services.cli.embedded.platform import Platform, start_platform
from services.cli.embedded.servers import StartFailed
from services.cli.terminal import Console
from services.shared.files.atomic_write import write_text

_POLL_SECONDS = 0.5


class _StopRequested(BaseException):
    """A signal requested a stop; raised by the handler, so that it interrupts any wait."""


def up(
    data_dir: Annotated[
        Path,
        typer.Option(
            "--data-dir", help="Directory for the database, queue, datasets, runs, models and logs."
        ),
    ] = Path(".stillhouse/data"),
    port: Annotated[
        int,
        typer.Option("--port", min=0, max=65_535, help="Port of the API; 0 selects a free one."),
    ] = 8000,
    models: Annotated[
        list[Path] | None,
        typer.Option(
            "--models", help="Directory in which jobs may refer to base models; repeatable."
        ),
    ] = None,
    ready_file: Annotated[
        Path | None,
        typer.Option(
            "--ready-file",
            help="Write the URL and pids to this file, as JSON, once the platform is ready.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Also print that JSON as one line on standard output.")
    ] = False,
) -> None:
    """Run the database, queue, API and workers on this machine until Ctrl-C."""
    console = Console(stderr=True, highlight=False)

    def notify(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, _request_stop)
    platform: Platform | None = None
    try:
        platform = start_platform(data_dir, port=port, models=models or [], notify=notify)
        _announce(platform, ready_file, as_json=as_json)
        notify(
            f"Stillhouse is ready at {platform.url} (docs: {platform.url}/docs). Ctrl-C stops it."
        )
        while True:
            time.sleep(_POLL_SECONDS)
            if platform.restart_exited(notify):
                _announce(platform, ready_file, as_json=False)
    except StartFailed as error:
        notify(f"up: {error}")
        raise typer.Exit(1) from error
    except _StopRequested:
        notify("Stopping; running jobs save a checkpoint first.")
    finally:
        _ignore_signals()
        if ready_file is not None:
            ready_file.unlink(missing_ok=True)
        if platform is not None:
            platform.stop()
    notify("Stopped.")


def _request_stop(number: int, frame: FrameType | None) -> None:  # noqa: ARG001  (signal's signature)
    _ignore_signals()
    raise _StopRequested


def _ignore_signals() -> None:
    """Ignore further signals: a second Ctrl-C must not interrupt the shutdown."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)


def _announce(platform: Platform, ready_file: Path | None, *, as_json: bool) -> None:
    if ready_file is not None:
        write_text(ready_file, platform.to_json() + "\n")
    if as_json:
        sys.stdout.write(platform.to_json() + "\n")
        sys.stdout.flush()
