from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from services.distiller.student import StudentInit, load_student, plan_student
from services.distiller.teacher import read_teacher
from services.shared.datasets.card import Split
from services.shared.datasets.text import TextKind
from services.shared.jobs.run_directory import RunDirectory
from services.shared.model.artifact import load_classifier, read_artifact
from services.shared.model.classifier import TAPPED
from services.shared.model.tokens import load_tokenizer, read_rows
from services.shared.training.job_setup import resolved_recipe, shard_model
from services.shared.training.process import RunFailed, World
from services.shared.training.sharding.shard import Sharded
from tests.factories import TINY_STUDENT

if TYPE_CHECKING:
    from tests.distiller.conftest import MakeDataset, MakeTask

IDS = torch.tensor([[2, 9, 8, 7, 3]])


InitialiseStudent = Callable[..., tuple[Sharded, StudentInit]]


@pytest.fixture
def initialised(
    task: MakeTask, run: RunDirectory, world: World, teacher_dir: Path
) -> InitialiseStudent:
    """Return a function that initialises the student of a spec, and how it did."""

    def initialise(**changes: Any) -> tuple[Sharded, StudentInit]:
        job = task(**changes)
        files = read_teacher(
            teacher_dir, read_artifact(teacher_dir).heads, text_kind=TextKind.SINGLE, max_length=48
        )
        init = plan_student(run, job, files, world)
        student = shard_model(init.config, files.heads, resolved_recipe(job), world)
        load_student(student, init, files, seed=job.spec.training.seed)
        return student, init

    return initialise


@pytest.mark.parametrize("wanted", [2, [1, 3], [0, 3], [0]])
def test_a_student_of_some_layers_equals_the_teacher_without_the_others(
    initialised: InitialiseStudent, teacher_dir: Path, wanted: int | list[int]
) -> None:
    student, init = initialised(student={"layers_of_teacher": wanted})
    layers = [1, 3] if isinstance(wanted, int) else wanted
    expected = load_classifier(teacher_dir)
    expected.backbone.layers = torch.nn.ModuleList(expected.backbone.layers[i] for i in layers)
    expected.config.num_hidden_layers = len(layers)
    assert init.config.num_hidden_layers == len(layers)
    assert init.tokenizer.get_vocab() == load_tokenizer(teacher_dir).get_vocab()
    with torch.no_grad():
        found, wanted_logits = student.module(IDS), expected(IDS)
    for head in wanted_logits:
        torch.testing.assert_close(found[head], wanted_logits[head], atol=1e-5, rtol=1e-5)


def test_a_student_may_start_from_a_directory_with_a_tokenizer_of_its_own(
    initialised: InitialiseStudent, teacher_dir: Path, tmp_path: Path
) -> None:
    student, init = initialised(student={"path": "base"}, model_dir=teacher_dir)
    plain = load_classifier(teacher_dir)
    with torch.no_grad():
        states = student.module(IDS, None, tap=(1, 4))[TAPPED]
        expected = plain(IDS, None, tap=(1, 4))[TAPPED]
        # The directory gives the backbone; the heads are new.
        assert not torch.allclose(student.module(IDS)["topics"], plain(IDS)["topics"])
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)
    assert init.tokenizer.get_vocab() == load_tokenizer(teacher_dir).get_vocab()


def test_a_student_from_a_config_may_have_a_tokenizer_of_its_own(
    initialised: InitialiseStudent, task: MakeTask, teacher_dir: Path
) -> None:
    _, init = initialised(
        student={"config": TINY_STUDENT, "tokenizer": {"train": True, "vocab_size": 320}}
    )
    assert len(init.tokenizer) == 320
    assert init.config.vocab_size == 320


def test_a_trimmed_student_equals_the_untrimmed_one_on_texts_of_kept_pieces(
    initialised: InitialiseStudent, new_dataset: MakeDataset, run: RunDirectory
) -> None:
    few = new_dataset({Split.TRAIN: 4, Split.VALIDATION: 8, Split.TEST: 8})
    source: dict[str, Any] = {"layers_of_teacher": 2}
    whole, init = initialised(dataset_dir=few, student=source)
    trimmed, trimmed_init = initialised(dataset_dir=few, student=source | {"trim_vocabulary": True})
    assert trimmed_init.vocabulary is not None
    report = trimmed_init.vocabulary.report
    assert report.rows == trimmed_init.config.vocab_size == len(trimmed_init.tokenizer)
    assert report.rows < report.rows_before == init.config.vocab_size
    assert 0 < report.validation_texts_changed_share <= 1
    assert report.validation_unknown_share == 0
    saved = init.config.vocab_size - report.rows
    assert trimmed.num_parameters == whole.num_parameters - saved * init.config.hidden_size
    for text in read_rows(few, Split.TRAIN, []).texts:
        before, after = (
            student.module(torch.tensor([tokenizer(text)["input_ids"]]))
            for student, tokenizer in (
                (whole, init.tokenizer),
                (trimmed, trimmed_init.tokenizer),
            )
        )
        assert all(torch.equal(before[head], after[head]) for head in before)


def test_a_student_from_a_config_takes_the_kept_pieces_of_its_teachers_tokenizer(
    initialised: InitialiseStudent, new_dataset: MakeDataset
) -> None:
    few = new_dataset({Split.TRAIN: 4, Split.VALIDATION: 8, Split.TEST: 8})
    _, init = initialised(
        dataset_dir=few,
        student={"config": TINY_STUDENT, "tokenizer": "teacher", "trim_vocabulary": True},
    )
    assert init.vocabulary is not None
    assert init.config.vocab_size == init.vocabulary.report.rows < 400


@pytest.mark.parametrize("wanted", [4, [0, 4], [0, 1, 2, 3]])
def test_layers_that_the_teacher_does_not_have_are_refused(
    initialised: InitialiseStudent, wanted: int | list[int]
) -> None:
    with pytest.raises(RunFailed, match=r"student.layers_of_teacher: .*4") as failed:
        initialised(student={"layers_of_teacher": wanted})
    assert failed.value.reason == "bad_spec"


def test_texts_longer_than_the_student_reads_are_refused(
    initialised: InitialiseStudent, task: MakeTask
) -> None:
    config = TINY_STUDENT | {"max_position_embeddings": 16}
    with pytest.raises(
        RunFailed, match="max_length is 48, but the model reads at most 16"
    ) as failed:
        initialised(student={"config": config, "tokenizer": "teacher"})
    assert failed.value.reason == "bad_spec"


def test_a_directory_whose_embedding_is_smaller_than_its_tokenizer_is_refused(
    initialised: InitialiseStudent, teacher_dir: Path, tmp_path: Path
) -> None:
    classifier = load_classifier(teacher_dir)
    classifier.backbone.resize_token_embeddings(100)
    classifier.backbone.save_pretrained(tmp_path / "base")
    load_tokenizer(teacher_dir).save_pretrained(tmp_path / "base")
    with pytest.raises(RunFailed, match=r"has \d+ tokens, the student's embedding only 100"):
        initialised(student={"path": "base"}, model_dir=tmp_path / "base")
