"""The frozen teacher: read from disk, its heads matched to the student's, placed on the ranks.

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
from services.shared.datasets.text import TextKind
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
from services.shared.model.classifier import (
    TAPPED,
    is_causal,
    pooling_of,
    set_pooling,
    wrap_backbone,
)
from services.shared.model.tokens import Batch, load_tokenizer
from services.shared.training.job_setup import inference_recipe, read_config, shard_model
from services.shared.training.process import RunFailed, World, fail_with
from services.shared.training.sharding.load import load_pretrained
from services.shared.training.sharding.shard import DTYPES, Sharded

# A replicated teacher may take at most this share of the memory: the student's training state and
# the activations of both models need the rest.
REPLICATED_SHARE = 0.25
_ARCHITECTURE_SUFFIX = "ForSequenceClassification"


@dataclass(frozen=True)
class TeacherFiles:
    """A teacher on disk whose heads cover those of the student."""

    directory: Path
    config: PretrainedConfig
    heads: list[Head]  # of the teacher
    columns: dict[
        str, list[int]
    ]  # by student head: the teacher's class index of each of its classes
    text_kind: TextKind
    max_length: int  # tokens per text
    prefix: str  # before each text
    is_artifact: bool  # an artifact of this platform, not a plain Hugging Face classifier
    parameters: int
    size_bytes: int

    @property
    def has_linear_heads(self) -> bool:
        """Return whether the model is a backbone with linear heads on one token, as our artifacts are."""
        return self.is_artifact or is_causal(self.config)


def read_teacher(
    directory: Path, heads: Sequence[Head], *, text_kind: TextKind, max_length: int
) -> TeacherFiles:
    """Read a teacher: an artifact of this platform, or any Hugging Face sequence classifier.

    Raises RunFailed(BAD_MODEL), and RunFailed(BAD_SPEC) with both lists of heads where the teacher
    lacks one of the student's, or where it was trained on another kind of texts.
    """
    config = read_config(directory)
    is_artifact = (directory / HEADS_FILE).exists()
    with fail_with(Reason.BAD_MODEL):
        if is_artifact:
            artifact = read_artifact(directory)
            own, longest = artifact.heads, artifact.max_length or max_length
            if artifact.text_kind is not text_kind:
                raise RunFailed(
                    Reason.BAD_SPEC,
                    f"the teacher was trained on texts of the kind {artifact.text_kind}, but those of the "
                    f"dataset are {text_kind}",
                )
            prefix = artifact.prefix
            set_pooling(config, artifact.pooling)
        else:
            prefix = ""
            own = [_classifier_head(config, directory, heads)]
            longest = min(
                max_length, getattr(config, "max_position_embeddings", None) or max_length
            )
        return TeacherFiles(
            directory=directory,
            config=config,
            heads=own,
            columns=match_heads(heads, own),
            text_kind=text_kind,
            max_length=longest,
            prefix=prefix,
            is_artifact=is_artifact,
            parameters=count_parameters(directory),
            size_bytes=sum(p.stat().st_size for p in directory.rglob("*") if p.is_file()),
        )


def match_heads(student: Sequence[Head], teacher: Sequence[Head]) -> dict[str, list[int]]:
    """Return by student head the index of each of its classes in the teacher's head of that name.

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
    """A teacher on all ranks; where it is sharded, every call is collective."""

    def __init__(self, files: TeacherFiles, module: nn.Module, sharded: Sharded | None) -> None:
        self.files = files
        self.module = module.eval()
        self._sharded = sharded
        self.tokenizer = load_tokenizer(files.directory, files.text_kind)

    @property
    def placement(self) -> str:
        """Return how the weights are placed on the ranks: "replicated" or "sharded"."""
        return "replicated" if self._sharded is None else "sharded"

    @torch.no_grad()
    def __call__(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        *,
        tap: Sequence[int] = (),
    ) -> dict[str, Tensor]:
        """Return logits [B, C] by student head, in the student's class order, and the tapped states."""
        # A plain Hugging Face classifier takes no `tap`.
        extra = {"tap": tuple(tap)} if tap else {}
        outputs = self.module(input_ids, attention_mask, token_type_ids, **extra)
        if self._sharded is not None:
            self._sharded.reshard()
        result = {name: outputs[name][:, order] for name, order in self.files.columns.items()}
        return result | ({TAPPED: outputs[TAPPED]} if tap else {})

    def predict_batch(self, batch: Batch, tap: Sequence[int] = ()) -> dict[str, Tensor]:
        """Return the outputs for a batch on its device."""
        return self(*batch.inputs, tap=tap)


def planned_placement(run: RunDirectory, distillation: Distillation) -> str:
    """Return the placement that was planned, or that of the spec where there is no plan.

    The plan follows the spec, but a remedy after a memory failure may have changed the placement.
    """
    if not run.plan.exists():
        return distillation.teacher_placement
    planned = json.loads(run.plan.read_bytes()).get("teacher_placement")
    if planned in ("sharded", "replicated"):
        return str(planned)
    return distillation.teacher_placement


def place_teacher(files: TeacherFiles, *, placement: str, recipe: Recipe, world: World) -> Teacher:
    """Load a teacher for inference in the recipe's compute type, sharded or replicated on every rank.

    Raises RunFailed(BAD_MODEL), and RunFailed(BAD_SPEC) for a teacher that cannot be sharded.
    """
    dtype = DTYPES[recipe.compute]
    if not files.has_linear_heads:
        if placement == "sharded":
            raise RunFailed(
                Reason.BAD_SPEC,
                "distillation.teacher_placement: a plain Hugging Face encoder classifier cannot be "
                'sharded; set it to "replicated"',
            )
        return Teacher(files, _load_sequence_classifier(files, dtype).to(world.device), None)
    with fail_with(Reason.BAD_MODEL):
        weights = _head_weights(files)
    if placement == "replicated" or (placement == "auto" and _fits_replicated(files, dtype, world)):
        with fail_with(Reason.BAD_MODEL):
            backbone = load_backbone(files.directory, dtype=dtype, attention=recipe.attention)
            classifier = wrap_backbone(backbone, files.heads, pooling=pooling_of(files.config))
            set_heads(classifier, weights)
        return Teacher(files, classifier.requires_grad_(False).to(world.device), None)
    sharded = shard_model(files.config, files.heads, inference_recipe(recipe), world)
    load_pretrained(sharded, files.directory, seed=0, heads=weights)
    sharded.module.requires_grad_(False)
    return Teacher(files, sharded.module, sharded)


class _SequenceClassifier(nn.Module):
    """Adapts a Hugging Face sequence classifier to the interface of ours, with one named head."""

    def __init__(self, model: Any, head: str) -> None:
        super().__init__()
        self.model = model
        self.head = head

        self._has_token_types = (getattr(model.config, "type_vocab_size", None) or 0) > 1

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None, token_type_ids: Tensor | None
    ) -> dict[str, Tensor]:
        extra = {"token_type_ids": token_type_ids} if self._has_token_types else {}
        output = self.model(input_ids=input_ids, attention_mask=attention_mask, **extra)
        return {self.head: output.logits.float()}


def _load_sequence_classifier(files: TeacherFiles, dtype: torch.dtype) -> nn.Module:
    factory: Any = AutoModelForSequenceClassification
    with fail_with(Reason.BAD_MODEL):
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
    return _SequenceClassifier(model, files.heads[0].name).requires_grad_(False)


def _classifier_head(config: PretrainedConfig, directory: Path, heads: Sequence[Head]) -> Head:
    """Return the single head of a Hugging Face classifier, named after the student's head."""
    architecture = next(iter(config.architectures or []), "")
    if not architecture.endswith(_ARCHITECTURE_SUFFIX):
        raise ValueError(
            f"{directory} is not a classifier: it has no {HEADS_FILE}, and its architecture "
            f"{architecture or '(none)'} is not one {_ARCHITECTURE_SUFFIX}"
        )
    names: Any = config.id2label
    labels = [names[index] for index in sorted(names)]
    multi_label = getattr(config, "problem_type", None) == "multi_label_classification"
    return Head(
        name=heads[0].name if len(heads) == 1 else "labels",
        type=HeadType.MULTI_LABEL if multi_label else HeadType.SINGLE_LABEL,
        labels=labels,
    )


def _head_weights(files: TeacherFiles) -> dict[str, Tensor]:
    """Return the trained heads as `<head>.weight|bias`."""
    if files.is_artifact:
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
    raise ValueError(f"{files.directory} has no score.weight, the head of a decoder classifier")


def _fits_replicated(files: TeacherFiles, dtype: torch.dtype, world: World) -> bool:
    """Return whether every rank has memory for the whole teacher; the ranks agree."""
    weight_bytes = files.parameters * dtype.itemsize
    if world.device.type == "cuda":
        memory_bytes = torch.cuda.get_device_properties(world.device).total_memory
    else:
        memory_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // world.size
    (too_small,) = world.sum([float(weight_bytes > REPLICATED_SHARE * memory_bytes)])
    return too_small == 0
