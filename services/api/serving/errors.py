"""What a prediction can end in instead of an answer.

PredictionError
├── NoStudent         nothing is promoted under this alias, or it is still loading
├── Overloaded        the queue is full, or the deadline passed while the text waited
├── EngineFailed      the engine raised or answered with numbers that are none
└── RefusedInput      the request itself
    ├── TextTooLong       one text has more tokens than the student was trained for
    ├── UnusableText      one text is not valid Unicode, has control characters, or no token is left of it
    └── RequestTooLarge   all texts together are more than the queue can ever hold
"""

from __future__ import annotations


class PredictionError(Exception):
    """The root of the tree."""


class NoStudent(PredictionError):
    """No student serves this alias."""

    def __init__(self, alias: str) -> None:
        super().__init__(
            f"No student serves the alias {alias!r}: promote a model and wait until it is loaded."
        )
        self.alias = alias


class Overloaded(PredictionError):
    """More texts wait than can be answered before their deadline."""

    def __init__(self, retry_after_seconds: float) -> None:
        super().__init__(
            f"Too many texts are waiting; try again in {retry_after_seconds:.0f} seconds."
        )
        self.retry_after_seconds = retry_after_seconds


class EngineFailed(PredictionError):
    """The engine could not run a batch; the texts are not to blame as far as is known."""


class RefusedInput(PredictionError):
    """The request cannot be answered as it stands, now or later."""


class TextTooLong(RefusedInput):
    """One text has more tokens than the student takes, and truncation was not asked for."""

    def __init__(self, index: int, tokens: int, limit: int) -> None:
        super().__init__(
            f"Text {index} has {tokens} tokens or more; the model takes {limit}. "
            "Shorten it or send `truncate: true`."
        )
        self.index = index
        self.tokens = tokens
        self.limit = limit


class UnusableText(RefusedInput):
    """One text cannot be turned into tokens."""

    def __init__(self, index: int, why: str) -> None:
        super().__init__(f"Text {index} {why}.")
        self.index = index


class RequestTooLarge(RefusedInput):
    """The texts of one request are more tokens than the whole queue may hold."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            f"The texts have {tokens} tokens together; one request may have {limit}. Split it."
        )
        self.tokens = tokens
        self.limit = limit
