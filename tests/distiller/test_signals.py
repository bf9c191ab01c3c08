from __future__ import annotations

import logging
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.distiller.corpus import Corpus, Sides, read_corpus
from services.distiller.signal_file import SignalFile, hash_teacher, signal_file
from services.distiller.signals import Signals
from services.distiller.teacher import Teacher, TeacherFiles, place_teacher, read_teacher
from services.shared.datasets.card import Split
from services.shared.jobs.run_directory import write_json
from services.shared.jobs.spec import Recipe
from services.shared.model.artifact import read_artifact
from services.shared.model.classifier import TAPPED
from services.shared.model.tokens import load_tokenizer, tokenise
from services.shared.training.process import RunFailed

RECIPE = Recipe.model_validate({"compute": "float32", "reduce": "float32"})


@pytest.fixture
def own_teacher_dir(teacher_dir: Path, tmp_path: Path) -> Path:
    """A copy of the teacher that a test may change."""
    return Path(shutil.copytree(teacher_dir, tmp_path / "teacher"))


def read_files(directory: Path, *, max_length: int = 48) -> TeacherFiles:
    return read_teacher(directory, read_artifact(directory).heads, max_length=max_length)


def read_sides(dataset_dir: Path, files: TeacherFiles, max_length: int = 48) -> Sides:
    corpus = read_corpus(dataset_dir, Split.TEST, files.heads)
    tokens = tokenise(corpus.rows, load_tokenizer(files.directory), max_length=max_length)
    return Sides(corpus, tokens, tokens)


class Counting(Teacher):
    """A teacher that counts how many texts it is asked."""

    asked = 0

    def ask(self, batch, tap=()):
        self.asked += int(batch.weight.sum())
        return super().ask(batch, tap)


@pytest.fixture
def setting(own_teacher_dir, dataset_dir, world, tmp_path):
    """Return (make signals, teacher) over the test split, kept in one directory."""

    def make(*, tap=(), max_length=48, precision="float32", sides=None):
        files = read_files(own_teacher_dir)
        teacher = place_teacher(files, wanted="replicated", recipe=RECIPE, world=world)
        teacher.__class__ = Counting
        sides = sides or read_sides(dataset_dir, files, max_length)
        file = signal_file(
            tmp_path / "kept",
            files,
            hash_teacher(own_teacher_dir),
            sides.corpus,
            precision=precision,
            tap=tap,
        )
        return Signals(teacher, sides, world, budget_tokens=256, tap=tap, file=file), teacher

    return make


def test_kept_answers_are_those_of_the_teacher_asked_one_by_one(setting, own_teacher_dir):
    signals, teacher = setting()
    assert signals.fill() is None
    rows = [5, 0, 17]
    kept = signals.for_rows(rows)
    for place, row in enumerate(rows):
        ids = torch.tensor(signals._sides.teacher.tokens(row)[None]).long()
        alone = teacher(ids)
        for head, logits in alone.items():
            torch.testing.assert_close(kept[head][place], logits[0], atol=1e-4, rtol=1e-4)


def test_each_text_is_asked_once(setting):
    signals, teacher = setting()
    signals.fill()
    signals.fill()
    signals.for_rows([1, 2, 3])
    assert teacher.asked == 60


def test_the_teacher_is_let_go_when_nothing_is_missing(setting):
    signals, _ = setting()
    assert signals._teacher is not None
    signals.fill()
    assert signals._teacher is None


def test_a_second_job_reads_what_the_first_kept(setting):
    first, _ = setting()
    first.fill()
    second, teacher = setting()
    assert second.complete
    assert teacher.asked == 0
    for head, logits in first.all_answers().items():
        assert torch.equal(second.all_answers()[head], logits)


def test_what_a_stopped_run_has_asked_is_not_asked_again(setting):
    first, teacher = setting()
    first.for_rows(list(range(20)))
    first.share()
    assert not first.complete
    second, teacher = setting()
    assert not second.complete
    second.fill()
    assert second.complete
    assert teacher.asked == 40


def test_a_stop_request_ends_the_asking_and_keeps_the_answers(setting, run, world):
    write_json(run.stop, {"reason": "cancelled"})
    signals, _ = setting()
    assert signals.fill() == "cancelled"
    run.stop.unlink()
    later, teacher = setting()
    later.fill()
    assert 0 < teacher.asked < 60


def alter_weights(directory: Path) -> None:
    weights = load_file(directory / "classifier_heads.safetensors")
    weights["sentiment.bias"] += 1e-6
    save_file(weights, directory / "classifier_heads.safetensors")


def alter_tokenizer(directory: Path) -> None:
    path = directory / "tokenizer.json"
    path.write_text(path.read_text() + " ")


@pytest.mark.parametrize(
    ("alter", "named"),
    [
        (alter_weights, "the hash of the teacher's weights was"),
        (alter_tokenizer, "the hash of the teacher's tokenizer was"),
    ],
)
def test_a_changed_teacher_never_reuses_answers(
    setting, own_teacher_dir, dataset_dir, world, tmp_path, caplog, alter, named
):
    setting()[0].fill()
    alter(own_teacher_dir)
    with caplog.at_level(logging.WARNING):
        signals, teacher = setting()
    assert not signals.complete
    assert named in caplog.text
    signals.fill()
    assert teacher.asked == 60


def test_other_texts_under_the_same_name_never_reuse_answers(setting, dataset_dir, caplog):
    first, _ = setting()
    first.fill()
    sides = first._sides
    texts = [*sides.corpus.rows.texts[:-1], "another"]
    rows = sides.corpus.rows.__class__(texts, sides.corpus.rows.lines, sides.corpus.rows.labels)
    changed = Sides(Corpus(rows, sides.corpus.sources), sides.student, sides.teacher)
    with caplog.at_level(logging.WARNING):
        assert not setting(sides=changed)[0].complete
    assert "the hash of the texts was" in caplog.text


def test_another_precision_is_named(setting, caplog):
    setting()[0].fill()
    with caplog.at_level(logging.WARNING):
        assert not setting(precision="bfloat16")[0].complete
    assert "the precision was float32, now it is bfloat16" in caplog.text


def test_a_damaged_file_is_ignored_with_a_warning(setting, tmp_path, caplog):
    setting()[0].fill()
    (path,) = (tmp_path / "kept").iterdir()
    path.write_bytes(path.read_bytes()[:50])
    with caplog.at_level(logging.WARNING):
        assert not setting()[0].complete
    assert "it cannot be read" in caplog.text


def test_matching_answers_are_read_without_a_warning(setting, caplog):
    setting()[0].fill()
    with caplog.at_level(logging.WARNING):
        assert setting()[0].complete
    assert caplog.records == []


def test_hidden_states_are_kept_with_their_size_known_beforehand(setting):
    signals, _ = setting(tap=(2, 4))
    # 60 texts, 2 layers of 48 numbers in 2 bytes; 2 + 2 logits in 4 bytes
    assert signals.num_bytes == 60 * (2 * 48 * 2 + 4 * 4)
    asked = signals.for_rows([3])[TAPPED]
    signals.fill()
    kept = signals.for_rows([3])[TAPPED]
    assert kept.shape == (1, 2, 48)
    torch.testing.assert_close(kept, asked, atol=0.02, rtol=0.01)
    assert TAPPED not in signals.all_answers()


def test_filling_tells_how_far_it_is(setting):
    told = []
    signals, _ = setting()
    signals.for_rows(list(range(20)))
    signals.fill(lambda done, total: told.append((done, total)))
    assert told[-1] == (40, 40)
    assert [done for done, _ in told] == sorted({done for done, _ in told})


def test_a_dummy_gets_answers_of_the_right_shape(setting):
    signals, _ = setting()
    assert signals.for_rows([])["topics"].shape == (1, 2)
    signals.fill()
    assert signals.for_rows([])["topics"].shape == (1, 2)


def test_an_answer_that_is_not_finite_stops_the_job_and_names_the_line(
    own_teacher_dir, dataset_dir, world
):
    files = read_files(own_teacher_dir)
    teacher = place_teacher(files, wanted="replicated", recipe=RECIPE, world=world)
    sides = read_sides(dataset_dir, files)
    # A token that no other text of the split has: its number in the running text.
    tokens = sides.teacher.tokens(41)
    others = {int(t) for row in range(60) if row != 41 for t in sides.teacher.tokens(row)}
    (only, *_) = [int(t) for t in tokens if int(t) not in others] or [None]
    if only is None:
        only = int(tokens[-2])
        sides.teacher.flat[:] = [1 if int(t) == only else t for t in sides.teacher.flat]
        sides.teacher.flat[sides.teacher.offsets[41]] = only
    with torch.no_grad():
        teacher.module.backbone.embed_tokens.weight[only] = torch.nan
    signals = Signals(teacher, sides, world, budget_tokens=256)
    with pytest.raises(RunFailed, match=r"not finite for line 42 of ds_test/test") as failed:
        signals.fill()
    assert failed.value.reason == "non_finite_teacher"


def test_the_file_of_another_teacher_has_another_name(
    own_teacher_dir, teacher_dir, dataset_dir, tmp_path
):
    paths = set()
    for directory in (own_teacher_dir, teacher_dir):
        files = read_files(directory)
        sides = read_sides(dataset_dir, files)
        hashes = hash_teacher(directory)
        file = signal_file(tmp_path, files, hashes, sides.corpus, precision="float32", tap=())
        paths.add(file.path)
    assert len(paths) == 2


def test_a_file_is_whole_or_not_there(setting, tmp_path, monkeypatch):
    signals, _ = setting()

    def fail(_tensors, path, **_options):
        Path(path).write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr("services.distiller.signal_file.save_file", fail)
    with pytest.raises(OSError, match="the disk is full"):
        signals.fill()
    assert not list((tmp_path / "kept").glob("*.safetensors"))
    assert SignalFile(signals._file.path, signals._file.identity).read() is None
