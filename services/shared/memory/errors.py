"""The error of the memory package: an input that cannot be planned."""

from collections.abc import Iterable


class InvalidInput(ValueError):
    """An input is missing, malformed or out of range; names the field and what it accepts."""

    def __init__(self, field: str, problem: str, *, accepted: str | Iterable[str] = "") -> None:
        self.field = field
        self.problem = problem
        self.accepted = accepted if isinstance(accepted, str) else ", ".join(accepted)
        accepted_text = f"; accepted: {self.accepted}" if self.accepted else ""
        super().__init__(f"{field}: {problem}{accepted_text}")
