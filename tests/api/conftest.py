"""The application over real or absent parts, and a predictor that needs no model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import structlog
from fastapi.testclient import TestClient

from services.api.app import create_app
from services.api.auth.keys import Keys
from services.api.deps import AppContext
from services.api.limits.rate_limit import RateLimiters
from services.api.limits.uploads import UploadLimiter
from services.api.serving.errors import NoActiveModel, PredictionError, TextTooLong
from services.api.serving.prediction import Prediction, Score, Timing
from services.api.settings import ApiSettings
from services.api.telemetry import Metrics
from services.shared.datasets.card import Head
from services.shared.jobs.db.connection import create_engine
from services.shared.jobs.db.store import Store
from services.shared.jobs.errors import DoesNotFit
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.spec import DistillSpec, Recipe, TeacherSpec
from services.shared.jobs.state import Reason
from services.shared.jobs.views import Claim
from tests.factories import DOMAIN, SENTIMENT, dataset_card, succeeded, write_artifact

NOWHERE = "postgresql+psycopg://nobody@127.0.0.1:1/nothing?connect_timeout=1"


@dataclass(frozen=True)
class FakeStudent:
    name: str
    version: str
    heads: list[Head]
    max_length: int = 8


@dataclass
class FakePredictor:
    """Scores by the order of labels; a token is a word; raises `failure` if it has one."""

    students: dict[str, FakeStudent] = field(default_factory=dict)
    failure: PredictionError | None = None
    seen: list[list[str]] = field(default_factory=list)

    def active(self, alias: str = "default") -> FakeStudent | None:
        return self.students.get(alias)

    def aliases(self) -> Sequence[str]:
        return list(self.students)

    async def predict(
        self, texts: Sequence[str], *, truncate: bool, alias: str = "default"
    ) -> list[Prediction]:
        if self.failure is not None:
            raise self.failure
        student = self.students.get(alias)
        if student is None:
            raise NoActiveModel(alias)
        self.seen.append(list(texts))
        return [self._one(student, index, text, truncate) for index, text in enumerate(texts)]

    @staticmethod
    def _one(student: FakeStudent, index: int, text: str, truncate: bool) -> Prediction:
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


@dataclass(frozen=True)
class FakeAdmission:
    plan: dict[str, Any] | None
    recipe: Recipe | None
    unplanned: None = None


@dataclass
class FakeAdmit:
    """Admits everything with a plan of one number, or refuses everything."""

    refuses: bool = False
    seen: list[TeacherSpec | DistillSpec] = field(default_factory=list)

    def __call__(
        self, spec: TeacherSpec | DistillSpec, *, teacher: TeacherSpec | None = None
    ) -> FakeAdmission:
        self.seen.append(spec)
        plan = {"verdict": "fits", "peak_bytes": 7, "phases": {"forward": 7}}
        if self.refuses:
            raise DoesNotFit("7 bytes are too many.", {**plan, "verdict": "does_not_fit"})
        return FakeAdmission(plan, Recipe() if spec.recipe == "auto" else None)


@dataclass(kw_only=True)
class Platform:
    """The parts of one test's application; change them, then ask for `client()`."""

    settings: ApiSettings
    store: Store
    predictor: FakePredictor = field(default_factory=FakePredictor)
    admit: FakeAdmit = field(default_factory=FakeAdmit)
    broker_is_away: bool = False
    sent: list[tuple[str, str]] = field(default_factory=list)
    keys: Keys = field(default_factory=lambda: Keys({}))
    probes: dict[str, Callable[[], None]] = field(default_factory=dict)
    rate_limiters: RateLimiters = field(default_factory=RateLimiters)
    upload_limiter: UploadLimiter = field(default_factory=UploadLimiter)

    def context(self) -> AppContext:
        return AppContext(
            settings=self.settings,
            store=self.store,
            send=self._send,
            predictor=self.predictor,
            admit=self.admit,
            keys=self.keys,
            metrics=Metrics(),
            probes=self.probes,
            rate_limiters=self.rate_limiters,
            upload_limiter=self.upload_limiter,
        )

    def _send(self, job_id: str, kind: str) -> bool:
        if not self.broker_is_away:
            self.sent.append((job_id, kind))
        return not self.broker_is_away

    def client(self) -> TestClient:
        return TestClient(create_app(self.context()), base_url="http://127.0.0.1:8000")


def _settings(database_url: str, tmp_path: Path, **more: Any) -> ApiSettings:
    roots = tmp_path / "roots"
    roots.mkdir()
    data_dir = tmp_path / "data"
    for name in ("datasets", "uploads"):
        (data_dir / name).mkdir(parents=True)
    return ApiSettings(
        database_url=database_url,
        broker_url="redis://127.0.0.1:1/0",
        data_dir=data_dir,
        model_roots=[roots],
        event_poll_seconds=0.01,
        **more,
    )


@pytest.fixture(autouse=True, scope="session")
def plain_logs() -> Iterator[None]:
    """Render exceptions without variables, as the server does; pretty ones take seconds."""
    structlog.configure(
        processors=[structlog.processors.format_exc_info, structlog.processors.KeyValueRenderer()]
    )
    yield
    structlog.reset_defaults()


@pytest.fixture
def offline(tmp_path: Path) -> Iterator[Platform]:
    """A platform whose database is away."""
    settings = _settings(NOWHERE, tmp_path)
    engine = create_engine(NOWHERE)
    yield Platform(settings=settings, store=Store(engine, settings))
    engine.dispose()


@pytest.fixture
def platform(database_url: str, tmp_path: Path) -> Iterator[Platform]:
    """A platform with a migrated database of its own."""
    settings = _settings(database_url, tmp_path)
    engine = create_engine(database_url)
    yield Platform(settings=settings, store=Store(engine, settings))
    engine.dispose()


@pytest.fixture
def one_head() -> FakeStudent:
    return FakeStudent("reviews", "mdl_1_1", [SENTIMENT])


@pytest.fixture
def two_heads() -> FakeStudent:
    return FakeStudent("reviews", "mdl_2_1", [SENTIMENT, DOMAIN])


class Desk:
    """A client, a dataset, and the worker's side of a job."""

    def __init__(self, platform: Any) -> None:
        self.platform = platform
        self.store = platform.store
        self.client = platform.client()
        self.dataset_id = self.store.add_dataset(dataset_card()).id

    def spec(self, **fields: Any) -> dict[str, Any]:
        model = {"config": {"model_type": "qwen3"}, "tokenizer": {"train": True}}
        return {"kind": "teacher", "dataset_id": self.dataset_id, "model": model, **fields}

    def distill(self, **teacher: str) -> dict[str, Any]:
        model = {"config": {"model_type": "qwen3"}, "tokenizer": "teacher"}
        return {
            "kind": "distill",
            "dataset_id": self.dataset_id,
            "teacher": teacher,
            "student": model,
        }

    def submit(self, body: dict[str, Any] | None = None, **headers: str) -> Any:
        return self.client.post("/jobs", json=body or self.spec(), headers=headers)

    def running(self, body: dict[str, Any] | None = None) -> Claim:
        claim = self.store.claim(self.submit(body).json()["id"], worker="w", lease_seconds=60)
        assert claim is not None
        return claim

    def end(self, claim: Claim, outcome: Outcome) -> None:
        assert self.store.finish(claim, outcome).applied

    def fail(self, claim: Claim) -> None:
        outcome = Outcome(end=End.FAILED, reason=Reason.DEVICE_OUT_OF_MEMORY, message="Too much.")
        self.end(claim, outcome)

    def succeed(self, claim: Claim, evaluation: dict[str, Any] | None = None) -> str:
        write_artifact(self.platform.settings, claim.model_id)
        self.end(claim, succeeded(evaluation))
        return claim.model_id


@pytest.fixture
def desk(platform: Any) -> Desk:
    return Desk(platform)
