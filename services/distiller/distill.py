"""Distillation of a teacher into a student: the loop, from the run directory to the sealed artifact.

Legend: B texts of a micro-batch, C classes of a head, K matched layers, H hidden size of the teacher.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch

from services.distiller.inputs import Reader, read_data
from services.distiller.objective import build_objective, matched_layers
from services.distiller.publish import publish, record_teacher
from services.distiller.signal_file import hash_teacher
from services.distiller.signals import open_signals, signal_mode
from services.distiller.student import load_student, plan_student, teacher_tokenizer
from services.distiller.teacher import place_teacher, planned_placement, read_teacher
from services.shared.datasets.stored_card import read_card
from services.shared.jobs.run_directory import Report, RunDirectory, RunInput, write_json
from services.shared.jobs.spec import DistillSpec
from services.shared.jobs.state import Phase, Reason
from services.shared.model.batches import Step, plan_epoch
from services.shared.model.tokens import collate, select_heads
from services.shared.training.checkpoint import loop_state
from services.shared.training.evaluation import evaluate, predict_split
from services.shared.training.job_setup import resolved_recipe, shard_model, verify_models
from services.shared.training.memory_probe import MemoryProbe
from services.shared.training.optim.optimizer import build_optimizer, learning_rate
from services.shared.training.process import (
    Position,
    RunFailed,
    World,
    agreed_stop,
    fail_with,
    seed_step,
)
from services.shared.training.progress import Progress
from services.shared.training.schedule import plan_schedule
from services.shared.training.shared_data import SharedData

PROGRESS_INTERVAL_SECONDS = 2.0  # how often a worker reads the progress


def distill(run: RunDirectory, task: RunInput, world: World, position: Position) -> Report:
    """Train a student on labels and on its teacher's outputs; return the report of rank 0."""
    assert isinstance(task.spec, DistillSpec)
    assert task.teacher_dir is not None
    training, recipe, spec = task.spec.training, resolved_recipe(task), task.spec.distillation
    budget_tokens = recipe.token_budget(training)
    progress, probe = Progress(run, world, position), MemoryProbe(run, world, position)
    shared = SharedData(run, world, progress)

    progress.phase(Phase.LOADING)
    with probe.phase("load"):
        with fail_with(Reason.BAD_DATA):
            card = read_card(task.dataset_dir)
            heads = select_heads(card, task.spec.heads)
        verify_models([task.model_dir, task.teacher_dir], world)
        files = read_teacher(
            task.teacher_dir, heads, text_kind=card.text_kind, max_length=training.max_length
        )
        init = plan_student(run, task, files, world)
        with fail_with(Reason.BAD_DATA):
            data = read_data(
                task,
                shared,
                heads,
                student=Reader(init.tokenizer, training.max_length, init.prefix),
                teacher=Reader(
                    teacher_tokenizer(task.spec, init, files), files.max_length, files.prefix
                ),
            )
    train, pad_id = data.train.student, init.tokenizer.pad_token_id
    with fail_with(Reason.BAD_SPEC):
        objective = build_objective(heads, data.train.corpus, spec, training, device=world.device)
        matched = matched_layers(
            spec,
            student_layers=init.config.num_hidden_layers,
            teacher_layers=files.config.num_hidden_layers if files.has_linear_heads else None,
        )

    progress.phase(Phase.WRAPPING)
    with probe.phase("wrap"):
        projections = {layer: files.config.hidden_size for layer, _ in matched}
        student = shard_model(init.config, heads, recipe, world, projections=projections)
    probe.check_sharding(student)
    progress.phase(Phase.LOADING, "reading weights")
    with probe.phase("load"):
        load_student(student, init, files, seed=training.seed)
        optimizer = build_optimizer(student, training, world)
        probe.watch(student, optimizer)
        state = loop_state.resume(run, task, student, optimizer)
        student.clear_decoder_bias()
        teacher = place_teacher(
            files, placement=planned_placement(run, spec), recipe=recipe, world=world
        )

    message = f"running the {teacher.placement} teacher on the held-out texts"
    progress.phase(Phase.EVALUATING, message, step=state.step)
    mode = signal_mode(spec, hidden=bool(matched))
    tap = [layer for _, layer in matched]
    hashes = None
    if mode != "online" and task.cache_dir is not None and world.is_first:
        hashes = hash_teacher(files.directory)
    signals = open_signals(task, teacher, hashes, data.train, recipe, world, tap=tap)
    if mode != "online":
        message = f"the teacher's outputs take {signals.num_bytes / 2**20:.1f} MiB"
        progress.phase(Phase.EVALUATING, message)
    with probe.phase("evaluation"):
        evaluation = open_signals(task, teacher, hashes, data.evaluation, recipe, world)
        stop = evaluation.fill(report_outputs(progress))
        validation = None
        if stop is None and data.fits_thresholds:
            validation = evaluation
            if data.evaluation is not data.validation:
                validation = open_signals(task, teacher, hashes, data.validation, recipe, world)
            stop = validation.fill(report_outputs(progress))
        record = None
        if stop is None:
            record = record_teacher(teacher, evaluation, validation, data, world)
    del teacher  # its memory is freed as soon as all its outputs are cached

    schedule = plan_schedule(training, num_texts=len(train))
    steps_per_epoch, total = schedule.steps_per_epoch, schedule.total_steps
    plan: list[Step] = []

    while stop is None:
        due = schedule.evaluates_after(state.step)
        if due and state.step > state.evaluated_step and len(data.validation.corpus):
            progress.phase(Phase.EVALUATING)
            with probe.phase("evaluation", step=state.step):
                logits = predict_split(
                    student,
                    data.validation.student,
                    heads,
                    world,
                    budget_tokens=budget_tokens,
                    pad_id=pad_id,
                )
            result = evaluate(logits, data.validation.student, heads)
            progress.evaluation(
                result, step=state.step, total=total, epoch=state.step / steps_per_epoch
            )
            if state.record_evaluation(result):
                loop_state.save_best(run, task, student, world, state)
            patience = training.early_stopping_patience
            state.finished = patience is not None and state.worse_evaluations >= patience
            progress.phase(Phase.TRAINING)
        if state.step >= total or state.finished:
            break

        epoch, place = divmod(state.step, steps_per_epoch)
        if not plan or place == 0:
            with fail_with(Reason.BAD_SPEC):
                plan = plan_epoch(
                    data.lengths,
                    budget_tokens=budget_tokens,
                    batch_size=training.batch_size,
                    ranks=world.size,
                    seed=training.seed,
                    epoch=epoch,
                )
            if (mode == "cached" or (mode == "auto" and epoch > 0)) and not signals.complete:
                progress.phase(Phase.EVALUATING, "running the teacher on the remaining texts")
                with probe.phase("evaluation", step=state.step):
                    stop = signals.fill(report_outputs(progress))
                if stop is not None:
                    break
            progress.phase(Phase.TRAINING)
        started = time.monotonic()
        step, number = plan[place], state.step + 1
        rate = learning_rate(state.step, total, training)
        factors = objective.factors(step, done=state.step / total)
        seed_step(training.seed, state.step, world.rank)
        student.module.train()
        loss_sum = torch.zeros((), device=world.device)

        for i, rows in enumerate(step.micro_batches[world.rank]):
            batch = collate(train, rows, pad_id).to(world.device)
            with probe.phase("forward", step=number):
                outputs = signals.for_rows(rows)  # [B, C] by head, and [B, K, H]
                student_outputs = student.module(*batch.inputs, tap=[layer for layer, _ in matched])
                loss = objective.loss(student_outputs, outputs, batch, factors)
            optimizer.before_backward(
                learning_rate=rate, step=state.step, part=i, parts=step.num_micro_batches
            )
            with probe.phase("backward", step=number):
                # The engine averages gradients over the ranks, but the losses of the ranks are to be summed.
                (loss * world.size).backward()  # type: ignore[no-untyped-call]
            loss_sum += loss.detach()
            del student_outputs, outputs, loss

        step_loss, *flags = world.sum([float(loss_sum), *world.stopping.flags()])
        if not math.isfinite(step_loss):
            raise RunFailed(
                Reason.NON_FINITE_LOSS,
                f"The loss of step {number} is {step_loss}: lower the learning rate "
                f"({training.learning_rate:g}), or raise warmup_ratio or the compute precision.",
            )
        with probe.phase("optimizer_step", step=number):
            optimizer.step()
            student.clear_decoder_bias()

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
            loop_state.save(run, task, student, optimizer, world, state)
            progress.phase(Phase.TRAINING)

    if mode != "online":
        signals.synchronise()
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
        assert record is not None
        with probe.phase("export", step=state.step):
            loop_state.restore_best(run, task, student, state)
            report = publish(
                run,
                task,
                student,
                data,
                record,
                world,
                state,
                init=init,
                steps_per_epoch=steps_per_epoch,
                signals=mode,
            )
    if world.is_first:
        write_json(run.report, report)
    progress.phase(Phase.FINISHING)
    shared.remove()
    return report


def report_outputs(progress: Progress) -> Callable[[int, int], None]:
    """Return a callback that reports the teacher's progress every PROGRESS_INTERVAL_SECONDS."""
    last_report = time.monotonic()

    def report(done: int, total: int) -> None:
        nonlocal last_report
        if time.monotonic() - last_report >= PROGRESS_INTERVAL_SECONDS:
            last_report = time.monotonic()
            progress.phase(Phase.EVALUATING, f"the teacher has processed {done} of {total} texts")

    return report
