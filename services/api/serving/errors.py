"""Why a prediction failed.

PredictionError
├── NoActiveModel     no model is promoted under this alias, or it is still loading
├── Overloaded        the queue is full, or the deadline passed while the text was queued
├── EngineFailed      the engine raised or returned logits that are not finite
└── RefusedInput      the request itself is at fault
    ├── TextTooLong       a text has more tokens than the student was trained for
    ├── UnusableText      a text is not valid Unicode, has control characters, or has no tokens
    └── RequestTooLarge   the texts together have more tokens than the queue can ever hold
"""

from __future__ import annotations


class PredictionError(Exception):
    """The root of the tree."""


class NoActiveModel(PredictionError):
    """No model serves this alias."""

    def __init__(self, alias: str) -> None:
        super().__init__(
            f"No model serves the alias {alias!r}: promote one and wait until it is loaded."
        )
        self.alias = alias


class Overloaded(PredictionError):
    """More texts are queued than can be answered before their deadline."""

    def __init__(self, retry_after_seconds: float) -> None:
        super().__init__(f"Too many texts are queued; retry in {retry_after_seconds:.0f} seconds.")
        self.retry_after_seconds = retry_after_seconds


class EngineFailed(PredictionError):
    """The engine could not run a batch; the texts are not known to be the cause."""


class RefusedInput(PredictionError):
    """The request cannot be answered in this form, however often it is sent."""


class TextTooLong(RefusedInput):
    """One text has more tokens than the student accepts, and truncation was not requested."""

    def __init__(self, index: int, tokens: int, limit: int) -> None:
        super().__init__(
            f"Text {index} has at least {tokens} tokens; the model accepts {limit}. "
            "Shorten it or send `truncate: true`."
        )
        self.index = index
        self.tokens = tokens
        self.limit = limit


class UnusableText(RefusedInput):
    """One text cannot be tokenised; `fault` completes the sentence "Text 3 ..."."""

    def __init__(self, index: int, fault: str) -> None:
        super().__init__(f"Text {index} {fault}.")
        self.index = index


class RequestTooLarge(RefusedInput):
    """The texts of one request have more tokens than the whole queue may hold."""

    def __init__(self, tokens: int, limit: int) -> None:
        super().__init__(
            f"The texts have {tokens} tokens in total; one request may have {limit}. Split it."
        )
        self.tokens = tokens
        self.limit = limit
