"""A broker that accepts connections and never answers does not hold requests."""

from __future__ import annotations

import threading
import time

from services.api.job_sender import JobSender


def test_a_job_is_sent() -> None:
    assert JobSender(lambda job_id, kind: True)("job_1", "teacher")
    assert not JobSender(lambda job_id, kind: False)("job_1", "teacher")


def test_a_frozen_broker_holds_a_few_requests_for_the_deadline_and_no_others() -> None:
    thawed = threading.Event()

    def send(job_id: str, kind: str) -> bool:
        return thawed.wait(60)

    sender = JobSender(send, deadline_seconds=0.05)
    started = time.monotonic()
    assert not any(sender(f"job_{number}", "teacher") for number in range(100))
    assert time.monotonic() - started < 5
    thawed.set()
    deadline = time.monotonic() + 10
    while not sender("job_101", "teacher"):
        assert time.monotonic() < deadline
    sender.close()
