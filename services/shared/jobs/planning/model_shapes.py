"""The shapes of the models that a spec names, as the memory plan reads them; no weights are read."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from services.shared.datasets.card import Head, HeadType
from services.shared.jobs.artifact_layout import HEADS_FILE
from services.shared.jobs.errors import InvalidRequest
from services.shared.jobs.resolved_spec import ResolvedSpec
from services.shared.jobs.spec import ModelSource, TeacherSpec, TrainedTokenizer
from services.shared.jobs.teacher_layers import kept_layers
from services.shared.memory.architecture import shape
from services.shared.memory.architecture.dimensions import BERT_LIKE, Family
from services.shared.memory.architecture.pooling import Pooling
from services.shared.memory.errors import InvalidInput

_heads: TypeAdapter[list[Head]] = TypeAdapter(list[Head])


def read_heads(directory: Path, student: Sequence[Head]) -> list[Head] | None:
    """Return the heads of an artifact of ours, or the one of a classifier made elsewhere.

    That one has no name: it takes the name of the student's only head. None where the files do not
    define them or cannot be read.
    """
    try:
        if (directory / HEADS_FILE).exists():
            return _heads.validate_python(_read(directory / HEADS_FILE)["heads"])
        config = _read(directory / "config.json")
        names = config["id2label"]
        labels = [str(names[number]) for number in sorted(names, key=int)]
        many = config.get("problem_type") == "multi_label_classification"
        kind = HeadType.MULTI_LABEL if many else HeadType.SINGLE_LABEL
        name = student[0].name if len(student) == 1 else "labels"
        return [Head(name=name, type=kind, labels=labels)]
    except (OSError, KeyError, TypeError, AttributeError, ValueError, ValidationError):
        return None


def _read(path: Path) -> Any:
    return json.loads(path.read_text("utf-8"))


ENCODERS = BERT_LIKE | {Family.MODERNBERT}


@dataclass(frozen=True)
class Teacher:
    """The teacher of a distillation; `unshardable` if our ranks cannot shard it."""

    shape: shape.Shape
    unshardable: bool = False


def shape_of(
    source: ModelSource,
    *,
    directory: Path | None,
    classes: Sequence[int],
    teacher: shape.Shape | None = None,
) -> shape.Shape:
    """Return the shape of a model source with a head for each of `classes`.

    `directory` is that of `source.path` or `source.model_id`; a student that starts from a config
    takes the vocabulary size of `teacher`. Raises InvalidInput for an
    architecture that is not known and for a config that leaves sizes to defaults.
    """
    if directory is not None:
        found = shape.from_pretrained_directory(directory, heads=classes, pooling=source.pooling)
        return _pooled(found, source.pooling)
    assert source.config is not None
    config = dict(source.config)
    if isinstance(source.tokenizer, TrainedTokenizer):
        config["vocab_size"] = source.tokenizer.vocab_size
    elif source.tokenizer == "teacher" and teacher is not None:
        config["vocab_size"] = teacher.dims.vocab_size
    found = shape.from_config(config, heads=classes, name=str(config["model_type"]))
    return _pooled(found, source.pooling)


def _pooled(found: shape.Shape, pooling: Pooling | None) -> shape.Shape:
    """Return a shape with the pooling that a spec asks for. Raises InvalidInput where it cannot have that."""
    if pooling is None:
        return found
    own = Pooling.FIRST if found.dims.family in ENCODERS else Pooling.LAST
    if pooling not in (own, Pooling.MEAN):
        raise InvalidInput(
            "model.pooling", f"{found.dims.family} has no {pooling}", accepted=(own, Pooling.MEAN)
        )
    return found.with_pooling(pooling)


def model_of(resolved: ResolvedSpec, teacher: Teacher | None) -> shape.Shape:
    """Return the shape of the model that a job trains; a student may be cut from its teacher.

    With `trim_vocabulary` it has all rows of the embedding until the kept ones have been counted.
    Raises InvalidInput, and InvalidRequest for layers that the teacher does not have.
    """
    found = _model_of(resolved, teacher)
    rows = resolved.vocabulary_rows
    return found if rows is None else found.with_vocabulary(rows)


def _model_of(resolved: ResolvedSpec, teacher: Teacher | None) -> shape.Shape:
    source, teacher_shape = resolved.source, None if teacher is None else teacher.shape
    if teacher_shape is not None and source.layers_of_teacher is not None:
        try:
            layers = kept_layers(source.layers_of_teacher, num_layers=teacher_shape.dims.num_layers)
        except ValueError as error:
            field = "student.layers_of_teacher"
            raise InvalidRequest(f"{field}: {error}", field=field) from error
        own = teacher_shape.with_only_layers(layers).with_heads(resolved.num_classes)
        return _pooled(own, source.pooling)
    return shape_of(
        source, directory=resolved.model_dir, classes=resolved.num_classes, teacher=teacher_shape
    )


def teacher_of(resolved: ResolvedSpec) -> Teacher:
    """Return the teacher of a distillation, which may be a job that has not ended yet.

    Raises InvalidRequest for a job that trains a student, and InvalidInput.
    """
    teacher = resolved.teacher
    assert teacher is not None
    if teacher.directory is not None:
        return read_teacher(teacher.directory, classes=resolved.num_classes)
    if not isinstance(teacher.job_spec, TeacherSpec):
        raise InvalidRequest(
            "teacher.job_id: that job distils a student that does not exist yet",
            field="teacher.job_id",
        )
    source, directory = teacher.job_spec.model, teacher.base_dir
    return Teacher(shape_of(source, directory=directory, classes=resolved.num_classes))


def read_teacher(directory: Path, *, classes: Sequence[int]) -> Teacher:
    """Return the teacher in `directory`. Raises InvalidInput.

    An encoder classifier made elsewhere has its own head, which the ranks cannot shard.
    """
    found = shape.from_pretrained_directory(directory, heads=classes)
    made_here = (directory / HEADS_FILE).exists()
    return Teacher(found, unshardable=not made_here and found.dims.family in ENCODERS)
