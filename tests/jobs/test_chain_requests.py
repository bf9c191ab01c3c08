"""A chain: one request for a teacher and the distillation that waits for it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from pydantic import ValidationError

from services.shared.datasets.card import Head
from services.shared.datasets.text import TextKind
from services.shared.jobs.errors import DoesNotFit, InvalidRequest, prefix_field
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.resolved_spec import ResolvedTeacher
from services.shared.jobs.spec import ChainSpec, Recipe
from services.shared.jobs.state import JobState, Reason
from services.shared.jobs.views import JobView
from tests.factories import plan_document

if TYPE_CHECKING:
    from tests.jobs.conftest import AtOnce, StoreDriver

BACKBONE = {"config": {"model_type": "qwen3"}, "tokenizer": {"train": True, "vocab_size": 300}}
OTHER_LABELS = Head(name="sentiment", labels=["bad", "good"])
DOMAIN = Head(name="domain", labels=["book", "hotel"])


def _chain(
    driver: StoreDriver, *, teacher: dict[str, Any] | None = None, **distill: Any
) -> ChainSpec:
    body = {
        "kind": "chain",
        "teacher": {"dataset_id": driver.dataset_id, "model": BACKBONE, **(teacher or {})},
        "distill": {"student": BACKBONE, **distill},
    }
    return ChainSpec.model_validate(body)


def _both(driver: StoreDriver, chain: ChainSpec, **more: Any) -> tuple[JobView, JobView]:
    teacher, _ = driver.create_chain(chain, **more)
    (child_id,) = teacher.child_job_ids
    return teacher, driver.store.job(child_id)


def test_a_chain_is_two_jobs_of_which_the_second_waits(driver: StoreDriver) -> None:
    chain = _chain(driver, promote="when_passed")
    teacher, child = _both(
        driver,
        chain,
        teacher_plan=plan_document(peak_bytes=1),
        teacher_recipe=Recipe(optimizer="sgd"),
        distill_plan=plan_document(peak_bytes=2),
        distill_recipe=Recipe(optimizer="adafactor"),
    )
    assert (teacher.kind, teacher.state) == ("teacher", JobState.QUEUED)
    assert (child.kind, child.state) == ("distill", JobState.WAITING)
    assert teacher.spec == driver.teacher_spec()
    assert child.spec == driver.distill_spec({"job_id": teacher.id}, promote="when_passed")
    assert [(job.plan, job.recipe["optimizer"]) for job in (teacher, child)] == [
        (plan_document(peak_bytes=1), "sgd"),
        (plan_document(peak_bytes=2), "adafactor"),
    ]


def test_a_student_that_passes_its_gate_is_promoted_at_the_end_of_its_chain(
    driver: StoreDriver,
) -> None:
    teacher, child = _both(driver, _chain(driver, promote="when_passed"))
    teacher_model = driver.succeed(driver.claim(teacher.id))
    claim = driver.claim(child.id)
    assert claim.resolved is not None
    assert claim.resolved.teacher == ResolvedTeacher(driver.settings.model_dir(teacher_model))
    heads = {"heads": {"sentiment": {"macro_f1": 0.9}}}
    student = driver.succeed(claim, heads | {"teacher": heads})
    active = driver.store.active()
    assert active is not None
    assert active.model_id == student


@pytest.mark.parametrize("end", [End.FAILED, End.CANCELLED])
def test_a_teacher_that_makes_no_model_fails_the_rest_of_its_chain(
    driver: StoreDriver, end: End
) -> None:
    teacher, child = _both(driver, _chain(driver))
    claim = driver.claim(teacher.id)
    if end is End.CANCELLED:
        driver.store.request_cancel(teacher.id)
    driver.store.finish(claim, Outcome(end=end, message="It ended."))
    job = driver.store.job(child.id)
    assert (job.state, job.reason) == (JobState.FAILED, Reason.PARENT_FAILED)


def test_a_teacher_cancelled_in_the_queue_fails_the_rest_of_its_chain(driver: StoreDriver) -> None:
    teacher, child = _both(driver, _chain(driver))
    driver.store.request_cancel(teacher.id)
    assert driver.store.job(child.id).reason == Reason.PARENT_FAILED


def test_a_key_covers_the_pair(driver: StoreDriver, at_once: AtOnce) -> None:
    chain = _chain(driver)
    made = at_once(8, lambda _: driver.create_chain(chain, idempotency_key="k"))
    assert len({teacher.id for teacher, _ in made}) == 1
    assert sum(created for _, created in made) == 1
    assert {len(teacher.child_job_ids) for teacher, _ in made} == {1}
    assert len(driver.store.list_jobs().items) == 2


def test_a_key_that_a_chain_has_used_is_refused_for_anything_else(driver: StoreDriver) -> None:
    driver.create_chain(_chain(driver), idempotency_key="k")
    with pytest.raises(InvalidRequest) as refused:
        driver.create_chain(_chain(driver, name="b"), idempotency_key="k")
    assert refused.value.field == "Idempotency-Key"
    with pytest.raises(InvalidRequest) as refused:
        driver.create_job(driver.teacher_spec(), idempotency_key="k")
    assert refused.value.field == "Idempotency-Key"


@pytest.mark.parametrize(
    ("teacher", "distill", "field"),
    [
        ({"dataset_id": "ds_none"}, {}, "teacher.dataset_id"),
        ({"heads": ["mood"]}, {}, "teacher.heads"),
        ({}, {"dataset_id": "ds_none"}, "distill.dataset_id"),
        ({}, {"heads": ["mood"]}, "distill.heads"),
        ({}, {"student": {"model_id": "mdl_none"}}, "distill.student.model_id"),
    ],
)
def test_a_missing_reference_of_one_part_is_named_and_neither_is_stored(
    driver: StoreDriver, teacher: dict[str, Any], distill: dict[str, Any], field: str
) -> None:
    with pytest.raises(InvalidRequest, match=f"^{field}: ") as refused:
        driver.create_chain(_chain(driver, teacher=teacher, **distill))
    assert refused.value.field == field
    assert driver.store.list_jobs().items == []


def test_heads_that_differ_are_refused_with_both_lists(driver: StoreDriver) -> None:
    other = driver.add_dataset(heads=(OTHER_LABELS,))
    with pytest.raises(InvalidRequest) as refused:
        driver.create_chain(_chain(driver, dataset_id=other))
    assert str(refused.value) == (
        "distill.heads: teacher and student heads differ: the teacher has "
        "sentiment (single_label: negative, positive); "
        "the student has sentiment (single_label: bad, good)"
    )
    assert driver.store.list_jobs().items == []


def test_a_student_has_the_heads_of_its_teacher_unless_it_names_some(driver: StoreDriver) -> None:
    both = driver.add_dataset(heads=(OTHER_LABELS, DOMAIN))
    teacher = {"dataset_id": both, "heads": ["domain"]}
    _, child = _both(driver, _chain(driver, teacher=teacher))
    assert (child.dataset_id, child.spec.heads) == (both, ["domain"])
    _, child = _both(driver, _chain(driver, teacher={"dataset_id": both}, heads=["sentiment"]))
    assert child.spec.heads == ["sentiment"]


@pytest.mark.parametrize(
    ("part", "fields"),
    [
        ("distill", {"teacher": {"job_id": "job_1"}}),
        ("teacher", {"student": BACKBONE}),
        ("teacher", {"model": {"layers_of_teacher": 2, "tokenizer": "teacher"}}),
        ("distill", {"heads": []}),
    ],
)
def test_an_invalid_part_is_refused(driver: StoreDriver, part: str, fields: dict[str, Any]) -> None:
    body = _chain(driver).model_dump(mode="json", exclude_unset=True)
    with pytest.raises(ValidationError):
        ChainSpec.model_validate(body | {part: body[part] | fields})


def test_a_plan_that_does_not_fit_names_its_part() -> None:
    with pytest.raises(DoesNotFit) as refused, prefix_field("distill"):
        raise DoesNotFit("Too much.", plan_document(peak_bytes=7))
    assert (str(refused.value), refused.value.field) == ("distill: Too much.", "distill")
    assert refused.value.plan == plan_document(peak_bytes=7)


def test_teacher_and_student_must_have_texts_of_the_same_kind(driver: StoreDriver) -> None:
    pairs = driver.add_dataset(text_kind=TextKind.PAIR)
    with pytest.raises(
        InvalidRequest, match="of the kind single, and those of this dataset are pair"
    ):
        _both(driver, _chain(driver, dataset_id=pairs))
    running = driver.queued()
    finished = driver.succeed(driver.running())
    for teacher in ({"job_id": running.id}, {"model_id": finished}):
        with pytest.raises(InvalidRequest) as refused:
            driver.store.resolve(driver.distill_spec(teacher, dataset_id=pairs))
        assert refused.value.field == "dataset_id"


def test_unlabelled_texts_must_be_of_the_kind_of_the_labelled_ones(driver: StoreDriver) -> None:
    finished = driver.succeed(driver.running())
    chats = driver.add_dataset(heads=(), text_kind=TextKind.CHAT)
    spec = driver.distill_spec(
        {"model_id": finished}, distillation={"unlabelled_dataset_ids": [chats]}
    )
    with pytest.raises(InvalidRequest, match=f"texts of {chats} are of the kind chat") as refused:
        driver.store.resolve(spec)
    assert refused.value.field == "distillation.unlabelled_dataset_ids.0"


def test_the_training_texts_of_a_job_are_counted_for_its_plan(driver: StoreDriver) -> None:
    finished = driver.succeed(driver.running())
    more = driver.add_dataset(heads=())
    spec = driver.distill_spec(
        {"model_id": finished}, distillation={"unlabelled_dataset_ids": [more]}
    )
    assert driver.store.resolve(driver.teacher_spec()).training_texts == 8
    assert driver.store.resolve(spec).training_texts == 8 + 10
