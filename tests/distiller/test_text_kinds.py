"""Pairs and chats from the upload to the answer: trained, distilled, exported and served."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.api.serving.errors import UnusableText
from services.api.serving.promotion import Promotion
from services.api.serving.rollout.model_loader import load_student
from services.api.serving.settings import ServingSettings
from services.distiller.distill import distill
from services.shared.datasets.ingest import ingest
from services.shared.datasets.text import Chat, Message, Pair, Text, TextKind
from services.shared.datasets.upload import Layout
from services.shared.jobs.run_directory import RunDirectory
from services.shared.jobs.state import Reason
from services.shared.model.artifact import Golden, read_artifact
from services.shared.model.description import MODEL_CARD
from services.shared.training.process import Position, RunFailed, World
from services.trainer.finetune import finetune
from tests.distiller.conftest import MakeTask, run_input
from tests.trainer.conftest import run_input as teacher_input

BERT: dict[str, Any] = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
WORDS = ("red", "blue", "warm", "cold")


def write_dataset(directory: Path, kind: TextKind) -> Path:
    """Store a dataset whose labels say whether both parts of a text name the same word."""
    lines = []
    for number in range(240):
        first, second = WORDS[number % 4], WORDS[(number // 4) % 4]
        parts = (f"note {number} {first}", f"{second} it is")
        row: dict[str, Any] = {"same": "yes" if first == second else "no"}
        if kind is TextKind.PAIR:
            row |= {"text": parts[0], "claim": parts[1]}
        else:
            roles = ("user", "assistant")
            row["text"] = [
                {"role": role, "content": part} for role, part in zip(roles, parts, strict=True)
            ]
        lines.append(json.dumps(row))
    upload = directory / "upload.jsonl"
    upload.write_text("\n".join(lines))
    options: dict[str, Any] = {"heads": [{"name": "same"}]}
    if kind is TextKind.PAIR:
        options["text_pair_column"] = "claim"
    layout = Layout.model_validate(options)
    card = ingest(upload, layout=layout, id="ds_test", name="x", datasets_dir=directory)
    assert card.text_kind is kind
    return directory / "ds_test"


EXAMPLES: dict[TextKind, Text] = {
    TextKind.SINGLE: "note 1 red",
    TextKind.PAIR: Pair("note 1 red", "red it is"),
    TextKind.CHAT: Chat((Message("user", "note 1 red"), Message("assistant", "red it is"))),
}


@pytest.mark.parametrize("kind", [TextKind.PAIR, TextKind.CHAT])
def test_a_model_of_pairs_or_chats_is_trained_distilled_and_served(
    kind: TextKind, world: World, tmp_path: Path
) -> None:
    dataset_dir = write_dataset(tmp_path, kind)
    teacher, student = RunDirectory(tmp_path / "teacher"), RunDirectory(tmp_path / "student")
    tokenizer = {"train": True, "vocab_size": 330}
    model = {"config": BERT, "tokenizer": tokenizer}
    short = {"epochs": 1}
    task = teacher_input(dataset_dir, spec={"model": model}, training=short)
    finetune(teacher, task, world, Position())
    job = run_input(
        dataset_dir,
        teacher.export,
        student={"config": BERT | {"num_hidden_layers": 1}, "tokenizer": "teacher"},
        training=short,
    )
    report = distill(student, job, world, Position())
    assert report.evaluation["heads"]["same"]["baseline"]["accuracy"] > 0
    artifact = read_artifact(student.export)
    assert artifact.text_kind is kind
    assert {TextKind.PAIR: "A pair of texts", TextKind.CHAT: "Chat messages"}[kind] in (
        student.export / MODEL_CARD
    ).read_text()
    golden = Golden.model_validate_json((student.export / "golden.json").read_bytes())
    served = load_student(
        Promotion("pro_1", "default", "model_1", "x", "v1", student.export),
        ServingSettings(threads=1),
    )
    for text in golden.inputs():
        (encoded,) = served.encoder.encode([text], truncate=True)
        assert served.engine.run([encoded.tokens])["same"].shape == (1, 2)
    for other in set(TextKind) - {kind}:
        with pytest.raises(
            UnusableText, match=f"trained on {'pairs' if kind == 'pair' else 'chat'}"
        ):
            served.encoder.encode([EXAMPLES[other]], truncate=True)


def test_a_teacher_of_another_kind_is_refused(
    task: MakeTask, world: World, run: RunDirectory, tmp_path: Path
) -> None:
    dataset_dir = write_dataset(tmp_path, TextKind.PAIR)
    job = task()
    other = job.model_copy(update={"dataset_dir": dataset_dir})
    with pytest.raises(
        RunFailed, match="of the kind single, but those of the dataset are pair"
    ) as e:
        distill(run, other, world, Position())
    assert e.value.reason is Reason.BAD_SPEC


def test_unlabelled_texts_of_another_kind_are_refused(
    task: MakeTask, world: World, run: RunDirectory, tmp_path: Path
) -> None:
    pairs = write_dataset(tmp_path, TextKind.PAIR)
    job = task().model_copy(update={"unlabelled_dirs": [pairs]})
    with pytest.raises(
        RunFailed, match="are of the kind pair, those of the labelled one single"
    ) as e:
        distill(run, job, world, Position())
    assert e.value.reason is Reason.BAD_DATA
