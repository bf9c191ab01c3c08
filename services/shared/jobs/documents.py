"""The JSON documents that are stored with jobs, attempts, events and models.

Their field names are a contract. What an older version has stored is passed on unchanged: readers
use `get` for every field that such a version may not have written.
"""

from __future__ import annotations

from typing import Any, TypedDict

from services.shared.memory.planning.plan_contract import PlanDict

# Of `spec.Recipe`, by name: all of them, or those that change.
RecipeFields = dict[str, str | int | bool | None]

# {"heads": {name: {"accuracy", "macro_f1", ...}}, ...}; every loop adds measurements of its own.
Evaluation = dict[str, Any]

# By rank and phase, in bytes.
MeasuredPeaks = dict[str, dict[str, int]]


class DecisionDict(TypedDict):
    """What `auto` became, or will become, and on what basis."""

    field: str  # of the spec
    value: str | int
    basis: str  # measured, assumed, machine, teacher
    why: str


class JobPlanDict(PlanDict, total=False):
    """The memory plan of a job."""

    teacher_placement: str  # of a distillation
    decisions: list[DecisionDict]  # where the spec left a choice to the machine


class ProgressDict(TypedDict, total=False):
    """The last progress of a job: `run_directory.ProgressRecord` without the phase."""

    time: float
    step: int
    total_steps: int
    epoch: float
    loss: float
    learning_rate: float
    tokens_per_second: float
    eta_seconds: float
    padding_share: float
    evaluation: Evaluation
    message: str


class ObservedShardingDict(TypedDict, total=False):
    """What one rank held after wrapping, and what its recipe expects; sizes are in bytes."""

    engine: str
    ranks: int
    sharding: str
    sharded_units: int
    expected_units: int
    local_parameter_bytes: int
    expected_local_parameter_bytes: int
    whole_model_bytes: int
    largest_unit_bytes: int
    parameter_dtypes: list[str]
    basis: str | None  # what the probe can count
    allocated_bytes: int
    reserved_bytes: int


ObservedSharding = dict[str, ObservedShardingDict]  # by rank


class AllocatorDict(TypedDict, total=False):
    """Counters at the moment of a failure: an accelerator's allocator, or the kernel's of a process."""

    basis: str
    allocated_bytes: int
    reserved_bytes: int
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    inactive_split_bytes: int
    num_alloc_retries: int
    num_ooms: int
    device_free_bytes: int
    device_total_bytes: int
    resident_bytes: int | None
    peak_resident_bytes: int | None
    address_space_bytes: int | None
    address_space_limit_bytes: int | None


class FailureDict(TypedDict, total=False):
    """The failure of the rank that caused the end of an attempt: `run_directory.Failure`."""

    time: float
    rank: int
    phase: str
    step: int
    reason: str
    message: str
    error_type: str
    traceback: str
    request_bytes: int | None
    allocator: AllocatorDict | None


class EventDataDict(TypedDict, total=False):
    """The details of an event; which fields there are depends on its type."""

    state: str
    reason: str
    message: str
    phase: str
    evaluation: Evaluation
    step: int
    epoch: float


class ModelHeadDict(TypedDict):
    """A head of a model: `datasets.card.Head`."""

    name: str
    type: str
    labels: list[str]
