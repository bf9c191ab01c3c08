"""The end of a teacher's training: the best weights, judged on the test split, as a sealed artifact."""

from __future__ import annotations

import shutil
from typing import Any

from services.shared.datasets.card import Split
from services.shared.fsdp.assemble import token_budget
from services.shared.fsdp.export import export_weights
from services.shared.fsdp.predictions import evaluate, predict_split
from services.shared.fsdp.process import World
from services.shared.fsdp.shard import Sharded
from services.shared.fsdp.standing import LoopState
from services.shared.jobs.rundir import Report, RunDirectory, RunInput
from services.shared.jobs.spec import TeacherSpec
from services.shared.model.artifact import golden_texts, seal_artifact, write_golden
from services.shared.model.tokens import read_rows
from services.trainer.inputs import Data

GOLDEN_TEXTS = 4


def publish(
    run: RunDirectory,
    task: RunInput,
    sharded: Sharded,
    data: Data,
    world: World,
    state: LoopState,
    steps_per_epoch: int,
) -> Report:
    """Judge the weights on the test split, write their artifact, and report; on all ranks."""
    evaluation = _judge(task, sharded, data, world, state)
    sharded.module.eval()
    texts = read_rows(task.dataset_dir, Split.TRAIN, []).texts[:GOLDEN_TEXTS]
    max_length = task.spec.training.max_length
    golden = golden_texts(sharded.module, data.tokenizer, texts, max_length=max_length)
    sharded.reshard()

    aside = run.export.with_name(".export.partial")
    if world.is_first:
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
    world.barrier()
    export_weights(sharded, aside, world)
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
        data.tokenizer.save_pretrained(str(aside))
        write_golden(aside, golden)
        sealed = seal_artifact(
            aside,
            heads=data.heads,
            pooling=sharded.classifier.pooling,
            lineage=_lineage(task, data, state),
            metrics=evaluation,
            max_length=max_length,
        )
        shutil.rmtree(run.export, ignore_errors=True)
        aside.rename(run.export)
        report = report.model_copy(
            update={"size_bytes": sealed.size_bytes, "manifest_sha256": sealed.sha256}
        )
    world.barrier()
    return report


def _judge(
    task: RunInput, sharded: Sharded, data: Data, world: World, state: LoopState
) -> dict[str, Any]:
    """Return the evaluation on the test split, beside the one that chose these weights."""
    chosen = state.best.evaluation if state.best is not None else None
    if not len(data.test):
        return {} if chosen is None else {"split": "validation"} | chosen
    logits = predict_split(
        sharded,
        data.test,
        data.heads,
        world,
        budget_tokens=token_budget(sharded.recipe, task.spec.training),
        pad_id=data.tokenizer.pad_token_id,
    )
    return {"split": "test", **evaluate(logits, data.test, data.heads), "validation": chosen}


def _details(data: Data, state: LoopState, steps_per_epoch: int) -> dict[str, Any]:
    best = state.best.step if state.best else state.step
    return {
        "best_step": best,
        "best_epoch": best / steps_per_epoch,
        "stopped_early": state.finished,
        "padding_share": state.padding_share,
        "real_tokens": state.real_tokens,
        "epoch_seconds": state.epoch_seconds,
        "truncated_texts": {
            "train": data.train.truncated,
            "validation": data.validation.truncated,
            "test": data.test.truncated,
        },
    }


def _lineage(task: RunInput, data: Data, state: LoopState) -> dict[str, Any]:
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
