"""The application of one test, and what drives jobs through it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from fastapi.testclient import TestClient
from httpx2 import Response

from services.api.app import create_app
from services.api.auth.keys import Keys
from services.api.deps import Admission, AppContext
from services.api.limits.rate_limit import RateLimiters
from services.api.limits.uploads import UploadLimiter
from services.api.sandboxes import Sandboxes
from services.api.settings import ApiSettings
from services.api.telemetry import Metrics
from services.shared.jobs.db.store import Store
from services.shared.jobs.outcome import End, Outcome
from services.shared.jobs.state import Reason
from services.shared.jobs.views import Claim
from tests.api.fakes import FakeAdmission, FakePredictor
from tests.factories import dataset_card, succeeded, write_artifact
from tests.sandboxes import sandboxes


@dataclass(kw_only=True)
class Platform:
    """The context of one test's application; change its fields, then call `client()`."""

    settings: ApiSettings
    store: Store
    predictor: FakePredictor = field(default_factory=FakePredictor)
    fake_admission: FakeAdmission = field(default_factory=FakeAdmission)
    admission: Admission | None = None  # instead of `fake_admission`
    broker_is_away: bool = False
    sent: list[tuple[str, str]] = field(default_factory=list)
    keys: Keys = field(default_factory=lambda: Keys({}))
    probes: dict[str, Callable[[], None]] = field(default_factory=dict)
    rate_limiters: RateLimiters = field(default_factory=RateLimiters)
    upload_limiter: UploadLimiter = field(default_factory=UploadLimiter)
    sandboxes: Sandboxes | None = None  # instead of those that all tests share

    def context(self) -> AppContext:
        return AppContext(
            settings=self.settings,
            store=self.store,
            send=self._send,
            predictor=self.predictor,
            admission=self.admission or self.fake_admission,
            keys=self.keys,
            metrics=Metrics(),
            sandboxes=self.sandboxes or sandboxes(),
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


class JobDriver:
    """Drives jobs through a platform: an HTTP client, a dataset, and the worker's side of a job."""

    def __init__(self, platform: Platform) -> None:
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

    def submit(self, body: dict[str, Any] | None = None, /, **headers: str) -> Response:
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
