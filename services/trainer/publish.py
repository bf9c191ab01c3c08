"""The end of a teacher's training: the best weights are evaluated on the test split and sealed as an artifact."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypedDict

from services.shared.datasets.card import Split
from services.shared.jobs.documents import Evaluation
from services.shared.jobs.run_directory import Report, RunDirectory, RunInput, write_json
from services.shared.jobs.spec import TeacherSpec
from services.shared.model.artifact import seal_artifact
from services.shared.model.baseline import fit_baselines
from services.shared.model.calibration import Calibration, calibrate
from services.shared.model.comparison import HeldOut, add_comparisons
from services.shared.model.description import BASE_MODEL
from services.shared.model.label_quality import examine_labels
from services.shared.model.metrics import Array
from services.shared.model.predictions_file import write_predictions
from services.shared.model.tokens import Rows
from services.shared.training.checkpoint.loop_state import LoopState, LoopSummary
from services.shared.training.evaluation import evaluate, predict_labels, predict_split
from services.shared.training.process import World
from services.shared.training.sharding.export import export_artifact, publish_export
from services.shared.training.sharding.shard import Sharded
from services.trainer.inputs import TrainingData


class TeacherLineage(TypedDict):
    """What a teacher was made from, in the order of the manifest."""

    kind: Literal["teacher"]
    job_id: str
    attempt: int
    dataset_id: str
    dataset_sha256: str
    model: dict[str, Any]  # ModelSource, as the spec gave it
    seed: int
    steps: int


class TruncatedTexts(TypedDict):
    """The number of truncated texts of each split."""

    train: int
    validation: int
    test: int


class TrainingDetails(LoopSummary):
    """The `details` of a teacher's report."""

    truncated_texts: TruncatedTexts


@dataclass(frozen=True)
class _Evaluated:
    """The evaluation of the exported weights, and their predictions for its split."""

    evaluation: Evaluation
    calibration: dict[str, Calibration]
    predictions: dict[str, Array] = field(default_factory=dict)
    logits: dict[Split, dict[str, Array]] = field(default_factory=dict)  # of held-out splits


def publish(
    run: RunDirectory,
    task: RunInput,
    sharded: Sharded,
    data: TrainingData,
    world: World,
    state: LoopState,
    steps_per_epoch: int,
) -> Report:
    """Evaluate the weights on the test split, write their artifact, and report. Collective."""
    evaluated = _evaluate(task, sharded, data, world, state)
    evaluation = evaluated.evaluation
    labelled = data.rows[Split.TRAIN]
    max_length = task.spec.training.max_length
    staging_dir = export_artifact(
        run,
        sharded,
        data.tokenizer,
        labelled.texts,
        world,
        max_length=max_length,
        prefix=data.prefix,
    )
    if world.is_first and evaluation:
        held_out = data.rows[Split(evaluation["split"])]
        _compare(evaluated, data, labelled, held_out, staging_dir, seed=task.spec.training.seed)
        if data.vocabulary is not None:
            evaluation["vocabulary"] = data.vocabulary.report.model_dump()
    report = Report(
        outcome="succeeded",
        steps=state.step,
        epochs=state.step / steps_per_epoch,
        seconds=state.seconds,
        artifact=run.export.name,
        heads=[head.model_dump(mode="json") for head in data.heads],
        parameters=sharded.num_parameters,
        evaluation=evaluation,
        details=_details(data, state, steps_per_epoch),
    )
    if world.is_first:
        quality = examine_labels(
            data.heads,
            data.rows,
            logits=evaluated.logits,
            calibration=evaluated.calibration,
            seed=task.spec.training.seed,
        )
        write_json(run.label_quality, quality)
        sealed = seal_artifact(
            staging_dir,
            heads=data.heads,
            pooling=sharded.classifier.pooling,
            text_kind=data.card.text_kind,
            prefix=data.prefix,
            lineage=_lineage(task, data, state),
            metrics=evaluation,
            max_length=max_length,
            calibration=evaluated.calibration,
            made_from={} if task.model_dir is None else {BASE_MODEL: task.model_dir},
        )
        publish_export(run, staging_dir)
        report = report.model_copy(
            update={"size_bytes": sealed.size_bytes, "manifest_sha256": sealed.sha256}
        )
    world.barrier()
    return report


def _compare(
    evaluated: _Evaluated,
    data: TrainingData,
    labelled: Rows,
    held_out: Rows,
    artifact_dir: Path,
    *,
    seed: int,
) -> None:
    """Add baselines and intervals to the evaluation, and write all predictions to the artifact."""
    predictions = HeldOut(
        heads=data.heads,
        labels=held_out.labels,
        model=evaluated.predictions,
        baselines=fit_baselines(data.heads, train=labelled, held_out=held_out, seed=seed),
    )
    add_comparisons(evaluated.evaluation, predictions, seed=seed)
    write_predictions(artifact_dir, predictions, held_out.lines)


def _evaluate(
    task: RunInput, sharded: Sharded, data: TrainingData, world: World, state: LoopState
) -> _Evaluated:
    """Return the evaluation on the test split, with the validation that selected these weights.

    The calibration is fitted on the validation split and applied to the test split. Without a test split, the
    evaluation is that validation.
    """
    selected = state.best.evaluation if state.best is not None else None
    validation, test = (
        predict_split(
            sharded,
            split,
            data.heads,
            world,
            budget_tokens=sharded.recipe.token_budget(task.spec.training),
            pad_id=data.tokenizer.pad_token_id,
        )
        if len(split)
        else None
        for split in (data.validation, data.test)
    )
    calibration = calibrate(data.heads, validation, data.validation.labels) if validation else {}
    found = {Split.VALIDATION: validation, Split.TEST: test}
    logits = {split: values for split, values in found.items() if values}
    if test:
        evaluation = {
            "split": "test",
            **evaluate(test, data.test, data.heads, calibration),
            "validation": selected,
        }
        predictions = predict_labels(test, data.heads, calibration)
        return _Evaluated(evaluation, calibration, predictions, logits)
    if selected is None or not validation:
        return _Evaluated({}, calibration, logits=logits)
    evaluation = {"split": "validation", **selected}
    predictions = predict_labels(validation, data.heads)
    return _Evaluated(evaluation, calibration, predictions, logits)


def _details(data: TrainingData, state: LoopState, steps_per_epoch: int) -> TrainingDetails:
    return {
        **state.summary(steps_per_epoch),
        "truncated_texts": {
            "train": data.train.truncated,
            "validation": data.validation.truncated,
            "test": data.test.truncated,
        },
    }


def _lineage(task: RunInput, data: TrainingData, state: LoopState) -> TeacherLineage:
    assert isinstance(task.spec, TeacherSpec)
    return {
        "kind": "teacher",
        "job_id": task.job_id,
        "attempt": task.attempt,
        "dataset_id": data.card.id,
        "dataset_sha256": data.card.sha256,
        "model": task.spec.model.model_dump(mode="json", exclude_none=True),
        "seed": task.spec.training.seed,
        "steps": state.step,
    }
