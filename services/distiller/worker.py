"""The distiller's worker: consumes its queue and supervises the ranks of each job, without torch."""

from __future__ import annotations

from services.shared.launch.worker import serve


def main() -> None:
    """Consume the queue `distiller` until SIGTERM."""
    serve("distiller", module="services.distiller.main")


if __name__ == "__main__":
    main()
