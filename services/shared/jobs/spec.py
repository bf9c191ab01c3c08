"""Specs: what a job requests. Every option is defined here, once.

The same classes are the OpenAPI schema of `POST /jobs`, the JSON stored with the job, and the input
of the ranks (`spec.json` in the run directory). A spec defines what to do; locations are
in `settings`.
"""

from __future__ import annotations

import re
from enum import Enum
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    TypeAdapter,
    field_validator,
    model_validator,
)

from services.shared.memory.architecture.pooling import Pooling


def _no_bool(value: Any) -> Any:
    if isinstance(value, bool):
        raise ValueError("true and false are no numbers")
    return value


# pydantic takes true for 1. After the bounds, which its schema would not show otherwise.
NUMBER = BeforeValidator(_no_bool)


class _Spec(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class TrainedTokenizer(_Spec):
    """A byte-level BPE tokenizer trained on the training split."""

    train: Literal[True] = True
    vocab_size: Annotated[int, Field(ge=300, le=256_000), NUMBER] = 8_000


class ModelSource(_Spec):
    """Where a model's first weights come from: a directory, or a configuration to start from scratch.

    Exactly one of `path`, `model_id`, `config`, `layers_of_teacher` is given.
    """

    path: str | None = Field(
        None,
        description="Hugging Face directory (config.json, *.safetensors, tokenizer), relative to a "
        "model root of the server or absolute inside one.",
    )
    model_id: str | None = Field(None, description="A model of this platform's registry.")
    config: dict[str, Any] | None = Field(
        None, description="A transformers config (with `model_type`): random weights from the seed."
    )
    layers_of_teacher: (
        Annotated[int, Field(ge=1, le=999), NUMBER]
        | Annotated[list[Annotated[int, Field(ge=0, le=998), NUMBER]], Field(min_length=1)]
        | None
    ) = Field(
        None,
        description="Students only: start from layers of the teacher (depth pruning). A number: how many to "
        "keep, spread evenly, the last among them. A list: the layers themselves, counted from 0.",
    )
    tokenizer: Literal["own", "teacher"] | TrainedTokenizer = Field(
        "own",
        description="`own`: the directory's; `teacher`: the teacher's (students only; the default with "
        "`layers_of_teacher`); or one trained on the training split (with `config`).",
    )
    trim_vocabulary: bool = Field(
        False,
        description="Leave out the vocabulary rows that no training or unlabelled text uses. Pieces of "
        "one character or byte are kept, so that other texts can still be read.",
    )
    pooling: Pooling | None = Field(
        None,
        description="What heads read: the `mean` of all tokens, the `first` (encoders) or the `last` "
        "(decoders). Left out: what the model was trained with (heads.json, sentence-transformers' files, "
        "`classifier_pooling` in config.json), else the first token of encoders and the last of decoders.",
    )
    prefix: Annotated[str, Field(max_length=1000)] | None = Field(
        None,
        description="Put before each text, for example `query: `. Left out: what the model was trained with "
        "(heads.json, sentence-transformers' default prompt), else nothing.",
    )

    @model_validator(mode="before")
    @classmethod
    def _layers_come_with_their_tokenizer(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("layers_of_teacher") is not None:
            return {"tokenizer": "teacher"} | given
        return given

    @field_validator("layers_of_teacher")
    @classmethod
    def _ascending(cls, layers: int | list[int] | None) -> int | list[int] | None:
        if isinstance(layers, list) and layers != sorted(set(layers)):
            raise ValueError("name each layer once, in ascending order")
        return layers

    @model_validator(mode="after")
    def _one_source(self) -> ModelSource:
        given = [
            name
            for name in ("path", "model_id", "config", "layers_of_teacher")
            if getattr(self, name) is not None
        ]
        if len(given) != 1:
            raise ValueError(
                "give exactly one of path, model_id, config, layers_of_teacher"
                + (f" (got {', '.join(given)})" if given else "")
            )
        if self.config is not None and not isinstance(self.config.get("model_type"), str):
            raise ValueError("config.model_type is missing: name a transformers architecture")
        if self.config is not None and self.tokenizer == "own":
            raise ValueError(
                "tokenizer: a model started from a config has none of its own; "
                'ask for {"train": true, "vocab_size": N} or, for a student, "teacher"'
            )
        if self.layers_of_teacher is not None and self.tokenizer != "teacher":
            raise ValueError(
                'tokenizer: a student cut from the teacher uses "teacher", which may be left out'
            )
        if isinstance(self.tokenizer, TrainedTokenizer) and self.config is None:
            raise ValueError("tokenizer: a trained tokenizer needs a model started from a config")
        if self.trim_vocabulary and isinstance(self.tokenizer, TrainedTokenizer):
            raise ValueError(
                "trim_vocabulary: a tokenizer trained on these texts has no rows to leave out; lower "
                "tokenizer.vocab_size instead"
            )
        return self


class Recipe(_Spec):
    """How the training state is laid out in memory: the choices of `memory.recipe.Recipe` that a job has."""

    sharding: Literal["full", "grad_op", "none"] = Field(
        "full",
        description="Shard everything; or keep parameters whole after forward; or replicate.",
    )
    wrap: Literal["layer", "root"] = "layer"
    embedding: Literal["root", "own"] = Field(
        "own", description="Whether the embedding is a sharding unit of its own."
    )
    parameters: Literal["float32", "bfloat16"] = "float32"
    compute: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="auto: bfloat16 on accelerators; on a CPU what it multiplies faster, measured before "
        "the ranks start.",
    )
    reduce: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="auto: as `compute`."
    )
    optimizer: Literal[
        "adamw", "adamw_bf16", "adamw_8bit", "adamw_split", "adamw_split24", "adafactor", "sgd"
    ] = Field(
        "adamw",
        description="adamw_bf16 keeps parameters and moments in bfloat16 with stochastic rounding, "
        "adamw_8bit the moments in 8-bit blocks; adamw_split has 8-bit moments and splits an exact 32-bit "
        "master into the bfloat16 parameter and 16 further bits, adamw_split24 a 24-bit one.",
    )
    optimizer_impl: Literal["fused", "foreach", "for_loop"] = "fused"
    optimizer_in_backward: bool = Field(
        False, description="Apply each gradient as soon as it is reduced, so that none is kept."
    )
    activation_checkpointing: bool = True
    attention: Literal["sdpa", "eager"] = "sdpa"
    offload: Literal["none", "optimizer", "all"] = "none"
    micro_batch_tokens: Annotated[int, Field(ge=16, le=4_194_304), NUMBER] | None = Field(
        None, description="Lower than `training.micro_batch_tokens` where memory requires it."
    )

    def token_budget(self, training: Training) -> int:
        """Return the most padded tokens that one rank holds in one forward pass."""
        return min(
            self.micro_batch_tokens or training.micro_batch_tokens, training.micro_batch_tokens
        )


class Schedule(str, Enum):
    """The learning-rate curve after warm-up."""

    COSINE = "cosine"
    LINEAR = "linear"
    CONSTANT = "constant"

    __str__ = str.__str__


class Training(_Spec):
    """The loop: how long, how fast, how large the steps, when to stop."""

    epochs: Annotated[float, Field(gt=0, le=1000), NUMBER] = 3
    max_steps: Annotated[int, Field(ge=1, le=10_000_000), NUMBER] | None = None
    learning_rate: Annotated[float, Field(gt=0, le=1), NUMBER] = 2e-5
    schedule: Schedule = Schedule.COSINE
    warmup_ratio: Annotated[float, Field(ge=0, lt=1), NUMBER] = 0.05
    weight_decay: Annotated[float, Field(ge=0, le=1), NUMBER] = 0.01
    max_grad_norm: Annotated[float, Field(gt=0, le=1000), NUMBER] | None = 1.0
    batch_size: Annotated[int, Field(ge=1, le=65_536), NUMBER] = Field(
        32, description="Texts per optimizer step over all ranks, whatever their number."
    )
    micro_batch_tokens: Annotated[int, Field(ge=16, le=4_194_304), NUMBER] = Field(
        4_096, description="Most padded tokens one rank holds in one forward pass."
    )
    max_length: Annotated[int, Field(ge=8, le=131_072), NUMBER] = Field(
        256, description="Tokens per text; longer texts are truncated and counted."
    )
    class_weights: Literal["none", "balanced"] = "none"
    eval_every_epochs: Annotated[float, Field(gt=0, le=1000), NUMBER] = 1
    early_stopping_patience: Annotated[int, Field(ge=1, le=1000), NUMBER] | None = None
    checkpoint_every_steps: Annotated[int, Field(ge=1, le=1_000_000), NUMBER] = 500
    keep_checkpoints: Annotated[int, Field(ge=1, le=100), NUMBER] = 2
    seed: Annotated[int, Field(ge=0, lt=2**31), NUMBER] = 0


_SIZE = re.compile(r"^[0-9]+(\.[0-9]+)?\s*(B|KiB|MiB|GiB|TiB|KB|MB|GB|TB)$")


class Resources(_Spec):
    """The machine the job is planned for and launched on."""

    ranks: Annotated[int, Field(ge=1, le=1024), NUMBER] | Literal["auto"] = Field(
        2,
        description="auto: on a CPU one for each NUMA node, with all its cores; elsewhere one for each of "
        "`visible_devices`, or 2.",
    )
    device: str = Field(
        "cpu", description="A kind known to `stillhouse plan --device`, for example k100_ai."
    )
    visible_devices: list[Annotated[int, Field(ge=0, le=1023), NUMBER]] | None = Field(
        None, description="Physical device numbers to use, for example [1,2,3,4,5,6,7]."
    )
    device_memory: str | None = Field(
        None, max_length=40, description="For example 65520MiB; units are honoured."
    )
    host_memory: str | None = Field(None, max_length=40, description="For example 125GB.")

    @field_validator("device_memory", "host_memory")
    @classmethod
    def _a_size_has_a_unit(cls, value: str | None) -> str | None:
        if value is not None and not _SIZE.match(value):
            raise ValueError(f"{value!r} is not a size: write a number and a unit, like 65520MiB")
        return value


Tag = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_.-]{0,63}$")]


class _Job(_Spec):
    name: Annotated[str, Field(min_length=1, max_length=120)] | None = None
    # Left out of stored specs where there are none: processes of the previous version refuse the field.
    tags: Annotated[list[Tag], Field(max_length=16)] = Field(
        [],
        description="Names by which STILLHOUSE_RETENTION may keep what the job leaves behind for longer "
        "or shorter.",
        exclude_if=lambda tags: not tags,
    )
    heads: list[str] | None = Field(
        None, description="Heads to train; all of the dataset's if left out."
    )
    training: Training = Training()
    recipe: Recipe | Literal["auto"] = "auto"
    resources: Resources = Resources()
    priority: Annotated[int, Field(ge=-10, le=10), NUMBER] = Field(
        0,
        description="Jobs of a higher priority are claimed first, whatever their project; above 0 needs a "
        "key with the scope admin.",
    )
    allow_overcommit: bool = Field(
        False, description="Start even if it does not fit according to its plan."
    )
    on_out_of_memory: Literal["fail", "retry"] = "fail"
    max_attempts: Annotated[int, Field(ge=1, le=10), NUMBER] = 3
    timeout_seconds: Annotated[int, Field(ge=1, le=30 * 24 * 3600), NUMBER] = 7 * 24 * 3600

    @model_validator(mode="after")
    def _enough_devices(self) -> _Job:
        devices = self.resources.visible_devices
        if devices is not None and self.resources.ranks not in ("auto", len(devices)):
            raise ValueError(
                f"resources.visible_devices names {len(devices)} devices for "
                f"resources.ranks = {self.resources.ranks}"
            )
        if devices is not None and len(set(devices)) != len(devices):
            raise ValueError("resources.visible_devices names a device twice")
        if self.heads is not None and (not self.heads or len(set(self.heads)) != len(self.heads)):
            raise ValueError("heads: name each head once, and at least one")
        return self


class _TeacherJob(_Job):
    dataset_id: str
    model: ModelSource

    @model_validator(mode="after")
    def _has_no_teacher(self) -> _TeacherJob:
        if self.model.layers_of_teacher is not None or self.model.tokenizer == "teacher":
            raise ValueError("model: a teacher job has no teacher to start from")
        return self


class TeacherSpec(_TeacherJob):
    """Full fine-tuning of a backbone with one linear head per question."""

    kind: Literal["teacher"]


class TeacherSource(_Spec):
    """The teacher of a distillation: a registered model, a job (finished or not), or a directory."""

    model_id: str | None = None
    job_id: str | None = None
    path: str | None = Field(
        None, description="A Hugging Face classifier directory made elsewhere."
    )

    @model_validator(mode="after")
    def _one_source(self) -> TeacherSource:
        if sum(value is not None for value in (self.model_id, self.job_id, self.path)) != 1:
            raise ValueError("give exactly one of model_id, job_id, path")
        return self


class Divergence(str, Enum):
    """The distance of the student's distribution from the teacher's."""

    FORWARD_KL = "forward_kl"
    REVERSE_KL = "reverse_kl"
    JENSEN_SHANNON = "jensen_shannon"

    __str__ = str.__str__


class Distillation(_Spec):
    """What the student learns from, and how much of each."""

    divergence: Divergence = Divergence.FORWARD_KL
    temperature: Annotated[float, Field(gt=0, le=100), NUMBER] = 2.0
    soft_weight: Annotated[float, Field(ge=0, le=100), NUMBER] = Field(
        0.7, description="Weight of the divergence from the teacher."
    )
    hard_weight: Annotated[float, Field(ge=0, le=100), NUMBER] = Field(
        0.3, description="Weight of the cross-entropy on labels."
    )
    head_weights: dict[str, Annotated[float, Field(ge=0, le=100), NUMBER]] = {}
    hidden_weight: Annotated[float, Field(ge=0, le=100), NUMBER] = Field(
        0.0, description="Weight of the hidden-state signal through a learned projection."
    )
    hidden_loss: Literal["cosine", "mse"] = "cosine"
    hidden_layers: Literal["last", "spread"] = Field(
        "last",
        description="Match the final states, or every student layer with an evenly spaced one of the "
        "teacher.",
    )
    soft_weight_final: Annotated[float, Field(ge=0, le=100), NUMBER] | None = Field(
        None, description="Weight at the last step; between, a straight line from soft_weight."
    )
    hard_weight_final: Annotated[float, Field(ge=0, le=100), NUMBER] | None = None
    hidden_weight_final: Annotated[float, Field(ge=0, le=100), NUMBER] | None = None
    signals: Literal["online", "cached", "auto"] = Field(
        "auto",
        description="Run the teacher on every batch; on every text once beforehand; or on every batch "
        "of the first epoch, keeping its answers for the others.",
    )
    cache_hidden: bool = Field(
        False,
        description="Keep hidden states too (large: the size is announced first). Without it, a "
        "hidden_weight above 0 makes the signals online.",
    )
    teacher_placement: Literal["sharded", "replicated", "auto"] = Field(
        "auto",
        description="The teacher over all ranks, or whole on each; `auto`: whole where that fits "
        "well according to the plan.",
    )
    unlabelled_dataset_ids: list[str] = Field([], max_length=1000)

    @model_validator(mode="after")
    def _learns_something(self) -> Distillation:
        if self.soft_weight == 0 and self.hard_weight == 0:
            raise ValueError(
                "soft_weight and hard_weight are both 0: nothing is left to learn from"
            )
        return self


class Gate(_Spec):
    """How close a student must be to its teacher to be promoted without force."""

    min_macro_f1_share: Annotated[float, Field(ge=0, le=2), NUMBER] = 0.97
    min_gain_over_baseline: Annotated[float, Field(ge=-1, le=1), NUMBER] | None = Field(
        None,
        description="By how much the student's macro-F1 must exceed that of logistic regression on "
        "character n-grams, on every head.",
    )
    confidence: Annotated[float, Field(ge=0.5, le=0.999), NUMBER] | None = Field(
        None,
        description="With it, the lower bounds of the intervals of this level must reach both minima, not "
        "only the measured values.",
    )


class _DistillJob(_Job):
    student: ModelSource
    distillation: Distillation = Distillation()
    gate: Gate = Gate()
    promote: Literal["never", "when_passed"] = "never"


class DistillSpec(_DistillJob):
    """Distillation of a teacher into a student with the same heads."""

    kind: Literal["distill"]
    dataset_id: str
    teacher: TeacherSource


JobSpec = Annotated[TeacherSpec | DistillSpec, Field(discriminator="kind")]
job_spec: TypeAdapter[TeacherSpec | DistillSpec] = TypeAdapter(JobSpec)


class ChainTeacher(_TeacherJob):
    """The teacher of a chain: a TeacherSpec without `kind`."""


class ChainDistill(_DistillJob):
    """The distillation of a chain: a DistillSpec without `kind`, of the chain's own teacher."""

    dataset_id: str | None = Field(None, description="The teacher's if left out.")
    heads: list[str] | None = Field(None, description="The teacher's if left out.")


class ChainSpec(_Spec):
    """Two jobs in one request: a teacher, and the distillation that waits for it.

    Only the request is a chain; its two jobs are stored.
    """

    kind: Literal["chain"]
    teacher: ChainTeacher = Field(description="A TeacherSpec without `kind`.")
    distill: ChainDistill = Field(
        description="A DistillSpec without `kind` and `teacher`; `dataset_id` and `heads` are the "
        "teacher's if left out."
    )

    def teacher_spec(self) -> TeacherSpec:
        """Return the first job."""
        return TeacherSpec.model_validate({"kind": "teacher", **self.teacher.model_dump()})

    def distill_spec(self, teacher_job_id: str = "job_of_the_chain") -> DistillSpec:
        """Return the second job; its plan needs no id of the first."""
        own = self.distill.model_dump()
        for field in ("dataset_id", "heads"):
            if own[field] is None:
                own[field] = getattr(self.teacher, field)
        return DistillSpec.model_validate(
            {"kind": "distill", "teacher": {"job_id": teacher_job_id}, **own}
        )


JobRequest = Annotated[TeacherSpec | DistillSpec | ChainSpec, Field(discriminator="kind")]
