"""Whether each rank really held only its shard of the parameters, with the evidence."""

from __future__ import annotations

from services.shared.memory.forensics.case import Observed
from services.shared.memory.forensics.diagnosis import Sharded
from services.shared.memory.forensics.evidence import Evidence
from services.shared.memory.forensics.free_text import FailurePhase, Framework
from services.shared.memory.forensics.matching.candidates import Candidate, Match, Role
from services.shared.memory.oom_log.message_formats import MessageKind
from services.shared.memory.oom_log.traceback_sites import Note
from services.shared.memory.sizes import format_size

Verdict = tuple[Sharded, tuple[str, ...]]
_WHOLE = 0.9  # of all parameters on one rank: not sharded, however padded
_SHARE_SLACK = 1.15  # a shard may exceed 1/n by padding and by units that stay whole


def judge_sharding(evidence: Evidence) -> Verdict:
    """Return whether the parameters were sharded, with the strongest evidence for it."""
    for judge in (_from_probe, _from_warnings, _from_request, _from_phase, _from_configuration):
        verdict = judge(evidence)
        if verdict is not None:
            return verdict
    return Sharded.UNKNOWN, ("nothing given tells whether the parameters were sharded",)


def _from_probe(evidence: Evidence) -> Verdict | None:
    observed = evidence.case.observed
    if observed == Observed() or evidence.ranks == 1:
        return None
    by_bytes = _local_share(evidence)
    if by_bytes is not None:
        return by_bytes
    if observed.sharded_units == 0:
        return Sharded.NO, ("the probe after wrapping found no sharded unit",)
    layers = evidence.shape.num_layers if evidence.shape else 2
    if observed.sharded_units == 1 and layers > 1:
        return Sharded.PARTLY, ("the probe found one sharded unit for the whole model",)
    if observed.sharded_units:
        return Sharded.YES, (f"the probe found {observed.sharded_units} sharded units",)
    return _from_allocated(evidence)


def _local_share(evidence: Evidence) -> Verdict | None:
    observed, count, ranks = evidence.case.observed, evidence.num_parameters, evidence.ranks
    local = observed.local_parameter_bytes
    if not local or not count or not ranks or ranks == 1:
        return None
    width = _width_of(local, count, ranks) if not observed.dtypes else _dtype_width(observed)
    share = local / (count * width)
    text = (
        f"the probe found {format_size(local)} of parameters on the rank: {share:.2f} of the "
        f"model's {format_size(count * width)}, where 1/{ranks} is {1 / ranks:.2f}"
    )
    if share >= _WHOLE:
        return Sharded.NO, (text,)
    return (Sharded.YES if share <= _SHARE_SLACK / ranks else Sharded.PARTLY), (text,)


def _dtype_width(observed: Observed) -> int:
    return 4 if "float32" in observed.dtypes else 2


def _width_of(local: int, count: int, ranks: int) -> int:
    """Return the bytes per parameter for which `local` is nearest to a whole or a sharded model."""
    fits = [(abs(local - count * w // n) / local, w) for w in (2, 4) for n in (1, ranks)]
    return min(fits)[1]


def _from_allocated(evidence: Evidence) -> Verdict | None:
    allocated = evidence.case.observed.allocated_after_wrap_bytes
    count, ranks = evidence.num_parameters, evidence.ranks
    if not (allocated and count and ranks and ranks > 1):
        return None
    layouts = [
        (count * width // n, Sharded.NO if n == 1 else Sharded.YES)
        for width in (2, 4)
        for n in (1, ranks)
    ]
    expected, verdict = min(layouts, key=lambda layout: abs(layout[0] - allocated))
    rivals = [size for size, other in layouts if other is not verdict]
    if abs(expected - allocated) > 0.1 * expected or any(
        abs(size - allocated) <= 0.1 * size for size in rivals
    ):
        return None
    text = f"{format_size(allocated)} were allocated after wrapping, near {format_size(expected)}"
    return verdict, (text,)


def _from_warnings(evidence: Evidence) -> Verdict | None:
    notes = evidence.log.notes
    for note in (Note.NO_SHARD, Note.DATA_PARALLEL, Note.ZERO3_INIT_OFF):
        if note in notes:
            return Sharded.NO, (f"the log says that {note}",)
    if Note.MIXED_REQUIRES_GRAD in notes:
        return Sharded.PARTLY, (f"the log says that {Note.MIXED_REQUIRES_GRAD}",)
    return None


def _from_request(evidence: Evidence) -> Verdict | None:
    sure = [c for c in evidence.candidates if c.match is not Match.LOOSE]
    exact = [c for c in sure if c.match is Match.EXACT and not c.ambiguous]
    whole_model = [c for c in sure if c.role is Role.MODEL and c.divided_by == 1]
    if whole_model and len(whole_model) == len(sure):
        text = f"the request is {whole_model[0].what}: the whole model was on one rank"
        return (Sharded.PARTLY if evidence.shards_parameters else Sharded.NO), (text,)
    if evidence.framework in (Framework.NONE, Framework.DDP):
        return None
    return _from_units(evidence, exact)


def _from_units(evidence: Evidence, exact: list[Candidate]) -> Verdict | None:
    ranks = evidence.ranks
    shared = [c for c in exact if c.divided_by > 1]
    if shared and len(shared) == len(exact):
        text = (
            f"the request is {shared[0].what}: a size that appears only when {ranks} ranks divide "
            f"the tensor ({format_size(shared[0].size_bytes)}, and no whole tensor has it)"
        )
        return Sharded.YES, (text,)
    units = [c for c in exact if c.role is Role.LAYER and c.divided_by == 1]
    if units and len(units) == len(exact) and evidence.ranks != 1:
        text = (
            f"the request is {units[0].what} in {units[0].dtype}, "
            f"{format_size(units[0].size_bytes)}: such a buffer exists only where each layer is a "
            "sharding unit of its own; no single weight of this model has this size"
        )
        return Sharded.YES, (text,)
    return None


_BEFORE_SHARDING = "the failure came while the model was loaded, before anything was sharded"


def _from_phase(evidence: Evidence) -> Verdict | None:
    words = (evidence.case.phase or "").lower()
    host = evidence.message is not None and evidence.message.kind in (
        MessageKind.KILLED,
        MessageKind.HOST_ALLOCATOR,
    )
    below = evidence.message is not None and evidence.message.kind in (
        MessageKind.COLLECTIVE,
        MessageKind.DRIVER,
    )
    if evidence.phase is FailurePhase.WRAP and "before" in words:
        return Sharded.NO, ("the failure came before anything was wrapped",)
    if evidence.phase is not FailurePhase.LOAD or evidence.framework is None:
        return None
    if evidence.offloads and evidence.framework is Framework.ZERO3:
        return None
    if host or below or evidence.strategy.efficient_loading:
        return Sharded.UNKNOWN, (_BEFORE_SHARDING,)
    return Sharded.NO, (_BEFORE_SHARDING,)


def _from_configuration(evidence: Evidence) -> Verdict | None:
    framework = evidence.framework
    if framework is None:
        return None
    if framework in (Framework.NONE, Framework.DDP):
        return Sharded.NO, ("no sharding was configured: every rank holds the whole model",)
    if framework in (Framework.ZERO1, Framework.ZERO2):
        text = "ZeRO below stage 3 divides optimizer state and gradients, never the parameters"
        whole = any(c.role is Role.MODEL and c.divided_by == 1 for c in evidence.candidates)
        return (Sharded.NO if whole else Sharded.PARTLY), (text,)
    if evidence.ranks == 1 or not evidence.shards_parameters:
        return Sharded.NO, ("one rank, or NO_SHARD: there is nothing to divide over",)
    return Sharded.YES, (
        f"{framework} was configured and nothing given contradicts it; no number proves it",
    )
