"""Full fine-tuning of a teacher: the loop, from the run directory to the sealed artifact.

Legend: B texts of a micro-batch, S tokens, C classes of a head.
"""

from __future__ import annotations

import math
import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import Tensor
from transformers import AutoConfig, PretrainedConfig

from services.shared.datasets.card import DatasetCard, Head, Split
from services.shared.fsdp import checkpoint
from services.shared.fsdp.export import export_weights
from services.shared.fsdp.load import initialise, load_pretrained
from services.shared.fsdp.memory_probe import MemoryProbe
from services.shared.fsdp.optimizers import Optimizer, build_optimizer, learning_rate
from services.shared.fsdp.predictions import evaluate, predict_split
from services.shared.fsdp.process import Position, RunFailed, World, agreed_stop, blame, seed_step
from services.shared.fsdp.progress import Progress
from services.shared.fsdp.shard import Sharded, parameter_dtype, shard
from services.shared.jobs.rundir import Report, RunDirectory, RunInput, write_json
from services.shared.jobs.spec import Recipe, TeacherSpec, TrainedTokenizer
from services.shared.jobs.state import Phase, Reason
from services.shared.model.artifact import golden_texts, seal_artifact, write_golden
from services.shared.model.batches import Step, plan_epoch
from services.shared.model.classifier import build_classifier, make_config
from services.shared.model.objective import balanced_weights, labelled_counts, supervised_loss
from services.shared.model.tokens import (
    TokenisedSplit,
    choose_heads,
    collate,
    load_tokenizer,
    read_card,
    read_rows,
    read_split,
    train_tokenizer,
)

GOLDEN_TEXTS = 4


@dataclass(frozen=True)
class Data:
    """What is learnt from, tokenised."""

    card: DatasetCard
    heads: list[Head]
    tokenizer: Any
    train: TokenisedSplit
    validation: TokenisedSplit
    test: TokenisedSplit


class Best(BaseModel):
    """The evaluation whose weights will be exported."""

    step: int
    macro_f1: float
    loss: float
    evaluation: dict[str, Any]


class LoopState(BaseModel):
    """Where the loop stands between two steps; everything else follows from seed and spec."""

    step: int = 0  # finished steps
    best: Best | None = None
    worse_evaluations: int = 0  # since the best one
    real_tokens: int = 0
    padded_tokens: int = 0
    seconds: float = 0.0
    finished: bool = False  # early stopping has spoken


def finetune(run: RunDirectory, task: RunInput, world: World, position: Position) -> Report:
    """Train, evaluate, export; return the report that rank 0 has written."""
    assert isinstance(task.spec, TeacherSpec)
    training, recipe = task.spec.training, chosen_recipe(task)
    progress, probe = Progress(run, world, position), MemoryProbe(run, world, position)

    progress.phase(Phase.LOADING)
    with probe.phase("load"):
        data = read_data(run, task, world)
        config = model_config(task, data.tokenizer)
    heads, train, pad_id = data.heads, data.train, data.tokenizer.pad_token_id
    weights = None
    if training.class_weights == "balanced":
        balanced = balanced_weights(heads, train.labels)
        weights = {name: values.to(world.device) for name, values in balanced.items()}

    progress.phase(Phase.WRAPPING)
    with probe.phase("wrap"):
        sharded = shard_model(config, heads, recipe, world)
    probe.check_sharding(sharded)
    progress.phase(Phase.LOADING, "reading weights")
    with probe.phase("load"):
        if task.model_dir is not None:
            load_pretrained(sharded, task.model_dir, seed=training.seed)
        else:
            initialise(sharded, seed=training.seed)
        optimizer = build_optimizer(sharded, training, world)
        probe.watch(sharded, optimizer)
        state = resume(run, task, sharded, optimizer)

    def epoch_plan(epoch: int) -> list[Step]:
        return plan_epoch(
            train.lengths,
            budget_tokens=training.micro_batch_tokens,
            batch_size=training.batch_size,
            ranks=world.size,
            seed=training.seed,
            epoch=epoch,
        )

    steps_per_epoch = -(-len(train) // training.batch_size)
    total = max(1, round(training.epochs * steps_per_epoch))
    total = min(total, training.max_steps or total)
    evaluate_every = max(1, round(training.eval_every_epochs * steps_per_epoch))
    plan: list[Step] = []
    stop: str | None = None

    progress.phase(Phase.TRAINING)
    while state.step < total and not state.finished and stop is None:
        began = time.monotonic()
        epoch, place = divmod(state.step, steps_per_epoch)
        if not plan or place == 0:
            plan = epoch_plan(epoch)
        step = plan[place]
        number = state.step + 1
        rate = learning_rate(state.step, total, training)
        counts = labelled_counts(heads, train.labels, step.rows)
        seed_step(training.seed, state.step, world.rank)
        sharded.module.train()
        loss_sum = torch.zeros((), device=world.device)

        for part, rows in enumerate(step.micro_batches[world.rank]):
            batch = collate(train, rows, pad_id).to(world.device)
            with probe.phase("forward", step=number):
                logits = sharded.module(batch.input_ids, batch.attention_mask)  # [B, C] by head
                loss = combined_loss(logits, batch.labels, heads, counts, weights)
            parts = step.num_micro_batches
            optimizer.before_backward(learning_rate=rate, step=state.step, part=part, parts=parts)
            with probe.phase("backward", step=number):
                # The engine averages gradients over the ranks; the loss is a share of a whole.
                (loss * world.size).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach()
            del logits, loss

        step_loss, *flags = world.sum([float(loss_sum), *world.stopping.flags()])
        if not math.isfinite(step_loss):
            raise RunFailed(
                Reason.NON_FINITE_LOSS,
                f"The loss of step {number} is {step_loss}: lower the learning rate "
                f"({training.learning_rate:g}), or raise warmup_ratio or the compute precision.",
            )
        with probe.phase("optimizer_step", step=number):
            optimizer.step()

        state.step = number
        count_tokens(state, step, train)
        seconds = time.monotonic() - began
        state.seconds += seconds
        progress.step(
            number,
            total=total,
            epoch=number / steps_per_epoch,
            loss=step_loss,
            learning_rate=rate,
            tokens=int(train.lengths[step.rows].sum()),
            seconds=seconds,
            padding_share=1 - state.real_tokens / state.padded_tokens,
        )
        stop = agreed_stop(flags)

        if len(data.validation) and (number % evaluate_every == 0 or number == total) and not stop:
            progress.phase(Phase.EVALUATING)
            with probe.phase("evaluation", step=number):
                logits_by_head = predict_split(
                    sharded,
                    data.validation,
                    heads,
                    world,
                    budget_tokens=training.micro_batch_tokens,
                    pad_id=pad_id,
                )
            found = evaluate(logits_by_head, data.validation, heads)
            epoch_share = number / steps_per_epoch
            progress.evaluation(found, step=number, total=total, epoch=epoch_share)
            if note_evaluation(state, found):
                save_best(run, task, sharded, world, state)
            patience = training.early_stopping_patience
            state.finished = patience is not None and state.worse_evaluations >= patience
            progress.phase(Phase.TRAINING)

        if stop or number % training.checkpoint_every_steps == 0:
            progress.phase(Phase.SAVING)
            save(run, task, sharded, optimizer, world, state)
            progress.phase(Phase.TRAINING)

    if stop:
        report = Report(
            outcome="stopped",
            stop_reason=stop,
            steps=state.step,
            epochs=state.step / steps_per_epoch,
            seconds=state.seconds,
        )
    else:
        progress.phase(Phase.EXPORTING)
        with probe.phase("export", step=state.step):
            report = export(run, task, sharded, world, state, data, steps_per_epoch)
    if world.is_first:
        write_json(run.report, report)
    progress.phase(Phase.FINISHING)
    world.barrier()
    return report


def chosen_recipe(task: RunInput) -> Recipe:
    """Return the recipe with `auto` resolved by whoever planned the job."""
    if task.recipe:
        return Recipe.model_validate(task.recipe)
    return task.spec.recipe if isinstance(task.spec.recipe, Recipe) else Recipe()


def read_data(run: RunDirectory, task: RunInput, world: World) -> Data:
    """Read and tokenise the dataset, on every rank alike. Raises RunFailed."""
    assert isinstance(task.spec, TeacherSpec)
    with blame(Reason.BAD_DATA):
        card = read_card(task.dataset_dir)
        heads = choose_heads(card, task.spec.heads)
    with blame(Reason.BAD_MODEL):
        tokenizer = make_tokenizer(run, task, world)
    with blame(Reason.BAD_DATA):
        train, validation, test = (
            read_split(
                task.dataset_dir,
                split,
                heads,
                tokenizer=tokenizer,
                max_length=task.spec.training.max_length,
            )
            for split in (Split.TRAIN, Split.VALIDATION, Split.TEST)
        )
    if not len(train):
        raise RunFailed(Reason.BAD_DATA, f"dataset {card.name!r} has no training texts")
    return Data(card, heads, tokenizer, train, validation, test)


def make_tokenizer(run: RunDirectory, task: RunInput, world: World) -> Any:
    """Return the model's tokenizer, or one that rank 0 trains on the training texts."""
    assert isinstance(task.spec, TeacherSpec)
    wanted = task.spec.model.tokenizer
    if not isinstance(wanted, TrainedTokenizer):
        assert task.model_dir is not None
        return load_tokenizer(task.model_dir)
    directory = run.path / "tokenizer"
    if world.is_first:
        texts = read_rows(task.dataset_dir, Split.TRAIN, []).texts
        train_tokenizer(texts, vocab_size=wanted.vocab_size, directory=directory)
    world.barrier()
    return load_tokenizer(directory)


def model_config(task: RunInput, tokenizer: Any) -> PretrainedConfig:
    """Return the backbone's configuration. Raises RunFailed for one that cannot read the texts."""
    assert isinstance(task.spec, TeacherSpec)
    source = task.spec.model
    with blame(Reason.BAD_MODEL):
        if task.model_dir is not None:
            config: PretrainedConfig = AutoConfig.from_pretrained(
                str(task.model_dir), local_files_only=True, trust_remote_code=False
            )
        else:
            assert source.config is not None
            config = make_config(
                source.config, vocab_size=len(tokenizer), pad_token_id=tokenizer.pad_token_id
            )
    longest = getattr(config, "max_position_embeddings", None)
    if isinstance(longest, int) and task.spec.training.max_length > longest:
        raise RunFailed(
            Reason.BAD_SPEC,
            f"training.max_length is {task.spec.training.max_length}, but the model reads at most "
            f"{longest} tokens",
        )
    return config


def shard_model(
    config: PretrainedConfig, heads: Sequence[Head], recipe: Recipe, world: World
) -> Sharded:
    """Return an empty sharded classifier. Raises RunFailed(BAD_MODEL)."""
    with blame(Reason.BAD_MODEL):
        with torch.device("meta"):
            classifier = build_classifier(
                config, heads, attention=recipe.attention, dtype=parameter_dtype(recipe)
            )
        return shard(classifier, recipe, world)


def combined_loss(
    logits: dict[str, Tensor],
    labels: dict[str, Tensor],
    heads: Sequence[Head],
    counts: dict[str, int],
    weights: dict[str, Tensor] | None,
) -> Tensor:
    """Return this micro-batch's share of the step's loss, which is the mean over heads.

    Each head's sum is divided by its labelled texts in the whole step, so neither the number of
    ranks nor the cut into micro-batches changes the gradient.
    """
    sums = supervised_loss(logits, labels, heads, weights)
    shares = [sums[head.name].total / max(1, counts[head.name]) for head in heads]
    return torch.stack(shares).sum() / len(heads)


def count_tokens(state: LoopState, step: Step, train: TokenisedSplit) -> None:
    """Add a step's real and padded tokens; a dummy counts as one padded token."""
    lengths = train.lengths
    for rank in step.micro_batches:
        for rows in rank:
            sizes = lengths[list(rows)]
            state.real_tokens += int(sizes.sum())
            state.padded_tokens += int(sizes.max()) * len(rows) if rows else 1


def note_evaluation(state: LoopState, found: dict[str, Any]) -> bool:
    """Say whether an evaluation is the best so far: by macro-F1, then by loss."""
    key = (found["macro_f1"], -found["loss"])
    if state.best is not None and key <= (state.best.macro_f1, -state.best.loss):
        state.worse_evaluations += 1
        return False
    state.worse_evaluations = 0
    state.best = Best(
        step=state.step, macro_f1=found["macro_f1"], loss=found["loss"], evaluation=found
    )
    return True


def resume(run: RunDirectory, task: RunInput, sharded: Sharded, optimizer: Optimizer) -> LoopState:
    """Return to the latest checkpoint of this or an earlier attempt, if there is one."""
    path = checkpoint.latest(run.checkpoints, task.resume_dir)
    if path is None:
        return LoopState()
    saved = checkpoint.restore(path, sharded, optimizer)
    return LoopState.model_validate(saved.loop)


def save(
    run: RunDirectory,
    task: RunInput,
    sharded: Sharded,
    optimizer: Optimizer,
    world: World,
    state: LoopState,
) -> None:
    """Write a checkpoint to resume from, then remove what no checkpoint needs any more."""
    checkpoint.save(
        run.checkpoints,
        sharded,
        optimizer,
        world,
        job_id=task.job_id,
        step=state.step,
        loop=state.model_dump(),
    )
    keep = task.spec.training.keep_checkpoints
    checkpoint.retain(run.checkpoints, keep, world)


def save_best(
    run: RunDirectory, task: RunInput, sharded: Sharded, world: World, state: LoopState
) -> None:
    """Keep the weights of the best evaluation aside."""
    checkpoint.save(
        run.checkpoints,
        sharded,
        None,
        world,
        job_id=task.job_id,
        step=state.step,
        loop={},
        name=best_name(state.step),
    )


def best_name(step: int) -> str:
    """Return the name of the weights of an evaluation."""
    return f"best-{step:08d}"


def export(
    run: RunDirectory,
    task: RunInput,
    sharded: Sharded,
    world: World,
    state: LoopState,
    data: Data,
    steps_per_epoch: int,
) -> Report:
    """Put the best weights back, judge them on the test split, and write the artifact."""
    assert isinstance(task.spec, TeacherSpec)
    training = task.spec.training
    if state.best is not None and state.best.step != state.step:
        path = find_best(run, task, state.best.step)
        checkpoint.restore(path, sharded, None)
    evaluation: dict[str, Any] = {}
    if state.best is not None:
        evaluation = {"split": "validation"} | state.best.evaluation
    if len(data.test):
        logits = predict_split(
            sharded,
            data.test,
            data.heads,
            world,
            budget_tokens=training.micro_batch_tokens,
            pad_id=data.tokenizer.pad_token_id,
        )
        tested = evaluate(logits, data.test, data.heads)
        evaluation = {"split": "test"} | tested | {"validation": evaluation or None}
    sharded.module.eval()
    texts = read_rows(task.dataset_dir, Split.TRAIN, []).texts[:GOLDEN_TEXTS]
    golden = golden_texts(sharded.module, data.tokenizer, texts, max_length=training.max_length)
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
        details={
            "best_step": state.best.step if state.best else state.step,
            "best_epoch": (state.best.step if state.best else state.step) / steps_per_epoch,
            "stopped_early": state.finished,
            "padding_share": 1 - state.real_tokens / max(1, state.padded_tokens),
            "real_tokens": state.real_tokens,
            "truncated_texts": {
                "train": data.train.truncated,
                "validation": data.validation.truncated,
                "test": data.test.truncated,
            },
        },
    )
    if world.is_first:
        data.tokenizer.save_pretrained(str(aside))
        write_golden(aside, golden)
        sealed = seal_artifact(
            aside,
            heads=data.heads,
            pooling=sharded.classifier.pooling,
            lineage={
                "kind": "teacher",
                "job_id": task.job_id,
                "attempt": task.attempt,
                "dataset_id": data.card.id,
                "dataset_sha256": data.card.sha256,
                "model": task.spec.model.model_dump(mode="json", exclude_none=True),
                "seed": training.seed,
                "steps": state.step,
            },
            metrics=evaluation,
            max_length=training.max_length,
        )
        shutil.rmtree(run.export, ignore_errors=True)
        aside.rename(run.export)
        report = report.model_copy(
            update={"size_bytes": sealed.size_bytes, "manifest_sha256": sealed.sha256}
        )
    world.barrier()
    return report


def find_best(run: RunDirectory, task: RunInput, step: int) -> Path:
    """Return the weights of the best evaluation, from this or an earlier attempt."""
    places = [run.checkpoints, *([task.resume_dir] if task.resume_dir else [])]
    for place in places:
        if (place / best_name(step) / checkpoint.COMPLETE).exists():
            return place / best_name(step)
    raise RunFailed(
        Reason.BAD_CHECKPOINT, f"the best weights (step {step}) are no longer in {places[-1]}"
    )
