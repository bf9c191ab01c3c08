"""All texts that are no message of torch's device allocator, in the order in which they are tried.

The first entry that matches wins, so a specific text precedes the general one.
"""

from __future__ import annotations

from services.shared.memory.oom_log.formats import (
    devices,
    frameworks,
    host,
    kills,
    serving,
)
from services.shared.memory.oom_log.formats.text_format import TextFormat

OTHER_FORMATS: tuple[TextFormat, ...] = (
    *host.HOST_REFUSALS,
    *host.ON_CHIP,
    *host.SHARED_MEMORY,
    *serving.SERVING,
    *frameworks.FRAMEWORKS,
    *devices.RUNTIMES,
    *host.PINNED,
    *devices.DRIVERS,
    *kills.TIME_LIMITS,
    *kills.KILLS,
    *host.HOST_ERRORS,
    *kills.GENERAL_KILLS,
    *devices.UNNAMED,
)
