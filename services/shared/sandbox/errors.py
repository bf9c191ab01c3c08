"""Why a call in a sandbox gave no result.

SandboxError
├── LimitExceeded     the input needs more time or memory than it may have
│   ├── TooSlow
│   └── TooLarge
├── SandboxBusy       no process was free, or the machine had no time for it
└── SandboxFailed     a fault of ours: the function raised, or the fork server does not start
"""

from __future__ import annotations


class SandboxError(Exception):
    """The root of the tree."""


class LimitExceeded(SandboxError):
    """The call needed more than its limits allow."""


class TooSlow(LimitExceeded):
    """The call was ended after its time."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"did not finish within {seconds:g} s")


class TooLarge(LimitExceeded):
    """The call was ended because it needed more memory."""

    def __init__(self, memory_bytes: int) -> None:
        super().__init__(f"needs more than {memory_bytes:,} bytes of memory")


class SandboxBusy(SandboxError):
    """As many calls as are allowed run or wait already, or the machine is too busy for one."""


class SandboxFailed(SandboxError):
    """The call failed through a fault of ours; the message names the place, and no user's text."""
