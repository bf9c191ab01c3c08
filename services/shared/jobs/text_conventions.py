"""How a model reads texts, its pooling and its prefix: from a spec, an artifact or a checkpoint. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, ValidationError

from services.shared.jobs.artifact_layout import HEADS_FILE
from services.shared.jobs.spec import ModelSource
from services.shared.memory.architecture.pooling import (
    Pooling,
    checkpoint_pooling,
    checkpoint_prefix,
)


@dataclass(frozen=True)
class TextConventions:
    """What a model was trained with; no pooling means that of its architecture or config.json."""

    pooling: Pooling | None = None
    prefix: str = ""  # put before each text


class _HeadsFile(BaseModel):
    model_config = ConfigDict(extra="ignore")

    pooling: Pooling
    prefix: str = ""


def conventions_of(source: ModelSource, directory: Path | None) -> TextConventions:
    """Return the conventions of a model source, whose weights are in `directory` unless from a config.

    What the spec says comes first. Raises ValueError for files that cannot be read and for a pooling that
    is not supported.
    """
    pooling, prefix = source.pooling, source.prefix
    if directory is not None:
        pooling = read_pooling(directory) if pooling is None else pooling
        prefix = read_prefix(directory) if prefix is None else prefix
    return TextConventions(pooling, prefix or "")


def read_pooling(directory: Path) -> Pooling | None:
    """Return the pooling of an artifact, or that in a checkpoint's sentence-transformers files.

    Raises ValueError as `conventions_of` does.
    """
    own = _heads_file(directory)
    return checkpoint_pooling(directory) if own is None else own.pooling


def read_prefix(directory: Path) -> str:
    """Return the prefix of an artifact, or the default prompt in a checkpoint's sentence-transformers files.

    Raises ValueError for a file that cannot be read.
    """
    own = _heads_file(directory)
    return checkpoint_prefix(directory) if own is None else own.prefix


def _heads_file(directory: Path) -> _HeadsFile | None:
    path = directory / HEADS_FILE
    if not path.exists():
        return None
    try:
        return _HeadsFile.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        raise ValueError(f"{path} is damaged: {error}") from error
