from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from services.distiller.corpus import Corpus, Source
from services.distiller.inputs import TokenisedPair
from services.distiller.signal_file import SignalFile, hash_teacher, signal_file
from services.distiller.signals import Signals
from services.distiller.teacher import Teacher, TeacherFiles, place_teacher, read_teacher
from services.shared.datasets.card import Split
from services.shared.datasets.text import TextKind
from services.shared.jobs.run_directory import RunDirectory, write_json
from services.shared.jobs.spec import Recipe
from services.shared.model.artifact import read_artifact
from services.shared.model.classifier import TAPPED
from services.shared.model.tokens import Batch, Rows, load_tokenizer, read_rows, tokenise
from services.shared.training.process import RunFailed, World

RECIPE = Recipe.model_validate({"compute": "float32", "reduce": "float32"})


@pytest.fixture
def own_teacher_dir(teacher_dir: Path, tmp_path: Path) -> Path:
    """A copy of the teacher that a test may change."""
    return Path(shutil.copytree(teacher_dir, tmp_path / "teacher"))


def read_files(directory: Path, *, max_length: int = 48) -> TeacherFiles:
    return read_teacher(
        directory, read_artifact(directory).heads, text_kind=TextKind.SINGLE, max_length=max_length
    )


def read_pair(dataset_dir: Path, files: TeacherFiles, max_length: int = 48) -> TokenisedPair:
    rows = read_rows(dataset_dir, Split.TEST, files.heads)
    corpus = Corpus(rows, (Source("ds_test/test", 0, len(rows)),))
    tokens = tokenise(
        corpus.rows,
        load_tokenizer(files.directory),
        max_length=max_length,
        prefix="",
    )
    return TokenisedPair(corpus, tokens, tokens)


class CountingTeacher(Teacher):
    """A teacher that counts the texts it is run on."""

    num_texts = 0

    def predict_batch(self, batch: Batch, tap: Sequence[int] = ()) -> dict[str, torch.Tensor]:
        self.num_texts += int(batch.weight.sum())
        return super().predict_batch(batch, tap)


MakeSignals = Callable[..., tuple[Signals, CountingTeacher]]


@pytest.fixture
def make_signals(
    own_teacher_dir: Path, dataset_dir: Path, world: World, tmp_path: Path
) -> MakeSignals:
    """Return a function that opens the signals of the test split, cached in one directory."""

    def make(
        *,
        tap: Sequence[int] = (),
        precision: str = "float32",
        pair: TokenisedPair | None = None,
    ) -> tuple[Signals, CountingTeacher]:
        files = read_files(own_teacher_dir)
        placed = place_teacher(files, placement="replicated", recipe=RECIPE, world=world)
        teacher = CountingTeacher(files, placed.module, None)
        pair = pair or read_pair(dataset_dir, files)
        file = signal_file(
            tmp_path / "cache",
            files,
            hash_teacher(own_teacher_dir),
            pair.corpus,
            precision=precision,
            tap=tap,
        )
        return Signals(teacher, pair, world, budget_tokens=256, tap=tap, file=file), teacher

    return make


def test_cached_outputs_are_those_of_the_teacher_run_text_by_text(
    make_signals: MakeSignals, own_teacher_dir: Path
) -> None:
    signals, teacher = make_signals()
    assert signals.fill() is None
    rows = [5, 0, 17]
    cached = signals.for_rows(rows)
    for index, row in enumerate(rows):
        ids = torch.tensor(signals.pair.teacher.tokens(row)[None]).long()
        alone = teacher(ids)
        for head, logits in alone.items():
            torch.testing.assert_close(cached[head][index], logits[0], atol=1e-4, rtol=1e-4)


def test_the_teacher_runs_once_for_each_text(make_signals: MakeSignals) -> None:
    signals, teacher = make_signals()
    signals.fill()
    signals.fill()
    signals.for_rows([1, 2, 3])
    assert teacher.num_texts == 60


def test_the_teacher_is_released_when_no_output_is_missing(make_signals: MakeSignals) -> None:
    signals, _ = make_signals()
    assert signals.teacher is not None
    signals.fill()
    assert signals.teacher is None


def test_a_second_job_reads_the_cache_of_the_first(make_signals: MakeSignals) -> None:
    first, _ = make_signals()
    first.fill()
    second, teacher = make_signals()
    assert second.complete
    assert teacher.num_texts == 0
    for head, logits in first.logits().items():
        assert torch.equal(second.logits()[head], logits)


def test_outputs_of_a_stopped_run_are_not_computed_again(make_signals: MakeSignals) -> None:
    first, teacher = make_signals()
    first.for_rows(list(range(20)))
    first.synchronise()
    assert not first.complete
    second, teacher = make_signals()
    assert not second.complete
    second.fill()
    assert second.complete
    assert teacher.num_texts == 40


def test_a_stop_request_ends_the_filling_and_keeps_the_outputs(
    make_signals: MakeSignals, run: RunDirectory, world: World
) -> None:
    write_json(run.stop, {"reason": "cancelled"})
    signals, _ = make_signals()
    assert signals.fill() == "cancelled"
    run.stop.unlink()
    later, teacher = make_signals()
    later.fill()
    assert 0 < teacher.num_texts < 60


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
def test_a_changed_teacher_never_reuses_outputs(
    make_signals: MakeSignals,
    own_teacher_dir: Path,
    dataset_dir: Path,
    world: World,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    alter: Callable[[Path], None],
    named: str,
) -> None:
    make_signals()[0].fill()
    alter(own_teacher_dir)
    with caplog.at_level(logging.WARNING):
        signals, teacher = make_signals()
    assert not signals.complete
    assert named in caplog.text
    signals.fill()
    assert teacher.num_texts == 60


def test_other_texts_under_the_same_name_never_reuse_outputs(
    make_signals: MakeSignals, dataset_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, _ = make_signals()
    first.fill()
    pair = first.pair
    texts = [*pair.corpus.rows.texts[:-1], "another"]
    rows = Rows(texts, pair.corpus.rows.lines, pair.corpus.rows.labels)
    changed = TokenisedPair(Corpus(rows, pair.corpus.sources), pair.student, pair.teacher)
    with caplog.at_level(logging.WARNING):
        assert not make_signals(pair=changed)[0].complete
    assert "the hash of the texts was" in caplog.text


def test_another_precision_is_named(
    make_signals: MakeSignals, caplog: pytest.LogCaptureFixture
) -> None:
    make_signals()[0].fill()
    with caplog.at_level(logging.WARNING):
        assert not make_signals(precision="bfloat16")[0].complete
    assert "the precision was float32, now it is bfloat16" in caplog.text


def test_a_damaged_file_is_ignored_with_a_warning(
    make_signals: MakeSignals, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    make_signals()[0].fill()
    (path,) = (tmp_path / "cache").iterdir()
    path.write_bytes(path.read_bytes()[:50])
    with caplog.at_level(logging.WARNING):
        assert not make_signals()[0].complete
    assert "it cannot be read" in caplog.text


def test_valid_outputs_are_read_without_a_warning(
    make_signals: MakeSignals, caplog: pytest.LogCaptureFixture
) -> None:
    make_signals()[0].fill()
    with caplog.at_level(logging.WARNING):
        assert make_signals()[0].complete
    assert caplog.records == []


def test_hidden_states_are_cached_and_their_size_is_known_beforehand(
    make_signals: MakeSignals,
) -> None:
    signals, _ = make_signals(tap=(2, 4))
    # 60 texts, 2 layers of 48 numbers in 2 bytes; 2 + 2 logits in 4 bytes
    assert signals.num_bytes == 60 * (2 * 48 * 2 + 4 * 4)
    computed = signals.for_rows([3])[TAPPED]
    signals.fill()
    cached = signals.for_rows([3])[TAPPED]
    assert cached.shape == (1, 2, 48)
    torch.testing.assert_close(cached, computed, atol=0.02, rtol=0.01)
    assert TAPPED not in signals.logits()


def test_filling_reports_its_progress(make_signals: MakeSignals) -> None:
    reports: list[tuple[int, int]] = []
    signals, _ = make_signals()
    signals.for_rows(list(range(20)))
    signals.fill(lambda done, total: reports.append((done, total)))
    assert reports[-1] == (40, 40)
    assert [done for done, _ in reports] == sorted({done for done, _ in reports})


def test_a_dummy_text_gets_outputs_of_the_right_shape(make_signals: MakeSignals) -> None:
    signals, _ = make_signals()
    assert signals.for_rows([])["topics"].shape == (1, 2)
    signals.fill()
    assert signals.for_rows([])["topics"].shape == (1, 2)


def test_an_output_that_is_not_finite_stops_the_job_and_names_the_line(
    own_teacher_dir: Path, dataset_dir: Path, world: World
) -> None:
    files = read_files(own_teacher_dir)
    teacher = place_teacher(files, placement="replicated", recipe=RECIPE, world=world)
    pair = read_pair(dataset_dir, files)
    # A token that no other text of the split contains.
    tokens = pair.teacher.tokens(41)
    others = {int(t) for row in range(60) if row != 41 for t in pair.teacher.tokens(row)}
    only = next((int(t) for t in tokens if int(t) not in others), None)
    if only is None:
        only = int(tokens[-2])
        pair.teacher.flat[:] = [1 if int(t) == only else t for t in pair.teacher.flat]
        pair.teacher.flat[pair.teacher.offsets[41]] = only
    with torch.no_grad():
        teacher.module.get_parameter("backbone.embed_tokens.weight")[only] = torch.nan
    signals = Signals(teacher, pair, world, budget_tokens=256)
    with pytest.raises(RunFailed, match=r"not finite for line 42 of ds_test/test") as failed:
        signals.fill()
    assert failed.value.reason == "non_finite_teacher"


def test_another_teacher_has_another_cache_file(
    own_teacher_dir: Path, teacher_dir: Path, dataset_dir: Path, tmp_path: Path
) -> None:
    paths = set()
    for directory in (own_teacher_dir, teacher_dir):
        files = read_files(directory)
        pair = read_pair(dataset_dir, files)
        hashes = hash_teacher(directory)
        file = signal_file(tmp_path, files, hashes, pair.corpus, precision="float32", tap=())
        paths.add(file.path)
    assert len(paths) == 2


def test_a_failed_write_leaves_no_file(
    make_signals: MakeSignals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    signals, _ = make_signals()

    def fail(_tensors: object, path: Path, **_options: object) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("the disk is full")

    monkeypatch.setattr("services.distiller.signal_file.save_file", fail)
    with pytest.raises(OSError, match="the disk is full"):
        signals.fill()
    assert not list((tmp_path / "cache").glob("*.safetensors"))
    assert signals.file is not None
    assert SignalFile(signals.file.path, signals.file.identity).read() is None
