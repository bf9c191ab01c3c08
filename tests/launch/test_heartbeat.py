import json
from pathlib import Path
from typing import Any

from services.shared.jobs.documents import ProgressDict
from services.shared.jobs.errors import Unavailable
from services.shared.jobs.run_directory import RunDirectory
from services.shared.jobs.spec import TeacherSpec
from services.shared.jobs.state import Phase
from services.shared.jobs.views import Claim, HeartbeatReply
from services.shared.launch.heartbeat import Heartbeat


class FakeStore:
    """Records the updates it receives; the real store is tested with Postgres."""

    def __init__(self, *answers: HeartbeatReply | Unavailable) -> None:
        self.updates: list[tuple[Phase | None, ProgressDict | None]] = []
        self._answers = list(answers)

    def heartbeat(
        self,
        claim: Claim,
        *,
        phase: Phase | None,
        progress: ProgressDict | None,
        lease_seconds: float,
    ) -> HeartbeatReply:
        answer = self._answers.pop(0) if self._answers else HeartbeatReply.CONTINUE
        if isinstance(answer, Unavailable):
            raise answer
        self.updates.append((phase, progress))
        return answer


def _heartbeat(store: FakeStore, run: RunDirectory) -> Heartbeat:
    spec = TeacherSpec.model_validate(
        {"kind": "teacher", "dataset_id": "ds_1", "model": {"path": "m"}}
    )
    claim = Claim(
        job_id="job_1",
        attempt=1,
        token="t",
        spec=spec,
        recipe={},
        plan=None,
        model_id="mdl_1",
        resolved=None,
        resume_dir=None,
        problem=None,
    )
    return Heartbeat(store, claim, run=run, lease_seconds=60)


def _report(run: RunDirectory, **fields: Any) -> None:
    with run.progress.open("a") as file:
        file.write(json.dumps({"time": 1.0} | fields) + "\n")


def test_a_beat_without_updates_still_renews_the_lease(tmp_path: Path) -> None:
    store = FakeStore()
    assert _heartbeat(store, RunDirectory(tmp_path)).beat() is HeartbeatReply.CONTINUE
    assert store.updates == [(None, None)]


def test_lines_since_the_last_beat_are_merged_into_the_newest_values(tmp_path: Path) -> None:
    run, store = RunDirectory(tmp_path), FakeStore()
    heartbeat = _heartbeat(store, run)
    _report(run, phase="training", step=1, loss=2.0)
    _report(run, phase="training", step=2)
    heartbeat.beat()
    _report(run, phase="training", step=3)
    heartbeat.beat()
    updates = [(phase, progress and progress | {"time": 0}) for phase, progress in store.updates]
    assert updates == [
        (Phase.TRAINING, {"time": 0, "step": 2, "loss": 2.0}),
        (Phase.TRAINING, {"time": 0, "step": 3}),
    ]


def test_each_phase_and_each_evaluation_is_an_update_of_its_own(tmp_path: Path) -> None:
    run, store = RunDirectory(tmp_path), FakeStore()
    _report(run, phase="loading")
    _report(run, phase="training", step=1)
    _report(run, phase="evaluating", evaluation={"heads": {"a": 1}})
    _report(run, phase="evaluating", evaluation={"heads": {"a": 2}})
    _heartbeat(store, run).beat()
    assert [(phase, (progress or {}).get("evaluation")) for phase, progress in store.updates] == [
        (Phase.LOADING, None),
        (Phase.TRAINING, None),
        (Phase.EVALUATING, {"heads": {"a": 1}}),
        (Phase.EVALUATING, {"heads": {"a": 2}}),
    ]


def test_an_unavailable_database_loses_no_updates(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    store = FakeStore(Unavailable("away"))
    heartbeat = _heartbeat(store, run)
    _report(run, phase="training", step=5)
    assert heartbeat.beat() is HeartbeatReply.CONTINUE
    heartbeat.beat()
    assert [progress and progress["step"] for _, progress in store.updates] == [5]


def test_a_lost_lease_ends_the_updates(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    store = FakeStore(HeartbeatReply.LOST)
    _report(run, phase="loading")
    _report(run, phase="training")
    assert _heartbeat(store, run).beat() is HeartbeatReply.LOST
    assert len(store.updates) == 1
