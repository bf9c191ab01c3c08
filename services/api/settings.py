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
    uploads_at_once: int = Field(
        8, gt=0, description="Uploads taken at the same time; further ones get 429."
    )
    validations_at_once: int = Field(
        2, gt=0, description="Uploads that are read row by row at the same time; the others wait."
    )
    validation_memory_bytes: int = Field(
        2048 * MIB, ge=512 * MIB, description="What a process that reads a Parquet upload may map."
    )
    predict_per_second: float = Field(
        1000.0,
        ge=0,
        description="Requests a second that one key may send to /predict and /v1/classify; 0: no limit.",
    )
    requests_per_second: float = Field(
        50.0,
        ge=0,
        description="Requests a second that one key may send to everything else; 0: no limit.",
    )
    rate_burst_seconds: float = Field(
        10.0,
        gt=0,
        description="A key that was silent may send what so many seconds allow, at once.",
    )
    wrong_keys_per_minute: float = Field(
        60.0,
        ge=0,
        description="Requests a minute of one address that are told 401, for want of a right key; "
        "further ones get 429. 0: no limit.",
    )
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
