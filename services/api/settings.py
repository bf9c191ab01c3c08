"""Settings of the API, in addition to those it shares with the workers."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Literal

from pydantic import Field

from services.shared.jobs.settings import JobSettings

MIB = 1024 * 1024


class ApiSettings(JobSettings):
    """Listen address, request limits and event-stream timing."""

    host: str = "127.0.0.1"
    port: int = Field(8000, ge=0, le=65_535)
    api_keys_file: Path | None = Field(
        None,
        description="JSON: name -> {sha256, project, scopes}. Required unless `host` is loopback.",
    )
    api_keys_poll_seconds: float = Field(
        5.0,
        gt=0,
        description="How often the keys file is checked for changes; SIGHUP reads it now.",
    )
    json_limit_bytes: int = Field(
        MIB, gt=0, description="Maximum body size of an ordinary request."
    )
    upload_limit_bytes: int = Field(
        512 * MIB, gt=0, description="Maximum body size of POST /datasets."
    )
    log_limit_bytes: int = Field(8 * MIB, gt=0, description="Maximum body size of POST /diagnoses.")
    predict_most_texts: int = Field(
        1024, gt=0, description="Maximum number of texts in one predict request."
    )
    uploads_at_once: int = Field(
        8, gt=0, description="Maximum number of concurrent uploads; further ones get 429."
    )
    validations_at_once: int = Field(
        2, gt=0, description="Maximum number of uploads validated concurrently; the others wait."
    )
    validation_memory_bytes: int = Field(
        2048 * MIB,
        ge=512 * MIB,
        description="Address space limit of the process that reads an upload.",
    )
    validation_seconds: float = Field(
        1800.0, gt=0, description="CPU time limit of the process that reads an upload."
    )
    calculation_seconds: float = Field(
        10.0, gt=0, description="CPU time limit of a memory plan or a diagnosis; 422 beyond it."
    )
    calculation_memory_bytes: int = Field(
        1024 * MIB,
        ge=256 * MIB,
        description="Address space limit of the process that calculates a memory plan or a diagnosis.",
    )
    predict_per_second: float = Field(
        1000.0,
        ge=0,
        description="Requests per second that one key may send to /predict and /v1/classify; 0: no limit.",
    )
    requests_per_second: float = Field(
        50.0,
        ge=0,
        description="Requests per second that one key may send to all other routes; 0: no limit.",
    )
    rate_burst_seconds: float = Field(
        10.0,
        gt=0,
        description="Burst capacity of each key, in seconds of its rate.",
    )
    wrong_keys_per_minute: float = Field(
        60.0,
        ge=0,
        description="Requests per minute with an invalid or missing key that one address may send (401); "
        "further ones get 429. 0: no limit.",
    )
    max_connections: int = Field(
        2000, gt=0, description="Maximum number of open connections; further ones get 503."
    )
    max_connections_per_address: int = Field(
        500,
        gt=0,
        description="Maximum number of open connections of one address; behind a proxy, of all clients.",
    )
    header_seconds: float = Field(
        10.0, gt=0, description="Deadline for the header of a request; 408 after it."
    )
    body_bytes_per_second: float = Field(
        1024.0, ge=0, description="Minimum rate at which a body must arrive; 408 below it."
    )
    body_grace_seconds: float = Field(
        10.0, gt=0, description="Time over which the rate of a body is measured."
    )
    body_seconds: float = Field(
        3600.0, gt=0, description="Deadline for a whole body, at any rate; 408 after it."
    )
    write_seconds: float = Field(
        60.0,
        gt=0,
        description="A client that reads nothing of a response is disconnected after this.",
    )
    local_users: Literal["own", "any"] = Field(
        "own",
        description="Whose connections a server without keys accepts: of the user that runs it and of root, "
        "or of any user of this machine.",
    )
    trusted_proxies: str | None = Field(
        None,
        description="Comma-separated addresses of proxies whose X-Forwarded-For names the client; "
        "by default the header is ignored.",
    )
    event_streams_per_key: int = Field(
        32,
        gt=0,
        description="Maximum number of open event streams of one key; further ones get 429.",
    )
    event_streams: int = Field(
        500, gt=0, description="Maximum number of open event streams; further ones get 429."
    )
    event_poll_seconds: float = Field(
        0.5, gt=0, description="How often an open event stream polls for new events."
    )
    event_ping_seconds: float = Field(
        15.0, gt=0, description="A stream idle for this long sends a comment."
    )
    event_stream_seconds: float | None = Field(
        None, gt=0, description="Maximum duration of a stream; by default it ends with its job."
    )

    session_seconds: float = Field(
        3600.0,
        gt=0,
        description="A browser that is signed in to the console and closed for this long is signed out.",
    )
    session_most_seconds: float = Field(
        12 * 3600.0, gt=0, description="The longest time that a browser stays signed in."
    )

    @property
    def uploads_dir(self) -> Path:
        return self.data_dir / "uploads"


def is_loopback(host: str) -> bool:
    """Return whether a host name or address is a loopback one."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
