from __future__ import annotations

from services.shared.jobs.spec import Training
from services.shared.training.schedule import plan_schedule


def test_fractions_of_an_epoch_are_rounded_to_whole_steps() -> None:
    training = Training(epochs=2.5, batch_size=16, eval_every_epochs=0.5)
    schedule = plan_schedule(training, num_texts=100)
    assert schedule.steps_per_epoch == 7
    assert schedule.total_steps == 18
    assert schedule.evaluation_interval == 4
    assert [step for step in range(1, 19) if schedule.evaluates_after(step)] == [4, 8, 12, 16, 18]


def test_max_steps_ends_a_run_before_its_epochs_do() -> None:
    training = Training(epochs=3, batch_size=10, max_steps=5)
    assert plan_schedule(training, num_texts=100).total_steps == 5


def test_a_run_has_at_least_one_step() -> None:
    schedule = plan_schedule(Training(epochs=0.1, batch_size=16), num_texts=10)
    assert (schedule.total_steps, schedule.evaluation_interval) == (1, 1)
