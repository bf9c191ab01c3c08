"""The evidence of a failed job: the case, its log and the request, in one typed form."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from services.shared.memory.architecture.dimensions import Family
from services.shared.memory.architecture.shape import Shape, find_preset, from_config
from services.shared.memory.errors import InvalidInput
from services.shared.memory.forensics.case import Case
from services.shared.memory.forensics.device_accounts import Accounts, read_accounts
from services.shared.memory.forensics.free_text import (
    FailurePhase,
    Framework,
    PrecisionSettings,
    ShardingSettings,
    parameters_in_name,
    read_device,
    read_optimizer,
    read_phase,
    read_precision,
    read_strategy,
    vocabulary_in,
)
from services.shared.memory.forensics.matching.candidates import Candidate, Role, Workload
from services.shared.memory.forensics.matching.request_matching import match_request
from services.shared.memory.forensics.matching.rounding import Rounding
from services.shared.memory.hardware import DEVICES
from services.shared.memory.oom_log.log_scanner import LogReading, read_log
from services.shared.memory.oom_log.message_formats import Backend, MessageKind
from services.shared.memory.oom_log.message_parser import Message
from services.shared.memory.oom_log.traceback_sites import Note, Site, sites_in
from services.shared.memory.recipe import Optimizer, OptimizerImpl, Sharding

# A stated number of parameters further than this from a published shape means another model.
_SAME_MODEL = 0.12
_MOST_LAYERS = 1000
_LARGEST_DIMENSION = 10**8
_ADAPTERS = re.compile(r"\bq?lora\b|\bpeft\b|adapters?\b|\bfrozen\b", re.IGNORECASE)
_CLASSIFIER = re.compile(r"classif|\bheads?\b|backbone|teacher|student", re.IGNORECASE)


@dataclass(frozen=True)
class Evidence:
    """A case with its free text parsed, its log read and its request matched.

    `shapes` holds the candidates for the model: one, or two where a published name may mean the
    backbone alone or the language model with its output projection.
    """

    case: Case
    log: LogReading
    message: Message | None
    accounts: Accounts
    strategy: ShardingSettings
    precision: PrecisionSettings
    phase: FailurePhase | None
    sites: tuple[Site, ...]
    shapes: tuple[Shape, ...]
    num_parameters: int | None
    optimizer: Optimizer | None
    optimizer_impl: OptimizerImpl | None
    device: str | None
    candidates: tuple[Candidate, ...] = ()
    from_log: Mapping[str, Any] = field(default_factory=dict)  # settings that only the log states

    @property
    def framework(self) -> Framework | None:
        """The configured framework of distribution, else the one whose code the traceback shows."""
        stated = self.case.framework or self.strategy.framework
        return stated or (Framework(self.log.engine) if self.log.engine else None)

    @property
    def sharding(self) -> Sharding | None:
        """The configured sharding strategy."""
        return self.case.sharding or self.strategy.sharding

    @property
    def ranks(self) -> int | None:
        """Number of ranks; one where the text says that there is one device."""
        return self.case.ranks or (
            1 if self.framework is Framework.NONE and self._single_device else None
        )

    @property
    def _single_device(self) -> bool:
        words = (self.case.sharding_strategy or "").lower()
        return bool(re.search(r"\bone (?:gpu|card)|single", words))

    @property
    def card_bytes(self) -> int | None:
        """Memory of one device: as printed, as given, or as usual for its kind."""
        if self.accounts.total_bytes:
            return self.accounts.total_bytes
        return DEVICES[self.device].memory_bytes if self.device else None

    @property
    def shape(self) -> Shape | None:
        """The shape to compute with first."""
        return self.shapes[0] if self.shapes else None

    @property
    def offloads(self) -> bool:
        """Whether parameters or optimizer state were configured to be in host memory."""
        stated = (self.case.offload or "").strip().lower()
        return self.strategy.offload or stated not in ("", "none", "false", "no")

    @property
    def finished_steps(self) -> int:
        """Number of steps known to have finished before the failure."""
        return max((self.case.step or 1) - 1, self.log.completed_steps or 0)

    @property
    def is_inference(self) -> bool:
        """Whether the job generates without training: it has no gradients and no optimizer."""
        generates = Site.GENERATING in self.sites and Site.EVALUATING not in self.sites
        trains = self.optimizer is not None or self.finished_steps > 0
        return self.phase is FailurePhase.EVALUATE and generates and not trains

    @property
    def replicates(self) -> bool:
        """Whether the configuration puts the whole model on every rank."""
        unsharded = self.sharding is Sharding.NONE and self.framework is not None
        return unsharded or self.framework in (Framework.DDP, Framework.NONE)

    @property
    def trains_adapters(self) -> bool:
        """Whether only small adapters are trained: the rest has no gradient and no state."""
        stated = _ADAPTERS.search(f"{self.case.free_text} {self.case.optimizer or ''}")
        return bool(stated) or Note.ADAPTERS in self.log.notes

    @property
    def shards_parameters(self) -> bool:
        """Whether the configuration divides the parameters over several ranks."""
        return (
            self.framework is not None
            and self.framework.shards_parameters
            and self.sharding is not Sharding.NONE
            and self.ranks != 1
        )


def gather_evidence(case: Case, log: LogReading | None = None) -> Evidence:
    """Return the evidence of `case`: free text parsed, log read, request matched.

    A `log` that was already read replaces the case's own text.
    """
    log = log or read_log(case.log)
    from_log = settings_of_log(case, log)
    case = replace(case, **from_log)
    message = log.primary
    precision = _precision(case, log)
    strategy = read_strategy("; ".join(t for t in (case.sharding_strategy, case.offload) if t))
    device, stated_memory = read_device(case.device or "")
    total = case.device_memory_bytes or stated_memory
    accounts = _accounts(message, total, device)
    sites = log.sites + sites_in(" ".join(t for t in (case.phase, case.sharding_strategy) if t))
    optimizer, implementation = read_optimizer(case.optimizer or "")
    evidence = Evidence(
        case=case,
        log=log,
        message=message,
        accounts=accounts,
        strategy=strategy,
        precision=precision,
        phase=_phase(case, sites),
        sites=sites,
        shapes=_shapes(case),
        num_parameters=_num_parameters(case),
        optimizer=optimizer,
        optimizer_impl=case.optimizer_impl or implementation,
        device=device,
        from_log=from_log,
    )
    if evidence.num_parameters is None:
        evidence = replace(evidence, num_parameters=_usual_parameters(evidence))
    return replace(evidence, candidates=_candidates(evidence))


def settings_of_log(case: Case, log: LogReading) -> dict[str, Any]:
    """Return the settings that the log states, of those that the case does not state itself."""
    settings = log.settings
    stated: dict[str, Any] = {
        "model_name": settings.model_name if not case.model else None,
        "ranks": settings.ranks or _ranks_that_printed(log),
        "micro_batch": settings.micro_batch,
        "sequence_length": settings.sequence_length,
        "accumulate": settings.accumulate,
        "activation_checkpointing": settings.activation_checkpointing,
        "optimizer": settings.optimizer,
        "sharding_strategy": settings.strategy if case.framework is None else None,
        "precision": settings.precision if case.parameters is None else None,
    }
    return {
        name: value
        for name, value in stated.items()
        if value is not None and getattr(case, name) is None
    }


def _ranks_that_printed(log: LogReading) -> int | None:
    """Return the least number of ranks for which these ranks printed, or None for none or rank 0."""
    highest = max(log.ranks, default=0)
    return highest + 1 if highest else None


def _usual_parameters(evidence: Evidence) -> int | None:
    """Return the parameters of the known shape, as counted by the log, or as the name says."""
    if evidence.shape:
        return evidence.shape.num_parameters
    return evidence.log.settings.num_parameters or parameters_in_name(
        evidence.case.model_name or ""
    )


def _precision(case: Case, log: LogReading) -> PrecisionSettings:
    """Return the stated precision, with the quantisation that any text or the log names."""
    stated = read_precision(case.precision or "")
    if stated.bits is not None:
        return stated
    texts = (case.sharding_strategy, case.model_name, case.wrap_policy)
    bits = read_precision("; ".join(text for text in texts if text)).bits
    config = case.model.get("quantization_config")
    if bits is None and config is not None:
        bits = read_precision(str(config)[:2000].replace("_", " ")).bits
    if bits is None:
        notes = log.notes
        bits = 4 if Note.FOUR_BIT in notes else 8 if Note.EIGHT_BIT in notes else None
    return replace(stated, bits=bits)


def _accounts(message: Message | None, total: int | None, device: str | None) -> Accounts:
    if message is None:
        return Accounts(total_bytes=total)
    known = DEVICES.get(device or "")
    usual = known.reserve_bytes + known.uncertainty_bytes if known else 0
    return read_accounts(message, total_bytes=total, usual_outside_bytes=usual)


def _phase(case: Case, sites: tuple[Site, ...]) -> FailurePhase | None:
    stated = read_phase(case.phase or "")
    if stated not in (None, FailurePhase.TRAIN):
        return stated
    for phase, known in _PHASE_OF_SITES:
        if any(site in sites for site in known):
            return phase
    return stated


_PHASE_OF_SITES = (
    (FailurePhase.SAVE, (Site.SAVING,)),
    (FailurePhase.OPTIMIZER_STEP, (Site.OPTIMIZER, Site.STATE)),
    (FailurePhase.BACKWARD, (Site.BACKWARD,)),
    (FailurePhase.EVALUATE, (Site.EVALUATING, Site.GENERATING)),
    (FailurePhase.FORWARD, (Site.FORWARD, Site.LOSS, Site.ATTENTION)),
    (FailurePhase.WRAP, (Site.WRAPPING,)),
    (FailurePhase.LOAD, (Site.LOADING, Site.MOVING, Site.UNPICKLING)),
)


def _num_parameters(case: Case) -> int | None:
    stated = case.model.get("num_parameters")
    if stated is None:
        return None
    if isinstance(stated, bool) or not isinstance(stated, (int, float)) or not 0 < stated < 1e15:
        raise InvalidInput("model.num_parameters", f"{stated!r} is not a number of parameters")
    return int(stated)


def _shapes(case: Case) -> tuple[Shape, ...]:
    shape = _shape_from_config(case.model, case.model_name) or find_preset(case.model_name or "-")
    if shape is None:
        return ()
    if case.heads:
        return (shape.with_heads(case.heads),)
    classifier, causal = shape, shape.with_language_head()
    stated = _num_parameters(case)
    if stated is None:
        if _CLASSIFIER.search(f"{case.free_text} {case.model.get('architectures', '')}"):
            return (classifier,)
        return (causal,) if shape.dims.tied else (causal, classifier)
    nearest = min((causal, classifier), key=lambda s: abs(s.num_parameters - stated))
    return (nearest,) if abs(nearest.num_parameters - stated) <= _SAME_MODEL * stated else ()


_OUR_NAMES = {
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "tied": "tie_word_embeddings",
}
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")


def _shape_from_config(model: Mapping[str, Any], name: str | None) -> Shape | None:
    """Return the shape that a config, or the contract's short form of one, describes."""
    if "model_type" in model:
        _check_layers(model.get("num_hidden_layers", 1))
        return from_config(model, name=name or "model")
    config = {_OUR_NAMES.get(key, key): value for key, value in model.items()}
    if any(config.get(key) is None for key in _NEEDED):
        return None
    named = find_preset(name or "-")
    config["model_type"] = str(named.dims.family if named else Family.LLAMA)
    _check_layers(config["num_hidden_layers"])
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config.setdefault("max_position_embeddings", 2048)
    if isinstance(config["hidden_size"], int):  # from_config names the field otherwise
        config.setdefault("intermediate_size", 4 * config["hidden_size"])
    return from_config(config, name=name or "model")


def _dimension(case: Case, name: str) -> int | None:
    value = case.model.get(name)
    known = (
        isinstance(value, int) and not isinstance(value, bool) and 0 < value < _LARGEST_DIMENSION
    )
    return value if known else None


def _check_layers(count: Any) -> None:
    # A timeline has points for every layer, so an absurd number of layers would only take time.
    if isinstance(count, int) and count > _MOST_LAYERS:
        raise InvalidInput("model.num_layers", f"{count}", accepted=f"up to {_MOST_LAYERS}")


def _candidates(evidence: Evidence) -> tuple[Candidate, ...]:
    message, case = evidence.message, evidence.case
    if message is None or message.requested is None or message.kind is MessageKind.COLLECTIVE:
        return ()
    backend = Backend.CUDA if message.backend is Backend.UNKNOWN else message.backend
    workload = Workload(
        ranks=case.ranks,
        micro_batch=case.micro_batch,
        sequence_length=case.sequence_length,
        zero=evidence.framework in (Framework.ZERO1, Framework.ZERO2, Framework.ZERO3),
        replicates=evidence.framework is Framework.DDP and evidence.ranks != 1,
        bits=evidence.precision.bits,
        trains_all=not evidence.trains_adapters,
        vocab_size=_dimension(case, "vocab_size") or vocabulary_in(case.model_name or ""),
        hidden_size=_dimension(case, "hidden_size"),
        num_parameters=evidence.num_parameters,
    )
    rounding = Rounding(backend, evidence.log.power2_divisions)
    found: dict[tuple[str, int], Candidate] = {}
    for shape in evidence.shapes or (None,):
        for candidate in match_request(
            message.requested,
            shape,
            workload=workload,
            rounding=rounding,
            expected=_expected_roles(evidence),
        ):
            found.setdefault((candidate.what, candidate.size_bytes), candidate)
    return tuple(found.values())


# What is allocated in each phase, and at sites that a traceback names.
_ROLES_OF_PHASES: dict[FailurePhase, tuple[Role, ...]] = {
    FailurePhase.LOAD: (Role.WEIGHT, Role.EMBEDDING, Role.FUSED_WEIGHTS, Role.PACKED),
    FailurePhase.WRAP: (Role.LAYER, Role.ROOT, Role.MODEL, Role.BUCKET),
    FailurePhase.BACKWARD: (Role.LAYER, Role.ROOT, Role.BUCKET),
    FailurePhase.OPTIMIZER_STEP: (Role.MODEL, Role.LAYER, Role.BUCKET),
    FailurePhase.SAVE: (Role.WEIGHT, Role.EMBEDDING, Role.LAYER, Role.MODEL),
    FailurePhase.EVALUATE: (Role.LOGITS, Role.SCORES, Role.ACTIVATION),
}
_ROLES_OF_SITES: dict[Site, tuple[Role, ...]] = {
    Site.LOSS: (Role.LOGITS,),
    Site.ATTENTION: (Role.SCORES,),
    Site.GATHERING: (Role.LAYER, Role.ROOT, Role.EMBEDDING),
}


def _expected_roles(evidence: Evidence) -> tuple[Role, ...]:
    """Return the roles of what is allocated where the job failed."""
    at_site = [role for site in evidence.sites for role in _ROLES_OF_SITES.get(site, ())]
    in_phase = _ROLES_OF_PHASES.get(evidence.phase, ()) if evidence.phase else ()
    return tuple(at_site) or in_phase
