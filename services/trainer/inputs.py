"""The inputs of a teacher job: texts and labels, tokenised, and the backbone's configuration."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from transformers import PretrainedConfig, PreTrainedTokenizerBase

from services.shared.datasets.card import DatasetCard, Head, Split
from services.shared.datasets.stored_card import read_card
from services.shared.datasets.text import TextKind
from services.shared.jobs.run_directory import RunDirectory, RunInput
from services.shared.jobs.spec import TeacherSpec, TrainedTokenizer
from services.shared.jobs.state import Reason
from services.shared.jobs.text_conventions import conventions_of
from services.shared.memory.architecture.pooling import Pooling
from services.shared.model.batches import plan_evaluation
from services.shared.model.classifier import build_config, set_pooling
from services.shared.model.mapped_arrays import DirectoryWriter
from services.shared.model.tokens import (
    Rows,
    TokenisedSplit,
    iter_rows,
    load_tokenizer,
    select_heads,
)
from services.shared.training.job_setup import check_length, read_config, train_shared_tokenizer
from services.shared.training.process import RunFailed, World, fail_with
from services.shared.training.shared_data import SharedData
from services.shared.training.vocabulary import KeptRows, trim_shared_vocabulary


@dataclass(frozen=True)
class TrainingData:
    """The tokenised texts and labels of a teacher job, and the model that reads them."""

    card: DatasetCard
    heads: list[Head]
    tokenizer: PreTrainedTokenizerBase
    config: PretrainedConfig  # of the backbone
    vocabulary: KeptRows | None  # None: all rows of the embedding
    prefix: str  # before each text
    rows: Mapping[Split, Rows]
    train: TokenisedSplit
    validation: TokenisedSplit
    test: TokenisedSplit


def read_data(run: RunDirectory, task: RunInput, world: World, shared: SharedData) -> TrainingData:
    """Return the dataset, read and tokenised once a node. Raises RunFailed. Collective."""
    assert isinstance(task.spec, TeacherSpec)
    with fail_with(Reason.BAD_DATA):
        card = read_card(task.dataset_dir)
        heads = select_heads(card, task.spec.heads)
    with fail_with(Reason.BAD_MODEL):
        tokenizer = _tokenizer(run, task, world, kind=card.text_kind)
        conventions = conventions_of(task.spec.model, task.model_dir)
    config, vocabulary = backbone_config(task, tokenizer, conventions.pooling), None
    if task.spec.model.trim_vocabulary:
        found = trim_shared_vocabulary(
            run, task, tokenizer, config, world, prefix=conventions.prefix
        )
        tokenizer, config, vocabulary = found.tokenizer, found.config, found.kept
    with fail_with(Reason.BAD_DATA):
        rows: dict[Split, Rows] = {}
        tokens: dict[Split, TokenisedSplit] = {}
        for split in Split:
            directory, rows[split] = shared.rows(
                str(split),
                functools.partial(_chunks, task, split, heads),
                heads=heads,
                kind=card.text_kind,
                source=[task.dataset_dir],
            )
            tokens[split] = shared.tokens(
                directory,
                rows[split],
                tokenizer,
                max_length=task.spec.training.max_length,
                prefix=conventions.prefix,
            )
    if not len(rows[Split.TRAIN]):
        raise RunFailed(Reason.BAD_DATA, f"dataset {card.name!r} has no training texts")
    return TrainingData(
        card=card,
        heads=heads,
        tokenizer=tokenizer,
        prefix=conventions.prefix,
        config=config,
        vocabulary=vocabulary,
        rows=rows,
        train=tokens[Split.TRAIN],
        validation=tokens[Split.VALIDATION],
        test=tokens[Split.TEST],
    )


def _chunks(
    task: RunInput, split: Split, heads: Sequence[Head], _writer: DirectoryWriter
) -> Iterator[Rows]:
    return iter_rows(task.dataset_dir, split, heads)


def backbone_config(
    task: RunInput, tokenizer: PreTrainedTokenizerBase, pooling: Pooling | None
) -> PretrainedConfig:
    """Return the backbone's configuration. Raises RunFailed where it does not suit tokenizer and texts."""
    assert isinstance(task.spec, TeacherSpec)
    if task.model_dir is not None:
        config = read_config(task.model_dir)
    else:
        assert task.spec.model.config is not None
        with fail_with(Reason.BAD_MODEL):
            config = build_config(
                task.spec.model.config,
                vocab_size=len(tokenizer),
                pad_token_id=tokenizer.pad_token_id,
            )
    if len(tokenizer) > config.vocab_size:
        raise RunFailed(
            Reason.BAD_MODEL,
            f"the tokenizer has {len(tokenizer)} tokens, the model's embedding only "
            f"{config.vocab_size}",
        )
    check_length(config, task.spec.training.max_length)
    with fail_with(Reason.BAD_SPEC):
        set_pooling(config, pooling)
    return config


def check_budget(data: TrainingData, budget_tokens: int) -> None:
    """Raise RunFailed(BAD_SPEC) if a text of any split is longer than the token budget."""
    with fail_with(Reason.BAD_SPEC):
        for split in (data.train, data.validation, data.test):
            plan_evaluation(split.lengths, budget_tokens=budget_tokens, ranks=1)


def _tokenizer(
    run: RunDirectory, task: RunInput, world: World, *, kind: TextKind
) -> PreTrainedTokenizerBase:
    assert isinstance(task.spec, TeacherSpec)
    source = task.spec.model.tokenizer
    if isinstance(source, TrainedTokenizer):
        return train_shared_tokenizer(run, task, source, world)
    assert task.model_dir is not None
    return load_tokenizer(task.model_dir, kind)
