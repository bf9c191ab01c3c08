"""How uvicorn serves the application: HTTP/1.1 by h11, with limits on every connection."""

from __future__ import annotations

import uvicorn
from fastapi import FastAPI

from services.api.limits.connections import MAX_HEADER_BYTES, ConnectionLimits, limited_protocol
from services.api.settings import ApiSettings

GRACE_SECONDS = 10  # for requests in flight at shutdown


def server_config(app: FastAPI, settings: ApiSettings) -> uvicorn.Config:
    """Return the configuration of a server of `app`."""
    limits = ConnectionLimits(
        max_connections=settings.max_connections,
        max_per_address=settings.max_connections_per_address,
        header_seconds=settings.header_seconds,
        body_bytes_per_second=settings.body_bytes_per_second,
        body_grace_seconds=settings.body_grace_seconds,
        body_seconds=settings.body_seconds,
        write_seconds=settings.write_seconds,
        # Without keys a port of loopback is open to every user of the machine.
        own_user_only=lambda: settings.local_users == "own" and app.state.context.keys.is_empty,
    )
    return uvicorn.Config(
        app,
        host=settings.host,
        port=settings.port,
        # httptools, uvicorn's faster parser, has no limit on the size of a header.
        http=limited_protocol(limits),
        h11_max_incomplete_event_size=MAX_HEADER_BYTES,
        ws="none",
        # Any local process could name another address, and evade the limits by address.
        proxy_headers=settings.trusted_proxies is not None,
        forwarded_allow_ips=settings.trusted_proxies,
        log_config=None,  # see configure_logs
        access_log=False,  # /metrics counts requests; failures are logged with their request id
        server_header=False,
        timeout_graceful_shutdown=GRACE_SECONDS,
    )
