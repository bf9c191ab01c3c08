"""Full fine-tuning of a teacher: the loop, from the run directory to the sealed artifact.

Legend: B texts of a micro-batch, S tokens, C classes of a head.
"""

from __future__ import annotations

import math
import time

import torch

from services.shared.jobs.run_directory import Report, RunDirectory, RunInput, write_json
from services.shared.jobs.spec import TeacherSpec
from services.shared.jobs.state import Phase, Reason
from services.shared.model.batches import Step, plan_epoch
from services.shared.model.objective import balanced_weights, combined_loss, labelled_counts
from services.shared.model.tokens import collate
from services.shared.training.checkpoint import loop_state
from services.shared.training.evaluation import evaluate, predict_split
from services.shared.training.job_setup import resolved_recipe, shard_model, verify_models
from services.shared.training.memory_probe import MemoryProbe
from services.shared.training.optim.optimizer import build_optimizer, learning_rate
from services.shared.training.process import Position, RunFailed, World, agreed_stop, seed_step
from services.shared.training.progress import Progress
from services.shared.training.schedule import plan_schedule
from services.shared.training.sharding.load import initialise, load_pretrained
from services.shared.training.shared_data import SharedData
from services.trainer.inputs import check_budget, read_data
from services.trainer.publish import publish


def finetune(run: RunDirectory, task: RunInput, world: World, position: Position) -> Report:
    """Train, evaluate and export a teacher; return the report that rank 0 writes."""
    assert isinstance(task.spec, TeacherSpec)
    training, recipe = task.spec.training, resolved_recipe(task)
    budget_tokens = recipe.token_budget(training)
    progress, probe = Progress(run, world, position), MemoryProbe(run, world, position)
    shared = SharedData(run, world, progress)

    progress.phase(Phase.LOADING)
    with probe.phase("load"):
        verify_models([task.model_dir, task.teacher_dir], world)
        data = read_data(run, task, world, shared)
        check_budget(data, budget_tokens)
    heads, train, pad_id = data.heads, data.train, data.tokenizer.pad_token_id
    weights = None
    if training.class_weights == "balanced":
        balanced = balanced_weights(heads, train.labels)
        weights = {name: values.to(world.device) for name, values in balanced.items()}

    progress.phase(Phase.WRAPPING)
    with probe.phase("wrap"):
        sharded = shard_model(data.config, heads, recipe, world)
    probe.check_sharding(sharded)
    progress.phase(Phase.LOADING, "reading weights")
    with probe.phase("load"):
        if task.model_dir is not None:
            kept = None if data.vocabulary is None else data.vocabulary.rows
            load_pretrained(sharded, task.model_dir, seed=training.seed, vocabulary=kept)
        else:
            initialise(sharded, seed=training.seed)
        optimizer = build_optimizer(sharded, training, world)
        probe.watch(sharded, optimizer)
        state = loop_state.resume(run, task, sharded, optimizer)
        sharded.clear_decoder_bias()

    schedule = plan_schedule(training, num_texts=len(train))
    steps_per_epoch, total = schedule.steps_per_epoch, schedule.total_steps
    plan: list[Step] = []
    stop: str | None = None

    progress.phase(Phase.TRAINING, step=state.step)
    while stop is None:
        due = schedule.evaluates_after(state.step)
        if due and state.step > state.evaluated_step and len(data.validation):
            progress.phase(Phase.EVALUATING)
            with probe.phase("evaluation", step=state.step):
                validation_logits = predict_split(
                    sharded,
                    data.validation,
                    heads,
                    world,
                    budget_tokens=budget_tokens,
                    pad_id=pad_id,
                )
            evaluation = evaluate(validation_logits, data.validation, heads)
            progress.evaluation(
                evaluation, step=state.step, total=total, epoch=state.step / steps_per_epoch
            )
            if state.record_evaluation(evaluation):
                loop_state.save_best(run, task, sharded, world, state)
            patience = training.early_stopping_patience
            state.finished = patience is not None and state.worse_evaluations >= patience
            progress.phase(Phase.TRAINING)
        if state.step >= total or state.finished:
            break

        started = time.monotonic()
        epoch, place = divmod(state.step, steps_per_epoch)
        if not plan or place == 0:
            plan = plan_epoch(
                train.lengths,
                budget_tokens=budget_tokens,
                batch_size=training.batch_size,
                ranks=world.size,
                seed=training.seed,
                epoch=epoch,
            )
        step, number = plan[place], state.step + 1
        rate = learning_rate(state.step, total, training)
        counts = labelled_counts(heads, train.labels, step.rows)
        seed_step(training.seed, state.step, world.rank)
        sharded.module.train()
        loss_sum = torch.zeros((), device=world.device)

        for part, rows in enumerate(step.micro_batches[world.rank]):
            batch = collate(train, rows, pad_id).to(world.device)
            with probe.phase("forward", step=number):
                logits = sharded.module(*batch.inputs)  # [B, C] by head
                loss = combined_loss(logits, batch.labels, heads, counts, weights)
            parts = step.num_micro_batches
            optimizer.before_backward(learning_rate=rate, step=state.step, part=part, parts=parts)
            with probe.phase("backward", step=number):
                # The engine averages gradients over the ranks, but the losses of the ranks are to be summed.
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
            sharded.clear_decoder_bias()

        state.step = number
        state.count_tokens(step, train)
        seconds = time.monotonic() - started
        state.add_step_time(epoch, seconds)
        progress.step(
            number,
            total=total,
            epoch=number / steps_per_epoch,
            loss=step_loss,
            learning_rate=rate,
            tokens=int(train.lengths[step.rows].sum()),
            seconds=seconds,
            padding_share=state.padding_share,
        )
        stop = agreed_stop(flags)

        if stop is not None or number % training.checkpoint_every_steps == 0:
            progress.phase(Phase.SAVING, step=state.step)
            loop_state.save(run, task, sharded, optimizer, world, state)
            progress.phase(Phase.TRAINING)

    if stop is not None:
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
            loop_state.restore_best(run, task, sharded, state)
            report = publish(run, task, sharded, data, world, state, steps_per_epoch)
    if world.is_first:
        write_json(run.report, report)
    progress.phase(Phase.FINISHING)
    shared.remove()
    return report
