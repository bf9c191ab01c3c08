"""A predictor that needs no model, and an admission that needs no planner."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from services.api.serving.errors import NoActiveModel, PredictionError, TextTooLong
from services.api.serving.prediction import Prediction, Score, Timing
from services.shared.datasets.card import Head
from services.shared.datasets.text import Text, plain_text
from services.shared.jobs.db.store import Store
from services.shared.jobs.errors import DoesNotFit
from services.shared.jobs.projects import DEFAULT_PROJECT, Access
from services.shared.jobs.resolved_spec import PlannedSpec, ResolvedSpec
from services.shared.jobs.spec import DistillSpec, Recipe, TeacherSpec
from tests.factories import SENTIMENT, plan_document


@dataclass(frozen=True)
class FakeStudent:
    """What the routes read of a student."""

    name: str
    version: str
    heads: list[Head]
    max_length: int = 8


@dataclass
class FakePredictor:
    """Scores by the order of labels; a token is a word; raises `failure` if it has one."""

    students: dict[str, FakeStudent] = field(default_factory=dict)
    failure: PredictionError | None = None
    seen: list[list[Text]] = field(default_factory=list)

    def active(self, alias: str = "default") -> FakeStudent | None:
        return self.students.get(alias)

    def aliases(self) -> Sequence[str]:
        return list(self.students)

    async def predict(
        self, texts: Sequence[Text], *, truncate: bool, alias: str = "default"
    ) -> list[Prediction]:
        if self.failure is not None:
            raise self.failure
        student = self.students.get(alias)
        if student is None:
            raise NoActiveModel(alias)
        self.seen.append(list(texts))
        return [
            self._predict_one(student, index, plain_text(text), truncate)
            for index, text in enumerate(texts)
        ]

    @staticmethod
    def _predict_one(student: FakeStudent, index: int, text: str, truncate: bool) -> Prediction:
        tokens = len(text.split())
        if tokens > student.max_length and not truncate:
            raise TextTooLong(index, tokens, student.max_length)
        scores = {}
        for head in student.heads:
            # The last label wins: the order of scores is not the order of classes.
            chances = [2.0**place for place in range(len(head.labels))]
            rows = [
                Score(label, chance / sum(chances), chance - 1)
                for label, chance in zip(head.labels, chances, strict=True)
            ]
            scores[head.name] = rows[::-1]
        return Prediction(
            scores=scores,
            tokens=min(tokens, student.max_length),
            truncated=tokens > student.max_length,
            model=student.name,
            version=student.version,
            timing=Timing(0.001, 0.002, 0.003),
        )


@dataclass
class FakeAdmission:
    """Gives every job a plan of one number, or refuses everything; resolves by `store`, if it has one."""

    store: Store | None = None
    refuses: bool = False
    seen: list[TeacherSpec | DistillSpec] = field(default_factory=list)

    def resolve(
        self,
        spec: TeacherSpec | DistillSpec,
        *,
        project: str = DEFAULT_PROJECT,
        chained: ResolvedSpec | None = None,
    ) -> ResolvedSpec:
        if self.store is None:
            return ResolvedSpec(spec, heads=(SENTIMENT,), dataset_dir=Path("nowhere"))
        return self.store.within(Access(project=project)).resolve(spec, chained=chained)

    def plan(self, resolved: ResolvedSpec) -> PlannedSpec:
        spec = resolved.spec
        self.seen.append(spec)
        verdict = "does_not_fit" if self.refuses else "fits"
        plan = plan_document(verdict=verdict, peak_bytes=7, phases={"forward": 7})
        if self.refuses:
            raise DoesNotFit("7 bytes are too many.", plan)
        return PlannedSpec(resolved, plan, Recipe() if spec.recipe == "auto" else None)
