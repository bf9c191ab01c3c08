"""Errors of the package, as messages for the user."""


class FetchFailed(Exception):
    """The model directory could not be made."""


class UnreadableWeights(FetchFailed):
    """A package's file is not of the expected format."""


class GoldenMismatch(FetchFailed):
    """The model as written does not give the known outputs."""
