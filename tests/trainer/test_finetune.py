"""One rank, in this process: the loop's decisions."""

from __future__ import annotations

import math
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerBase

from services.shared.datasets.card import Split
from services.shared.datasets.stored_card import read_card
from services.shared.jobs.artifact_layout import MANIFEST
from services.shared.jobs.label_quality import LabelQuality
from services.shared.jobs.run_directory import (
    MemoryRecord,
    ProgressRecord,
    Report,
    RunDirectory,
    read_record,
    read_records,
)
from services.shared.jobs.state import Phase, Reason
from services.shared.model.artifact import check_golden, load_classifier, read_artifact
from services.shared.model.objective import combined_loss
from services.shared.model.sequence_classification import sequence_classifier
from services.shared.model.tokens import load_tokenizer, read_rows
from services.shared.training.process import Position, RunFailed, World
from services.trainer.finetune import finetune
from services.trainer.inputs import backbone_config
from tests.factories import TINY_QWEN3

if TYPE_CHECKING:
    from tests.trainer.conftest import MakeTask


@pytest.fixture(scope="module")
def finished(
    lone_world: World, make_task: MakeTask, tmp_path_factory: pytest.TempPathFactory
) -> RunDirectory:
    """A teacher that was trained for three epochs."""
    run = RunDirectory(tmp_path_factory.mktemp("run"))
    finetune(run, make_task(training={"epochs": 3}), lone_world, Position())
    return run


def progress_of(run: RunDirectory) -> list[ProgressRecord]:
    return [record for _, record in read_records(run.progress, ProgressRecord)]


def report_of(run: RunDirectory) -> Report:
    report = read_record(run.report, Report)
    assert report is not None
    return report


def test_a_teacher_learns_the_sentiment_words(finished: RunDirectory) -> None:
    evaluation = report_of(finished).evaluation
    assert evaluation["split"] == "test"
    # 0.94 to 1 over eight seeds; processors differ by as much in rounding.
    assert evaluation["heads"]["sentiment"]["accuracy"] > 0.9


def test_each_head_is_compared_with_n_gram_counts(finished: RunDirectory) -> None:
    for metrics in report_of(finished).evaluation["heads"].values():
        baseline = metrics["baseline"]
        assert baseline["accuracy_interval"]["low"] <= baseline["accuracy"]
        assert baseline["accuracy"] <= baseline["accuracy_interval"]["high"]
        assert baseline["training_texts"] > 0


def test_the_labels_are_examined_and_the_mapped_files_removed(finished: RunDirectory) -> None:
    found = LabelQuality.model_validate_json(finished.label_quality.read_bytes())
    # Every tenth label is missing; held-out texts are judged by the model.
    assert found.heads["sentiment"].out_of_fold_texts == 180
    assert found.heads["sentiment"].model_texts == 72
    assert not (finished.path / "data").exists()


def test_every_epoch_is_evaluated_and_reported(finished: RunDirectory) -> None:
    evaluated = [(r.epoch, r.evaluation) for r in progress_of(finished) if r.evaluation is not None]
    assert [epoch for epoch, _ in evaluated] == [1.0, 2.0, 3.0]
    assert set(evaluated[0][1]["heads"]) == {"sentiment", "topics"}


def test_phases_are_reported_in_order(finished: RunDirectory) -> None:
    phases = list(dict.fromkeys(record.phase for record in progress_of(finished)))
    assert phases == [
        Phase.LOADING,
        Phase.WRAPPING,
        Phase.TRAINING,
        Phase.EVALUATING,
        Phase.EXPORTING,
        Phase.FINISHING,
    ]


def test_the_first_and_the_last_step_are_reported_with_their_throughput(
    finished: RunDirectory,
) -> None:
    steps = [r for r in progress_of(finished) if r.step is not None and r.loss is not None]
    first, last = steps[0], steps[-1]
    assert (first.step, last.step) == (1, 39)
    assert last.eta_seconds == 0
    assert last.tokens_per_second is not None
    assert last.tokens_per_second > 0
    assert first.loss is not None
    assert last.loss is not None
    assert last.loss < first.loss


def test_the_artifact_gives_the_logits_of_the_trained_model(finished: RunDirectory) -> None:
    classifier = load_classifier(finished.export)
    worst = check_golden(finished.export, classifier, load_tokenizer(finished.export))
    assert worst is not None
    assert worst < 1e-5


def test_each_head_of_a_trained_decoder_is_a_classifier_of_transformers(
    finished: RunDirectory,
) -> None:
    classifier, ids = load_classifier(finished.export), torch.tensor([[2, 9, 8, 7, 3]])
    for head in classifier.head_specs:
        model = sequence_classifier(classifier, head)
        assert classifier.heads.get_parameter(f"{head.name}.weight").any()
        with torch.no_grad():
            torch.testing.assert_close(model(ids).logits, classifier(ids)[head.name])


def test_the_artifact_records_its_lineage(finished: RunDirectory) -> None:
    manifest = read_artifact(finished.export).manifest
    assert manifest is not None
    assert manifest.lineage["job_id"] == "job_test"
    assert manifest.lineage["dataset_sha256"] == "0" * 64
    assert manifest.metrics == report_of(finished).evaluation


def test_memory_is_recorded_by_phase_and_once_after_wrapping(finished: RunDirectory) -> None:
    records = [r for _, r in read_records(finished.memory_file(0), MemoryRecord)]
    phases = {record.phase for record in records}
    assert phases == {
        "load",
        "wrap",
        "forward",
        "backward",
        "optimizer_step",
        "evaluation",
        "export",
    }
    (observed,) = [r.observed for r in records if r.observed is not None]
    assert observed["sharded_units"] == observed["expected_units"] == 4


def test_gradients_and_moments_are_counted_in_their_phases(finished: RunDirectory) -> None:
    records = [r for _, r in read_records(finished.memory_file(0), MemoryRecord)]
    held = {r.phase: r.allocated_bytes for r in records if r.step == 2}
    observed = next(r.observed for r in records if r.observed)
    # FSDP1 aligns parameters within the flat one, and so their gradients, but no moments.
    parameters = gradients = observed["local_parameter_bytes"]
    moments = 2 * observed["whole_model_bytes"]
    counters = 4 * 28  # AdamW counts the steps of each of 28 parameters in a float
    assert held["backward"] == parameters + gradients + moments + counters
    assert held["optimizer_step"] == parameters + moments + counters


def test_only_the_best_weights_are_kept(finished: RunDirectory) -> None:
    report = report_of(finished)
    names = [path.name for path in finished.checkpoints.iterdir()]
    assert names == [f"best-{report.details['best_step']:08d}"]


def test_training_stops_when_evaluations_no_longer_improve(
    lone_world: World, make_task: MakeTask, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path)
    # So small a rate changes no answer: the second and the third evaluation are no better.
    changes = {"learning_rate": 1e-12, "epochs": 9, "early_stopping_patience": 2}
    report = finetune(run, make_task(training=changes), lone_world, Position())
    assert report.details["stopped_early"]
    assert report.epochs < 9


def test_a_loss_that_is_not_finite_ends_the_run_with_its_step(
    finished: RunDirectory, lone_world: World, make_task: MakeTask, tmp_path: Path
) -> None:
    broken = tmp_path / "broken"
    shutil.copytree(finished.export, broken)
    (broken / MANIFEST).unlink()  # as a directory that was not made here: its hashes are not known
    weights = load_file(broken / "model.safetensors")
    weights["norm.weight"][0] = math.nan
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    run = RunDirectory(tmp_path / "run")
    task = make_task(model_dir=broken, spec={"model": {"path": "broken"}})
    with pytest.raises(RunFailed, match="The loss of step 1 is nan") as caught:
        finetune(run, task, lone_world, Position())
    assert caught.value.reason is Reason.NON_FINITE_LOSS
    assert not run.report.exists()


def test_gradients_do_not_depend_on_the_split_into_micro_batches(
    lone_world: World, make_task: MakeTask, tmp_path: Path
) -> None:
    losses = []
    for tokens in (4096, 48):
        run = RunDirectory(tmp_path / str(tokens))
        changes = {"micro_batch_tokens": tokens, "max_steps": 8}
        finetune(run, make_task(training=changes), lone_world, Position())
        losses.append([r.loss for r in progress_of(run) if r.loss is not None][-1])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_a_lower_token_budget_of_the_recipe_takes_precedence(
    lone_world: World, make_task: MakeTask, tmp_path: Path
) -> None:
    run = RunDirectory(tmp_path)
    task = make_task(recipe={"micro_batch_tokens": 16}, training={"max_steps": 1})
    with pytest.raises(RunFailed, match="micro_batch_tokens") as caught:
        finetune(run, task, lone_world, Position())
    assert caught.value.reason is Reason.BAD_SPEC


def test_length_buckets_keep_padding_low(finished: RunDirectory) -> None:
    assert report_of(finished).details["padding_share"] < 0.1


def test_a_text_longer_than_the_model_reads_is_refused(
    make_task: MakeTask, tokenizer: PreTrainedTokenizerBase
) -> None:
    config = TINY_QWEN3 | {"max_position_embeddings": 32}
    model = {"config": config, "tokenizer": {"train": True, "vocab_size": 400}}
    task = make_task(training={"max_length": 64}, spec={"model": model})
    with pytest.raises(RunFailed, match="reads at most 32 tokens") as caught:
        backbone_config(task, tokenizer, None)
    assert caught.value.reason is Reason.BAD_SPEC


@pytest.fixture(scope="module")
def tokenizer(finished: RunDirectory) -> PreTrainedTokenizerBase:
    tokenizer: PreTrainedTokenizerBase = load_tokenizer(finished.export)
    return tokenizer


def test_a_model_directory_is_trained_further(
    finished: RunDirectory, lone_world: World, make_task: MakeTask, tmp_path: Path
) -> None:
    spec = {"model": {"path": "teacher"}}
    task = make_task(model_dir=finished.export, spec=spec, training={"epochs": 1})
    report = finetune(RunDirectory(tmp_path), task, lone_world, Position())
    # One epoch from what was learnt beats one from nothing.
    first = next(r.evaluation for r in progress_of(finished) if r.evaluation is not None)
    assert report.evaluation["validation"]["loss"] < first["loss"]


def test_balanced_class_weights_reach_the_loss(make_task: MakeTask, dataset_dir: Path) -> None:
    assert len(read_rows(dataset_dir, Split.TRAIN, [])) == 200
    heads = read_card(dataset_dir).heads
    logits = {"sentiment": torch.zeros(2, 2), "topics": torch.zeros(2, 2)}
    labels = {"sentiment": torch.tensor([0, 1]), "topics": torch.zeros(2, 2)}
    counts = {"sentiment": 2, "topics": 2}
    plain = combined_loss(logits, labels, heads, counts, None)
    weights = {"sentiment": torch.tensor([1.0, 3.0])}
    weighted = combined_loss(logits, labels, heads, counts, weights)
    # Mean over two heads: ln 2 each; with weights the first is (1 + 3) / 2 times as large.
    assert float(plain) == pytest.approx(math.log(2))
    assert float(weighted) == pytest.approx(1.5 * math.log(2))
