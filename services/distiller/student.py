"""How a student starts: from a directory, from a configuration, or from layers of its teacher."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PretrainedConfig

from services.distiller.teacher import TeacherFiles
from services.shared.jobs.artifact_layout import HEADS_FILE
from services.shared.jobs.run_directory import RunDirectory, RunInput
from services.shared.jobs.spec import DistillSpec, TrainedTokenizer
from services.shared.jobs.state import Reason
from services.shared.model.artifact import read_artifact, read_heads
from services.shared.model.classifier import make_config
from services.shared.model.tokens import load_tokenizer
from services.shared.training.job_setup import check_length, read_config, trained_tokenizer
from services.shared.training.process import RunFailed, World, blame
from services.shared.training.sharding.load import initialise, load_pretrained
from services.shared.training.sharding.shard import Sharded

# "layers.3.mlp.up_proj.weight", "encoder.layer.3.output.dense.bias", "h.3.attn.c_attn.weight"
_LAYER = re.compile(r"^(?P<list>(?:.*\.)?(?:layers?|h))\.(?P<number>\d+)\.")


@dataclass(frozen=True)
class Start:
    """What the student is, and where its first weights lie (None: drawn from the seed)."""

    config: PretrainedConfig
    tokenizer: Any
    directory: Path | None
    layers: list[int] | None = None  # of the teacher, in order; None takes all as they are


def plan_start(run: RunDirectory, task: RunInput, teacher: TeacherFiles, world: World) -> Start:
    """Return how the student starts. Raises RunFailed."""
    assert isinstance(task.spec, DistillSpec)
    source = task.spec.student
    with blame(Reason.BAD_MODEL):
        tokenizer = _tokenizer(run, task, teacher, world)
    if source.layers_of_teacher is not None:
        start = _cut(teacher, tokenizer, every=source.layers_of_teacher)
    elif task.model_dir is not None:
        start = Start(read_config(task.model_dir), tokenizer, task.model_dir)
    else:
        assert source.config is not None
        with blame(Reason.BAD_SPEC):
            config = make_config(
                source.config, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id
            )
        start = Start(config, tokenizer, None)
    if len(tokenizer) > start.config.vocab_size:
        raise RunFailed(
            Reason.BAD_SPEC,
            f"student.tokenizer knows {len(tokenizer)} tokens, the student's embedding only "
            f"{start.config.vocab_size}",
        )
    check_length(start.config, task.spec.training.max_length)
    return start


def teacher_tokenizer(spec: DistillSpec, start: Start, files: TeacherFiles) -> Any:
    """Return the teacher's tokenizer: the student's own where it has taken it over."""
    if spec.student.tokenizer == "teacher":
        return start.tokenizer
    return load_tokenizer(files.directory)


def fill_student(student: Sharded, start: Start, teacher: TeacherFiles, *, seed: int) -> None:
    """Give the student its first weights; one cut from its teacher begins with the teacher's heads.

    Raises RunFailed(BAD_MODEL).
    """
    if start.directory is None:
        initialise(student, seed=seed)
    elif start.layers is None:
        load_pretrained(student, start.directory, seed=seed)
    else:
        chosen = start.layers
        load_pretrained(
            student,
            start.directory,
            seed=seed,
            heads=_teacher_heads(student, teacher),
            source_name=lambda name: _renumbered(name, chosen),
        )


def chosen_layers(count: int, every: int) -> list[int]:
    """Return every k-th of `count` layers, the last among them: it feeds the heads.

    DistilBERT starts from every second layer of BERT likewise (Sanh et al. 2019, section 3).
    """
    return list(range(count - 1, -1, -every))[::-1]


def _cut(teacher: TeacherFiles, tokenizer: Any, *, every: int) -> Start:
    if not teacher.linear_heads:
        raise RunFailed(
            Reason.BAD_SPEC,
            "student.layers_of_teacher: an encoder classifier made elsewhere cannot be cut; "
            "give its backbone's directory as student.path",
        )
    config = read_config(teacher.directory)
    layers = chosen_layers(config.num_hidden_layers, every)
    if len(layers) == config.num_hidden_layers:
        raise RunFailed(
            Reason.BAD_SPEC,
            f"student.layers_of_teacher: the teacher has {config.num_hidden_layers} layers only",
        )
    kinds = getattr(config, "layer_types", None)
    if kinds is not None:
        config.layer_types = [kinds[i] for i in layers]
    config.num_hidden_layers = len(layers)
    return Start(config, tokenizer, teacher.directory, layers)


def _renumbered(name: str, layers: list[int]) -> str:
    """Return the teacher's name of a student's parameter."""
    found = _LAYER.match(name)
    if found is None:
        return name
    source = layers[int(found["number"])]
    return f"{found['list']}.{source}.{name[found.end() :]}"


def _teacher_heads(student: Sharded, teacher: TeacherFiles) -> dict[str, Tensor] | None:
    if not (teacher.directory / HEADS_FILE).exists():
        return None
    with blame(Reason.BAD_MODEL):
        weights = read_heads(teacher.directory, read_artifact(teacher.directory).heads)
    return {
        f"{head.name}.{part}": weights[f"{head.name}.{part}"][teacher.columns[head.name]]
        for head in student.classifier.head_specs
        for part in ("weight", "bias")
    }


def _tokenizer(run: RunDirectory, task: RunInput, teacher: TeacherFiles, world: World) -> Any:
    assert isinstance(task.spec, DistillSpec)
    wanted = task.spec.student.tokenizer
    if isinstance(wanted, TrainedTokenizer):
        return trained_tokenizer(run, task, wanted, world)
    if wanted == "teacher":
        return load_tokenizer(teacher.directory)
    assert task.model_dir is not None
    return load_tokenizer(task.model_dir)
