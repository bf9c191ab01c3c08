"""The trainer's worker: takes teacher jobs off the queue and supervises their ranks; no torch."""

from __future__ import annotations

from services.shared.launch.worker import serve


def main() -> None:
    """Work off the queue `trainer` until SIGTERM."""
    serve("trainer", module="services.trainer.main")


if __name__ == "__main__":
    main()
