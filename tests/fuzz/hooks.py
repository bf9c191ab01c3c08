"""The entry point of our schemathesis extensions (SCHEMATHESIS_HOOKS)."""

from __future__ import annotations

from tests.fuzz import problem_check, sound_requests

__all__ = ["problem_check", "sound_requests"]
