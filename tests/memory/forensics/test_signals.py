"""What a few percent of a card outside the allocator, and a checkpoint read by every rank, say."""

from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.diagnose import diagnose
from services.shared.memory.forensics.diagnosis import Cause, Diagnosis, Strength

CARD = (
    "CUDA out of memory. Tried to allocate 1.00 GiB. GPU 4 has a total capacity of 95.00 GiB of which "
    "{free} GiB is free. Including non-PyTorch memory, this process has {process} GiB memory in use. Of "
    "the allocated memory {allocated} GiB is allocated by PyTorch, and 0.50 GiB is reserved by PyTorch but "
    "unallocated."
)


def strength_of(found: Diagnosis, cause: Cause) -> Strength | None:
    return next((h.strength for h in found.hypotheses if h.cause is cause), None)


def test_a_few_percent_outside_the_allocator_leave_other_causes() -> None:
    # 4.5 GiB outside: 2.0 beyond the usual context, 2 % of the card.
    log = CARD.format(free="0.80", process="94.20", allocated="89.20")
    found = diagnose(Case(log=log, ranks=8, sharding_strategy="LoRA"))
    assert strength_of(found, Cause.OUTSIDE_ALLOCATOR) is Strength.POSSIBLE
    assert strength_of(found, Cause.LOGITS_OR_ACTIVATIONS) is Strength.POSSIBLE


def test_a_tenth_of_the_card_outside_the_allocator_is_the_likely_cause() -> None:
    log = CARD.format(free="0.80", process="94.20", allocated="82.00")
    found = diagnose(Case(log=log, ranks=8, sharding_strategy="LoRA"))
    assert strength_of(found, Cause.OUTSIDE_ALLOCATOR) is Strength.LIKELY


def test_ranks_that_read_a_checkpoint_without_map_location_may_share_a_card() -> None:
    log = (
        'File "train.py", line 9, in main\n    state = torch.load(path)\n'
        'File "torch/serialization.py", line 1026, in load\nRuntimeError: CUDA out of memory.'
    )
    found = diagnose(Case(log=log, ranks=4, sharding_strategy="DDP"))
    assert strength_of(found, Cause.OWN_RANKS_ON_CARD) is Strength.POSSIBLE
    lines = [line.line for remedy in found.remedies for line in remedy.lines]
    assert any("map_location" in line for line in lines)
    alone = diagnose(Case(log=log, ranks=1))
    assert strength_of(alone, Cause.OWN_RANKS_ON_CARD) is None
