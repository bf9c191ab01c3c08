"""The teacher: read, checked against the student's heads, placed on the ranks, asked.

Legend: B texts, S tokens, C classes of a head, K tapped layers, H hidden size of the teacher.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers import AutoModelForSequenceClassification, PretrainedConfig

from services.shared.datasets.card import Head, HeadType, heads_difference
from services.shared.jobs.artifact_layout import HEADS_FILE
from services.shared.jobs.run_directory import RunDirectory
from services.shared.jobs.spec import Distillation, Recipe
from services.shared.jobs.state import Reason
from services.shared.model.artifact import (
    count_parameters,
    load_backbone,
    read_artifact,
    read_heads,
    set_heads,
)
from services.shared.model.classifier import TAPPED, is_causal, wrap_backbone
from services.shared.model.tokens import Batch, load_tokenizer
from services.shared.training.job_setup import inference_recipe, read_config, shard_model
from services.shared.training.process import RunFailed, World, blame
from services.shared.training.sharding.load import load_pretrained
from services.shared.training.sharding.shard import DTYPES, Sharded

# A replicated teacher may take this share of the memory at most: the student's training state and
# the activations of both need the rest.
REPLICATED_SHARE = 0.25
_ELSEWHERE = "ForSequenceClassification"


@dataclass(frozen=True)
class TeacherFiles:
    """A teacher on disk that answers every question of the student."""

    directory: Path
    config: PretrainedConfig
    heads: list[Head]  # its own
    columns: dict[str, list[int]]  # student head -> the teacher's class for each of its classes
    max_length: int  # tokens per text
    made_here: bool  # an artifact of this platform
    parameters: int
    size_bytes: int

    @property
    def linear_heads(self) -> bool:
        """Say whether it is a backbone with linear heads on one token, as ours are."""
        return self.made_here or is_causal(self.config)


def read_teacher(directory: Path, heads: Sequence[Head], *, max_length: int) -> TeacherFiles:
    """Read a teacher: an artifact of ours, or a Hugging Face sequence classifier made elsewhere.

    Raises RunFailed(BAD_MODEL), and RunFailed(BAD_SPEC) with both lists where its heads are not
    those of the student.
    """
    config = read_config(directory)
    made_here = (directory / HEADS_FILE).exists()
    with blame(Reason.BAD_MODEL):
        if made_here:
            artifact = read_artifact(directory)
            own, longest = artifact.heads, artifact.max_length or max_length
        else:
            own = [_head_of(config, directory, heads)]
            longest = min(
                max_length, getattr(config, "max_position_embeddings", None) or max_length
            )
        return TeacherFiles(
            directory=directory,
            config=config,
            heads=own,
            columns=match_heads(heads, own),
            max_length=longest,
            made_here=made_here,
            parameters=count_parameters(directory),
            size_bytes=sum(p.stat().st_size for p in directory.iterdir() if p.is_file()),
        )


def match_heads(student: Sequence[Head], teacher: Sequence[Head]) -> dict[str, list[int]]:
    """Return for each student head where its classes stand in the teacher's head of that name.

    Raises RunFailed(BAD_SPEC) with both lists of heads.
    """
    difference = heads_difference(student, teacher)
    if difference is not None:
        raise RunFailed(Reason.BAD_SPEC, difference)
    by_name = {head.name: head for head in teacher}
    return {
        head.name: [by_name[head.name].labels.index(label) for label in head.labels]
        for head in student
    }


class Teacher:
    """A teacher on all ranks; every call must be made by all of them where it is sharded."""

    def __init__(self, files: TeacherFiles, module: nn.Module, sharded: Sharded | None) -> None:
        self.files = files
        self.module = module.eval()
        self._sharded = sharded
        self.tokenizer = load_tokenizer(files.directory)

    @property
    def placement(self) -> str:
        """Say how it lies on the ranks."""
        return "replicated" if self._sharded is None else "sharded"

    @torch.no_grad()
    def __call__(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, tap: Sequence[int] = ()
    ) -> dict[str, Tensor]:
        """Return logits [B, C] by student head, its classes in the student's order; tapped states."""
        extra: dict[str, Any] = {"tap": tuple(tap)} if tap else {}
        found = self.module(input_ids, attention_mask, **extra)
        if self._sharded is not None:
            self._sharded.reshard()
        result = {name: found[name][:, order] for name, order in self.files.columns.items()}
        return result | ({TAPPED: found[TAPPED]} if tap else {})

    def ask(self, batch: Batch, tap: Sequence[int] = ()) -> dict[str, Tensor]:
        """Answer a batch on its device."""
        return self(batch.input_ids, batch.attention_mask, tap)


def planned_placement(run: RunDirectory, wanted: Distillation) -> str:
    """Return how the teacher is to lie on the ranks: as it was planned.

    The plan does what the spec says, but after a memory failure it may have put the teacher elsewhere.
    """
    if not run.plan.exists():
        return wanted.teacher_placement
    planned = json.loads(run.plan.read_bytes()).get("teacher_placement")
    return planned if planned in ("sharded", "replicated") else wanted.teacher_placement


def place_teacher(files: TeacherFiles, *, wanted: str, recipe: Recipe, world: World) -> Teacher:
    """Load a teacher for inference in the recipe's compute type: sharded, or whole on every rank.

    Raises RunFailed(BAD_MODEL), and RunFailed(BAD_SPEC) for a teacher that cannot be sharded.
    """
    dtype = DTYPES[recipe.compute]
    if not files.linear_heads:
        if wanted == "sharded":
            raise RunFailed(
                Reason.BAD_SPEC,
                "distillation.teacher_placement: an encoder classifier made elsewhere cannot be "
                'sharded; ask for "replicated"',
            )
        return Teacher(files, _load_elsewhere(files, dtype).to(world.device), None)
    with blame(Reason.BAD_MODEL):
        weights = _head_weights(files)
    if wanted == "replicated" or (wanted == "auto" and _fits_whole(files, dtype, world)):
        with blame(Reason.BAD_MODEL):
            backbone = load_backbone(files.directory, dtype=dtype, attention=recipe.attention)
            classifier = wrap_backbone(backbone, files.heads)
            set_heads(classifier, weights)
        return Teacher(files, classifier.requires_grad_(False).to(world.device), None)
    sharded = shard_model(files.config, files.heads, inference_recipe(recipe), world)
    load_pretrained(sharded, files.directory, seed=0, heads=weights)
    sharded.module.requires_grad_(False)
    return Teacher(files, sharded.module, sharded)


class _Elsewhere(nn.Module):
    """A Hugging Face sequence classifier in the clothes of ours: one named head."""

    def __init__(self, model: Any, head: str) -> None:
        super().__init__()
        self.model = model
        self.head = head

    def forward(self, input_ids: Tensor, attention_mask: Tensor | None) -> dict[str, Tensor]:
        output = self.model(input_ids=input_ids, attention_mask=attention_mask)
        return {self.head: output.logits.float()}


def _load_elsewhere(files: TeacherFiles, dtype: torch.dtype) -> nn.Module:
    factory: Any = AutoModelForSequenceClassification
    with blame(Reason.BAD_MODEL):
        model, info = factory.from_pretrained(
            str(files.directory),
            dtype=dtype,
            local_files_only=True,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
        if info["missing_keys"]:
            missing = min(info["missing_keys"])
            raise ValueError(f"{files.directory}: weights are missing, among them {missing}")
    return _Elsewhere(model, files.heads[0].name).requires_grad_(False)


def _head_of(config: PretrainedConfig, directory: Path, heads: Sequence[Head]) -> Head:
    """Return the one head of a classifier made elsewhere, under the name of the student's."""
    architecture = next(iter(config.architectures or []), "")
    if not architecture.endswith(_ELSEWHERE):
        raise ValueError(
            f"{directory} is no classifier: it has no {HEADS_FILE}, and its architecture "
            f"{architecture or '(none)'} is not one {_ELSEWHERE}"
        )
    names: Any = config.id2label
    labels = [names[number] for number in sorted(names)]
    many = getattr(config, "problem_type", None) == "multi_label_classification"
    name = heads[0].name if len(heads) == 1 else "labels"
    return Head(
        name=name, type=HeadType.MULTI_LABEL if many else HeadType.SINGLE_LABEL, labels=labels
    )


def _head_weights(files: TeacherFiles) -> dict[str, Tensor]:
    """Return the trained heads as `<head>.weight|bias`."""
    if files.made_here:
        return read_heads(files.directory, files.heads)
    (head,) = files.heads
    for path in sorted(files.directory.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            if "score.weight" in file.keys():  # noqa: SIM118
                weight = file.get_tensor("score.weight")
                return {
                    f"{head.name}.weight": weight,
                    f"{head.name}.bias": torch.zeros(len(weight)),
                }
    raise ValueError(f"{files.directory} holds no score.weight, the head of a decoder classifier")


def _fits_whole(files: TeacherFiles, dtype: torch.dtype, world: World) -> bool:
    """Say whether every rank can hold the whole teacher; all ranks agree."""
    whole = files.parameters * dtype.itemsize
    if world.device.type == "cuda":
        room = torch.cuda.get_device_properties(world.device).total_memory
    else:
        room = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // world.size
    (refusals,) = world.sum([float(whole > REPLICATED_SHARE * room)])
    return refusals == 0
