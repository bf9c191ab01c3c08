"""The trainer's worker: consumes its queue and supervises the ranks of each job, without torch."""

from __future__ import annotations

from services.shared.launch.worker import serve


def main() -> None:
    """Consume the queue `trainer` until SIGTERM."""
    serve("trainer", module="services.trainer.main")


if __name__ == "__main__":
    main()
