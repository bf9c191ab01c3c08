"""From the run input to an empty sharded classifier: the setup that every kind of job shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from services.shared.datasets.card import Head, Split
from services.shared.datasets.text import plain_text
from services.shared.jobs.artifact_layout import MANIFEST
from services.shared.jobs.planning.auto_choices import settle_recipe
from services.shared.jobs.run_directory import RunDirectory, RunInput
from services.shared.jobs.spec import Recipe, TrainedTokenizer
from services.shared.jobs.state import Reason
from services.shared.memory.recipe import Engine
from services.shared.model.artifact import InvalidArtifact, read_artifact, verify_artifact
from services.shared.model.classifier import build_classifier
from services.shared.model.tokens import iter_rows, load_tokenizer, train_tokenizer
from services.shared.training.process import RunFailed, World, fail_with
from services.shared.training.sharding.shard import Sharded, parameter_dtype, shard_classifier


def resolved_recipe(task: RunInput) -> Recipe:
    """Return the recipe, with `auto` as the planner and the worker resolved it.

    Without a worker a number format left open is assumed, on every rank alike.
    """
    given = task.spec.recipe if isinstance(task.spec.recipe, Recipe) else Recipe()
    recipe = Recipe.model_validate(task.recipe) if task.recipe else given
    return settle_recipe(recipe, device=task.spec.resources.device, times=None)[0]


def inference_recipe(recipe: Recipe) -> Recipe:
    """Return the recipe of a frozen teacher whose student uses `recipe`."""
    return recipe.model_copy(
        update={
            "sharding": "full",
            "wrap": "layer",
            "parameters": recipe.compute,
            "reduce": recipe.compute,
            "optimizer": "adamw",  # none is built; some fix the parameters' type
            "activation_checkpointing": False,
            "offload": "none",
        }
    )


def verify_models(directories: Sequence[Path | None], world: World) -> None:
    """Compare the files of the base model and of the teacher with their manifests. Collective.

    Rank 0 reads them in full: 16 GB take about half a minute. A Hugging Face directory has no manifest
    and is taken as it is. Raises RunFailed(BAD_MODEL) on every rank.
    """
    damage = _damage(directories) if world.is_first else None
    (found,) = world.sum([float(damage is not None)])
    if found:
        raise RunFailed(Reason.BAD_MODEL, damage or "Rank 0 has found a damaged model.")


def _damage(directories: Sequence[Path | None]) -> str | None:
    """Return how the first artifact that differs from its manifest does so, or None."""
    for directory in directories:
        if directory is None or not (directory / MANIFEST).exists():
            continue
        try:
            verify_artifact(read_artifact(directory))
        except (InvalidArtifact, OSError) as error:
            return str(error)
    return None


def train_shared_tokenizer(
    run: RunDirectory, task: RunInput, wanted: TrainedTokenizer, world: World
) -> PreTrainedTokenizerBase:
    """Train a tokenizer on the training texts on rank 0, and return it on every rank."""
    directory = run.path / "tokenizer"
    if world.is_first:
        with fail_with(Reason.BAD_DATA):
            chunks = iter_rows(task.dataset_dir, Split.TRAIN, [])
            texts = (plain_text(text) for rows in chunks for text in rows.texts)
            train_tokenizer(texts, vocab_size=wanted.vocab_size, directory=directory)
    world.barrier()
    return load_tokenizer(directory)


def read_config(directory: Path) -> PretrainedConfig:
    """Return the configuration of a model directory. Raises RunFailed(BAD_MODEL)."""
    with fail_with(Reason.BAD_MODEL):
        config: PretrainedConfig = AutoConfig.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    return config


def check_length(config: PretrainedConfig, max_length: int) -> None:
    """Raise RunFailed(BAD_SPEC) where texts may be longer than the model has positions."""
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and max_length > longest:
        raise RunFailed(
            Reason.BAD_SPEC,
            f"training.max_length is {max_length}, but the model reads at most {longest} tokens",
        )


def shard_model(
    config: PretrainedConfig,
    heads: Sequence[Head],
    recipe: Recipe,
    world: World,
    *,
    projections: Mapping[int, int] | None = None,
    engine: Engine | None = None,
) -> Sharded:
    """Return a sharded classifier without weights; `projections` maps its layers to widths.

    Raises RunFailed(BAD_MODEL).
    """
    with fail_with(Reason.BAD_MODEL):
        with torch.device("meta"):
            classifier = build_classifier(
                config, heads, attention=recipe.attention, dtype=parameter_dtype(recipe)
            )
            for layer, width in (projections or {}).items():
                classifier.add_projections([layer], width)
        return shard_classifier(classifier, recipe, world, engine=engine)
