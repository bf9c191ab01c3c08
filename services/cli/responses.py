"""The fields of the API's JSON responses that the commands read; responses may hold more."""

from __future__ import annotations

from typing import TypedDict


class HeadResponse(TypedDict):
    """A head of a dataset."""

    name: str
    type: str
    labels: list[str]


class DatasetResponse(TypedDict):
    """`GET /datasets/{dataset_id}`."""

    id: str
    name: str
    heads: list[HeadResponse]
    rows: dict[str, int]
    label_counts: dict[str, dict[str, int]]
    warnings: list[str]
    created_at: str


class ProgressResponse(TypedDict, total=False):
    """The latest progress of a running job."""

    step: int | None
    total_steps: int | None
    loss: float | None


class IntervalResponse(TypedDict):
    """A confidence interval."""

    low: float
    high: float


class BaselineResponse(TypedDict, total=False):
    """The metrics of the baseline of one head."""

    accuracy: float
    macro_f1: float
    accuracy_interval: IntervalResponse
    macro_f1_interval: IntervalResponse


class HeadMetricsResponse(TypedDict, total=False):
    """The metrics of one head."""

    accuracy: float
    macro_f1: float
    accuracy_interval: IntervalResponse
    macro_f1_interval: IntervalResponse
    baseline: BaselineResponse


class MetricsResponse(TypedDict, total=False):
    """An evaluation: the metrics of each head by name."""

    split: str
    confidence: float  # of its intervals
    heads: dict[str, HeadMetricsResponse]
    warnings: list[str]


class AlternativeResponse(TypedDict, total=False):
    """A change of a plan, or a remedy of a diagnosis."""

    change: str
    verdict: str
    costs: str


class DecisionResponse(TypedDict):
    """What `auto` became, and why."""

    field: str
    value: str | int
    basis: str
    why: str


class PlanResponse(TypedDict, total=False):
    """The memory plan of a job."""

    peak_bytes: int
    verdict: str
    decisions: list[DecisionResponse]
    alternatives: list[AlternativeResponse]


class DiagnosisResponse(TypedDict, total=False):
    """The diagnosis of an out-of-memory failure."""

    cause: str
    confidence: str
    remedies: list[AlternativeResponse]


class JobResponse(TypedDict):
    """`GET /jobs/{job_id}`."""

    id: str
    kind: str
    name: str | None
    state: str
    reason: str | None
    message: str | None
    phase: str | None
    progress: ProgressResponse | None
    metrics: MetricsResponse | None
    plan: PlanResponse | None
    measured: dict[str, dict[str, int]] | None
    diagnosis: DiagnosisResponse | None
    attempt: int
    model_id: str | None
    parent_job_id: str | None
    child_job_ids: list[str]
    created_at: str
    started_at: str
    ended_at: str


class DeletionResponse(TypedDict):
    """`DELETE` of a dataset, job or model."""

    resource: str
    id: str
    deleted_by: str
    gone_after: str
    notes: list[str]


class GateResponse(TypedDict, total=False):
    """Whether a model passed its gate."""

    passed: bool
    message: str


class ModelResponse(TypedDict):
    """`GET /models/{model_id}`."""

    id: str
    name: str | None
    kind: str
    job_id: str
    dataset_id: str
    teacher_model_id: str | None
    parameters: int
    size_bytes: int
    path: str
    metrics: MetricsResponse | None
    gate: GateResponse | None


class HeadPrediction(TypedDict):
    """The best label of a text for one head."""

    label: str
    score: float


class TextPrediction(TypedDict):
    """What `POST /predict` with `detail` answers for one text."""

    heads: dict[str, HeadPrediction]
    tokens: int
    truncated: bool


class PredictResponse(TypedDict):
    """`POST /predict` with `detail`."""

    model: str
    version: str
    data: list[TextPrediction]


class FieldError(TypedDict, total=False):
    """An invalid field of a request."""

    field: str
    message: str


class UploadFault(TypedDict, total=False):
    """A fault of an uploaded dataset."""

    line: int | None
    field: str | None
    message: str


class PreviewResponse(TypedDict):
    """`POST /datasets/preview`."""

    found: str
    first_rows: list[dict[str, str]]
    rows: dict[str, int]
    label_counts: dict[str, dict[str, int]]
    missing_labels: dict[str, int]
    num_duplicates: int
    num_left_out: int
    faults: list[UploadFault]
    warnings: list[str]
    command: str


class ProblemResponse(TypedDict, total=False):
    """An RFC 9457 problem document."""

    type: str
    title: str
    status: int
    detail: str
    errors: list[FieldError]
    faults: list[UploadFault]
    found: str
    command: str
    references: list[str]
    plan: PlanResponse


class RowReferenceResponse(TypedDict):
    """A row of a dataset."""

    split: str
    line: int


class SuspectLabelResponse(RowReferenceResponse):
    """A label that is likely wrong."""

    head: str
    text: str
    given: list[str]
    suggested: list[str]
    score: float


class HeadQualityResponse(TypedDict):
    """How many labels of a head were examined."""

    out_of_fold_texts: int
    model_texts: int
    suspects: int


class DuplicateResponse(TypedDict):
    """Rows with equal texts."""

    text: str
    rows: list[RowReferenceResponse]


class ContradictionResponse(DuplicateResponse):
    """Rows with equal texts and different labels."""

    head: str
    labels: list[list[str]]


class LabelQualityResponse(TypedDict):
    """GET /jobs/{id}/label-quality."""

    heads: dict[str, HeadQualityResponse]
    suspects: list[SuspectLabelResponse]
    num_duplicates: int
    duplicates: list[DuplicateResponse]
    num_contradictions: int
    contradictions: list[ContradictionResponse]
