"""What schemathesis loads of ours (SCHEMATHESIS_HOOKS): a check, and requests that can succeed."""

from __future__ import annotations

from tests.fuzz import problem_check, sound_requests

__all__ = ["problem_check", "sound_requests"]
