"""The distiller's worker: takes distillations off the queue and supervises their ranks; no torch."""

from __future__ import annotations

from services.shared.launch.worker import serve


def main() -> None:
    """Work off the queue `distiller` until SIGTERM."""
    serve("distiller", module="services.distiller.main")


if __name__ == "__main__":
    main()
