"""What the API needs to know beyond what it shares with the workers."""

from __future__ import annotations

import ipaddress
from pathlib import Path

from pydantic import Field

from services.shared.jobs.settings import JobSettings

MIB = 1024 * 1024


class ApiSettings(JobSettings):
    """Where the API listens, what it refuses for its size, and how it watches jobs."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65_535)
    api_keys_file: Path | None = Field(
        None, description="JSON: name -> {sha256, scopes}. Needed unless `host` is loopback."
    )
    json_limit_bytes: int = Field(MIB, gt=0, description="Largest body of an ordinary request.")
    upload_limit_bytes: int = Field(512 * MIB, gt=0, description="Largest body of POST /datasets.")
    log_limit_bytes: int = Field(8 * MIB, gt=0, description="Largest body of POST /diagnoses.")
    predict_most_texts: int = Field(1024, gt=0, description="Most texts in one predict request.")
    event_poll_seconds: float = Field(
        0.5, gt=0, description="How often an open event stream looks for new events."
    )
    event_ping_seconds: float = Field(
        15.0, gt=0, description="A stream that says nothing so long sends a comment."
    )

    event_stream_seconds: float | None = Field(
        None, gt=0, description="A stream ends after so long; when the job ends if left out."
    )

    @property
    def uploads_dir(self) -> Path:
        return self.data_dir / "uploads"


def is_loopback(host: str) -> bool:
    """Return whether a host's name or address is this machine's own."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
