from __future__ import annotations

from pathlib import Path

import pytest
import torch

from services.distiller.student import chosen_layers, fill_student, plan_start
from services.distiller.teacher import read_teacher
from services.shared.model.artifact import load_classifier, read_artifact
from services.shared.model.classifier import TAPPED
from services.shared.model.tokens import load_tokenizer
from services.shared.training.job_setup import chosen_recipe, shard_model
from services.shared.training.process import RunFailed

IDS = torch.tensor([[2, 9, 8, 7, 3]])


@pytest.fixture
def started(task, run, world, teacher_dir):
    """Return (the filled student, how it started) for a `student` of a spec."""

    def start(**changes):
        job = task(**changes)
        files = read_teacher(teacher_dir, read_artifact(teacher_dir).heads, max_length=48)
        begin = plan_start(run, job, files, world)
        student = shard_model(begin.config, files.heads, chosen_recipe(job), world)
        fill_student(student, begin, files, seed=job.spec.training.seed)
        return student, begin

    return start


def test_the_last_layer_is_always_among_those_kept():
    assert chosen_layers(6, 2) == [1, 3, 5]
    assert chosen_layers(7, 3) == [0, 3, 6]
    assert chosen_layers(4, 4) == [3]


def test_a_student_of_every_second_layer_answers_as_the_teacher_without_the_others(
    started, teacher_dir
):
    student, begin = started(student={"layers_of_teacher": 2, "tokenizer": "teacher"})
    expected = load_classifier(teacher_dir)
    expected.backbone.layers = torch.nn.ModuleList(expected.backbone.layers[i] for i in (1, 3))
    expected.config.num_hidden_layers = 2
    assert begin.config.num_hidden_layers == 2
    with torch.no_grad():
        found, wanted = student.module(IDS), expected(IDS)
    for head in wanted:
        torch.testing.assert_close(found[head], wanted[head], atol=1e-5, rtol=1e-5)


def test_a_student_may_start_from_a_directory_with_a_tokenizer_of_its_own(
    started, teacher_dir, tmp_path
):
    student, begin = started(student={"path": "base"}, model_dir=teacher_dir)
    plain = load_classifier(teacher_dir)
    with torch.no_grad():
        states = student.module(IDS, None, (1, 4))[TAPPED]
        expected = plain(IDS, None, (1, 4))[TAPPED]
        # The directory gives the backbone; the heads are new.
        assert not torch.allclose(student.module(IDS)["topics"], plain(IDS)["topics"])
    torch.testing.assert_close(states, expected, atol=1e-5, rtol=1e-5)
    assert begin.tokenizer.get_vocab() == load_tokenizer(teacher_dir).get_vocab()


def test_a_student_from_a_config_may_have_a_tokenizer_of_its_own(started, task, teacher_dir):
    config = task().spec.student.config
    _, begin = started(student={"config": config, "tokenizer": {"train": True, "vocab_size": 320}})
    assert len(begin.tokenizer) == 320
    assert begin.config.vocab_size == 320


def test_more_layers_than_the_teacher_has_are_refused(started, monkeypatch):
    monkeypatch.setattr("services.distiller.student.chosen_layers", lambda n, _every: [*range(n)])
    with pytest.raises(RunFailed, match="the teacher has 4 layers only"):
        started(student={"layers_of_teacher": 2, "tokenizer": "teacher"})


def test_texts_longer_than_the_student_reads_are_refused(started, task):
    config = task().spec.student.config | {"max_position_embeddings": 16}
    with pytest.raises(
        RunFailed, match="max_length is 48, but the model reads at most 16"
    ) as failed:
        started(student={"config": config, "tokenizer": "teacher"})
    assert failed.value.reason == "bad_spec"


def test_a_directory_whose_embedding_is_smaller_than_its_tokenizer_is_refused(
    started, teacher_dir, tmp_path: Path
):
    classifier = load_classifier(teacher_dir)
    classifier.backbone.resize_token_embeddings(100)
    classifier.backbone.save_pretrained(tmp_path / "base")
    load_tokenizer(teacher_dir).save_pretrained(tmp_path / "base")
    with pytest.raises(RunFailed, match=r"knows \d+ tokens, the student's embedding only 100"):
        started(student={"path": "base"}, model_dir=tmp_path / "base")
