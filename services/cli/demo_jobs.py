"""The two ways of running the demo: a pretrained model on few labels, or a small one from scratch on all."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

BASE_MODEL = "multilingual-e5-small"

# Small enough for two CPU cores and five minutes, yet a complete Qwen3: grouped-query attention,
# q/k norm, gated MLP. Its learning rates suit training from scratch, not fine-tuning.
_SCRATCH_TEACHER = {
    "model_type": "qwen3",
    "hidden_size": 192,
    "intermediate_size": 576,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 32,
}
_SCRATCH_STUDENT = {
    **_SCRATCH_TEACHER,
    "hidden_size": 96,
    "intermediate_size": 288,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
}
_TRAINING = {"batch_size": 32, "micro_batch_tokens": 2048, "max_length": 64, "seed": 0}


@dataclass(frozen=True)
class DemoJobs:
    """What the demo trains, and on how many reviews; `None` labelled reviews are all of them."""

    labelled: int | None
    unlabelled: int
    teacher_model: dict[str, Any]
    student_model: dict[str, Any]
    teacher_training: dict[str, Any]
    student_training: dict[str, Any]
    ranks: int | str

    def teacher_spec(self, dataset_id: str) -> dict[str, object]:
        """Return the body of the teacher's `POST /jobs`."""
        return {
            "kind": "teacher",
            "name": "demo teacher",
            "dataset_id": dataset_id,
            "model": self.teacher_model,
            "training": _TRAINING | self.teacher_training,
            **self._resources(),
        }

    def student_spec(
        self, dataset_id: str, *, teacher_job_id: str, unlabelled_ids: list[str]
    ) -> dict[str, object]:
        """Return the body of the student's `POST /jobs`."""
        return {
            "kind": "distill",
            "name": "demo student",
            "dataset_id": dataset_id,
            "teacher": {"job_id": teacher_job_id},
            "student": self.student_model,
            "distillation": {"unlabelled_dataset_ids": unlabelled_ids},
            "training": _TRAINING | self.student_training,
            **self._resources(),
        }

    def _resources(self) -> dict[str, object]:
        return {
            "recipe": {"activation_checkpointing": False},
            "resources": {"ranks": self.ranks, "device": "cpu"},
        }


PRETRAINED = DemoJobs(
    labelled=1_000,
    unlabelled=1_500,
    teacher_model={"path": BASE_MODEL},
    # Of twelve layers; most of the 118 million parameters are vocabulary that no review uses.
    student_model={"layers_of_teacher": 3, "trim_vocabulary": True},
    teacher_training={"epochs": 2, "learning_rate": 1e-4, "eval_every_epochs": 2},
    student_training={"epochs": 2, "learning_rate": 2e-4, "eval_every_epochs": 2},
    ranks=2,
)
FROM_SCRATCH = DemoJobs(
    labelled=None,
    unlabelled=0,
    teacher_model={"config": _SCRATCH_TEACHER, "tokenizer": {"train": True, "vocab_size": 6000}},
    student_model={"config": _SCRATCH_STUDENT, "tokenizer": "teacher"},
    teacher_training={"epochs": 1.5, "learning_rate": 1e-3},
    student_training={"epochs": 3, "learning_rate": 2e-3},
    ranks=2,
)
