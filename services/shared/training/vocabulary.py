"""The vocabulary of a run with `trim_vocabulary`: chosen once on rank 0 and read by every rank."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel
from transformers import AutoConfig, PretrainedConfig, PreTrainedTokenizerBase

from services.shared.datasets.card import Split
from services.shared.datasets.split import text_key
from services.shared.datasets.text import Text, with_prefix
from services.shared.jobs.run_directory import RunDirectory, RunInput, write_json
from services.shared.jobs.spec import TeacherSpec
from services.shared.jobs.state import Reason
from services.shared.jobs.text_conventions import conventions_of
from services.shared.model.classifier import build_config
from services.shared.model.tokens import load_tokenizer, read_rows
from services.shared.model.vocabulary import (
    changed_share,
    special_ids,
    trim_config,
    trim_tokenizer,
    unknown_share,
)
from services.shared.training.process import World, fail_with

KEPT_ROWS = "kept_rows.json"  # next to the tokenizer, written last


class VocabularyReport(BaseModel):
    """What was kept, and what that changes for validation texts, which chose nothing."""

    rows: int
    rows_before: int
    validation_unknown_share: float  # of their tokens
    validation_unknown_share_before: float
    validation_texts_changed_share: float  # texts that the smaller vocabulary divides otherwise


class KeptRows(BaseModel):
    """The rows of the full embedding that were kept, ascending."""

    rows: list[int]
    report: VocabularyReport


@dataclass(frozen=True)
class RunVocabulary:
    """A trimmed tokenizer, and the configuration of a model with these rows only."""

    tokenizer: PreTrainedTokenizerBase
    config: PretrainedConfig
    kept: KeptRows


def trim_shared_vocabulary(
    run: RunDirectory,
    task: RunInput,
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
    world: World,
    *,
    prefix: str,
) -> RunVocabulary:
    """Leave out what the training and unlabelled texts do not use, on rank 0; return it on every rank.

    Raises RunFailed(BAD_SPEC) for a tokenizer that cannot be trimmed.
    """
    directory = run.path / "tokenizer"
    if world.is_first and not (directory / KEPT_ROWS).exists():
        trim_vocabulary(task, tokenizer, config, directory, prefix=prefix)
    world.barrier()
    kept = KeptRows.model_validate_json((directory / KEPT_ROWS).read_bytes())
    return RunVocabulary(load_tokenizer(directory), trim_config(config, kept.rows), kept)


def trim_vocabulary_of(run: RunDirectory, task: RunInput) -> KeptRows:
    """Choose the vocabulary of a run before its ranks start. Raises RunFailed."""
    source = task.spec.model if isinstance(task.spec, TeacherSpec) else task.spec.student
    from_teacher = source.tokenizer == "teacher"
    with fail_with(Reason.BAD_MODEL):
        directory = task.teacher_dir if from_teacher else task.model_dir
        assert directory is not None
        tokenizer = load_tokenizer(directory)
        base = (task.model_dir or task.teacher_dir) if source.config is None else None
        prefix = conventions_of(source, base).prefix
        if source.config is None:
            config = AutoConfig.from_pretrained(
                str(base), local_files_only=True, trust_remote_code=False
            )
        else:
            config = build_config(
                source.config, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id
            )
    return trim_vocabulary(task, tokenizer, config, run.path / "tokenizer", prefix=prefix)


def trim_vocabulary(
    task: RunInput,
    tokenizer: PreTrainedTokenizerBase,
    config: PretrainedConfig,
    directory: Path,
    *,
    prefix: str,
) -> KeptRows:
    """Write the tokenizer of a run and the rows that it keeps to `directory`. Raises RunFailed."""
    with fail_with(Reason.BAD_DATA):
        texts = [with_prefix(text, prefix) for text in _training_texts(task)]
        validation = read_rows(task.dataset_dir, Split.VALIDATION, []).texts
        held_out = [with_prefix(text, prefix) for text in validation]
    keep = {number for numbers in special_ids(config).values() for number in numbers}
    with fail_with(Reason.BAD_SPEC):
        trimmed = trim_tokenizer(tokenizer, texts, keep=keep)
    report = VocabularyReport(
        rows=len(trimmed.kept),
        rows_before=config.vocab_size,
        validation_unknown_share=unknown_share(trimmed.tokenizer, held_out),
        validation_unknown_share_before=unknown_share(tokenizer, held_out),
        validation_texts_changed_share=changed_share(tokenizer, trimmed, held_out),
    )
    kept = KeptRows(rows=trimmed.kept, report=report)
    directory.mkdir(parents=True, exist_ok=True)
    trimmed.tokenizer.save_pretrained(str(directory))
    write_json(directory / KEPT_ROWS, kept)
    return kept


def _training_texts(task: RunInput) -> list[Text]:
    """Return the training texts and all unlabelled ones, but those that are held out."""
    texts = list(read_rows(task.dataset_dir, Split.TRAIN, []).texts)
    if not task.unlabelled_dirs:
        return texts
    held_out = {
        text_key(text)
        for split in (Split.VALIDATION, Split.TEST)
        for text in read_rows(task.dataset_dir, split, []).texts
    }
    for directory in task.unlabelled_dirs:
        for split in Split:
            unlabelled = read_rows(directory, split, []).texts
            texts += [text for text in unlabelled if text_key(text) not in held_out]
    return texts
