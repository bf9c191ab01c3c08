"""How a student is initialised: from a directory, a configuration, or layers of its teacher."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from torch import Tensor
from transformers import PretrainedConfig, PreTrainedTokenizerBase

from services.distiller.teacher import TeacherFiles
from services.shared.jobs.artifact_layout import HEADS_FILE
from services.shared.jobs.run_directory import RunDirectory, RunInput
from services.shared.jobs.spec import DistillSpec, TrainedTokenizer
from services.shared.jobs.state import Reason
from services.shared.jobs.teacher_layers import kept_layers
from services.shared.jobs.text_conventions import conventions_of
from services.shared.model.artifact import read_artifact, read_heads
from services.shared.model.classifier import build_config, set_pooling
from services.shared.model.tokens import load_tokenizer
from services.shared.training.job_setup import check_length, read_config, train_shared_tokenizer
from services.shared.training.process import RunFailed, World, fail_with
from services.shared.training.sharding.load import initialise, load_pretrained
from services.shared.training.sharding.shard import Sharded
from services.shared.training.vocabulary import KeptRows, trim_shared_vocabulary

# "layers.3.mlp.up_proj.weight", "encoder.layer.3.output.dense.bias", "h.3.attn.c_attn.weight"
_LAYER = re.compile(r"^(?P<list>(?:.*\.)?(?:layers?|h))\.(?P<number>\d+)\.")


@dataclass(frozen=True)
class StudentInit:
    """A student's configuration and tokenizer, and the source of its initial weights."""

    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    directory: Path | None  # None: drawn from the seed
    layers: list[int] | None = None  # layers of the teacher to take, in order; None: all
    vocabulary: KeptRows | None = None  # None: all rows of the embedding
    prefix: str = ""  # before each text


def plan_student(
    run: RunDirectory, task: RunInput, teacher: TeacherFiles, world: World
) -> StudentInit:
    """Return how the student is initialised. Raises RunFailed."""
    assert isinstance(task.spec, DistillSpec)
    source = task.spec.student
    with fail_with(Reason.BAD_MODEL):
        tokenizer = _tokenizer(run, task, teacher, world)
    if source.layers_of_teacher is not None:
        init = _from_teacher_layers(teacher, tokenizer, source.layers_of_teacher)
    elif task.model_dir is not None:
        init = StudentInit(read_config(task.model_dir), tokenizer, task.model_dir)
    else:
        assert source.config is not None
        with fail_with(Reason.BAD_SPEC):
            config = build_config(
                source.config, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id
            )
        init = StudentInit(config, tokenizer, None)
    if len(tokenizer) > init.config.vocab_size:
        raise RunFailed(
            Reason.BAD_SPEC,
            f"student.tokenizer has {len(tokenizer)} tokens, the student's embedding only "
            f"{init.config.vocab_size}",
        )
    check_length(init.config, task.spec.training.max_length)
    with fail_with(Reason.BAD_MODEL):
        conventions = conventions_of(source, init.directory)
    with fail_with(Reason.BAD_SPEC):
        set_pooling(init.config, conventions.pooling)
    init = replace(init, prefix=conventions.prefix)
    if not source.trim_vocabulary:
        return init
    found = trim_shared_vocabulary(run, task, tokenizer, init.config, world, prefix=init.prefix)
    return replace(init, config=found.config, tokenizer=found.tokenizer, vocabulary=found.kept)


def teacher_tokenizer(
    spec: DistillSpec, init: StudentInit, files: TeacherFiles
) -> PreTrainedTokenizerBase:
    """Return the teacher's tokenizer: the same object as the student's where they share it."""
    if spec.student.tokenizer == "teacher" and init.vocabulary is None:
        return init.tokenizer
    return load_tokenizer(files.directory, files.text_kind)


def load_student(student: Sharded, init: StudentInit, teacher: TeacherFiles, *, seed: int) -> None:
    """Set the student's initial weights; one made of teacher layers also takes the teacher's heads.

    Raises RunFailed(BAD_MODEL).
    """
    vocabulary = None if init.vocabulary is None else init.vocabulary.rows
    if init.directory is None:
        initialise(student, seed=seed)
    elif init.layers is None:
        load_pretrained(student, init.directory, seed=seed, vocabulary=vocabulary)
    else:
        layers = init.layers
        load_pretrained(
            student,
            init.directory,
            seed=seed,
            heads=_teacher_heads(student, teacher),
            source_name=lambda name: _teacher_name(name, layers),
            vocabulary=vocabulary,
        )


def _from_teacher_layers(
    teacher: TeacherFiles, tokenizer: PreTrainedTokenizerBase, wanted: int | Sequence[int]
) -> StudentInit:
    if not teacher.has_linear_heads:
        raise RunFailed(
            Reason.BAD_SPEC,
            "student.layers_of_teacher: layers of a plain Hugging Face encoder classifier cannot be "
            "taken; give its backbone's directory as student.path",
        )
    config = read_config(teacher.directory)
    try:
        layers = kept_layers(wanted, num_layers=config.num_hidden_layers)
    except ValueError as error:
        raise RunFailed(Reason.BAD_SPEC, f"student.layers_of_teacher: {error}") from error
    layer_types = getattr(config, "layer_types", None)
    if layer_types is not None:
        config.layer_types = [layer_types[i] for i in layers]
    dense = getattr(config, "first_k_dense_replace", None)
    if dense is not None:
        config.first_k_dense_replace = sum(layer < dense for layer in layers)
    config.num_hidden_layers = len(layers)
    return StudentInit(config, tokenizer, teacher.directory, layers)


def _teacher_name(name: str, layers: list[int]) -> str:
    """Return the teacher's name for a parameter of the student."""
    match = _LAYER.match(name)
    if match is None:
        return name
    source = layers[int(match["number"])]
    return f"{match['list']}.{source}.{name[match.end() :]}"


def _teacher_heads(student: Sharded, teacher: TeacherFiles) -> dict[str, Tensor] | None:
    """Return the teacher's heads in the student's class order; None for a plain decoder classifier."""
    if not (teacher.directory / HEADS_FILE).exists():
        return None
    with fail_with(Reason.BAD_MODEL):
        weights = read_heads(teacher.directory, read_artifact(teacher.directory).heads)
    return {
        f"{head.name}.{part}": weights[f"{head.name}.{part}"][teacher.columns[head.name]]
        for head in student.classifier.head_specs
        for part in ("weight", "bias")
    }


def _tokenizer(
    run: RunDirectory, task: RunInput, teacher: TeacherFiles, world: World
) -> PreTrainedTokenizerBase:
    assert isinstance(task.spec, DistillSpec)
    source = task.spec.student.tokenizer
    if isinstance(source, TrainedTokenizer):
        return train_shared_tokenizer(run, task, source, world)
    if source == "teacher":
        return load_tokenizer(teacher.directory, teacher.text_kind)
    assert task.model_dir is not None
    return load_tokenizer(task.model_dir, teacher.text_kind)
