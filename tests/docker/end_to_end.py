"""End-to-end test in containers, each of which is restarted on the way: `make compose-test`.

    python -m tests.docker.end_to_end [--no-build] [--keep] [--epochs N] [--env-file FILE]

Builds the images, starts the stack under its own project name and port, and runs dataset, teacher,
distillation, promotion and prediction through the published port, restarting and killing services
meanwhile. Takes everything down again. Fails at the first violated expectation.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from docker import write_env
from services.cli.client import Client, CommandFailed

ROOT = Path(__file__).resolve().parents[2]
PROJECT = "stillhouse-e2e"
_START_SECONDS = 600.0
_JOB_SECONDS = 1800.0
_LOOK_SECONDS = 0.5

TINY = {
    "model_type": "qwen3",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


def main() -> None:
    """Run the test and print each step."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--no-build", action="store_true", help="Use existing images.")
    parser.add_argument("--keep", action="store_true", help="Leave the stack running at the end.")
    parser.add_argument("--epochs", type=int, default=150, help="Of the job that is interrupted.")
    parser.add_argument("--env-file", type=Path, help="More settings for compose.")
    options = parser.parse_args()
    # The stack is taken down on Ctrl-C and on SIGTERM too.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: sys.exit(f"end_to_end: stopped by signal {number}"))
    if shutil.which("docker") is None:
        sys.exit(
            "end_to_end: docker was not found; this test needs a Docker engine with Compose 2."
        )
    directory = Path(tempfile.mkdtemp(prefix="stillhouse-e2e-"))
    stack = prepare(directory, more=options.env_file)
    try:
        if not options.no_build:
            stack.build()
        stack.up()
        Scenario(stack, epochs=options.epochs).run()
    except BaseException:
        stack.show_logs()
        raise
    finally:
        if options.keep:
            stack.say(
                f"the stack keeps running: {stack.url}, key {stack.api_key}, settings in {directory}"
            )
        else:
            stack.down()
            shutil.rmtree(directory)
    stack.say("done: all expectations hold")


@dataclass
class Stack:
    """A compose project with its own settings."""

    env_file: Path
    url: str
    api_key: str
    started_at: float = field(default_factory=time.monotonic)

    def say(self, line: str) -> None:
        print(f"[{time.monotonic() - self.started_at:6.0f} s] {line}", flush=True)

    def compose(self, *arguments: str, timeout: float = _START_SECONDS) -> str:
        """Run docker compose and return its standard output."""
        command = ["docker", "compose", "--project-name", PROJECT, "--env-file", str(self.env_file)]
        command += ["--file", str(ROOT / "compose.yaml"), "--progress", "plain", *arguments]
        # Variables of the caller's shell would take precedence over the file.
        env = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        # The classic builder shares no work between concurrent builds.
        env["COMPOSE_PARALLEL_LIMIT"] = "1"
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env)
        if done.returncode != 0:
            raise RuntimeError(f"compose {' '.join(arguments)}:\n{done.stderr[-4000:]}")
        return done.stdout

    def build(self) -> None:
        for name in ("api", "trainer", "distiller"):
            started = time.monotonic()
            self.compose("build", name, timeout=3600)
            self.say(f"built {name} in {time.monotonic() - started:.0f} s")

    def up(self) -> None:
        started = time.monotonic()
        self.compose("up", "--detach", "--wait", "--no-build")
        self.say(f"up: all healthy after {time.monotonic() - started:.0f} s")

    def down(self) -> None:
        self.compose("down", "--volumes", "--remove-orphans", "--timeout", "60")

    def show_logs(self) -> None:
        try:
            print(self.compose("logs", "--no-color", "--tail", "60"), file=sys.stderr)
        except RuntimeError as error:
            print(error, file=sys.stderr)

    def restart(self, name: str) -> None:
        """Restart one container as an operator would, and wait until it is healthy."""
        started = time.monotonic()
        self.compose("restart", name)
        self.compose("up", "--detach", "--wait", "--no-build", "--no-recreate", "--no-deps", name)
        self.say(f"restarted {name} in {time.monotonic() - started:.0f} s")

    def kill(self, name: str) -> None:
        """Kill one container without warning and start it again."""
        self.compose("kill", "--signal", "KILL", name)
        self.compose("up", "--detach", "--wait", "--no-build", "--no-recreate", "--no-deps", name)
        self.say(f"killed {name} and started it again")

    def containers(self) -> list[dict[str, Any]]:
        lines = self.compose("ps", "--all", "--format", "json").splitlines()
        return [json.loads(line) for line in lines if line]


def prepare(directory: Path, *, more: Path | None) -> Stack:
    """Write what `make env` writes, for a port that is free."""
    key = write_env.new_key()
    keys_file = directory / "api_keys.json"
    write_env.write_key(keys_file, key)
    models = directory / "models"
    models.mkdir()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    values = {
        **write_env.passwords(),
        "MODELS_DIR": str(models),
        "API_KEYS_FILE": str(keys_file),
        "API_PORT": str(port),
        "WORKER_MEMORY": "4GiB",
        **(write_env.read(more) if more else {}),
    }
    # Bind mounts are read by the containers' own user.
    directory.chmod(0o755)
    env_file = directory / "env"
    env_file.write_text("".join(f"{name}={value}\n" for name, value in values.items()), "utf-8")
    return Stack(env_file=env_file, url=f"http://127.0.0.1:{port}", api_key=key)


class Scenario:
    """What one user does through the API and an operator with the containers."""

    def __init__(self, stack: Stack, *, epochs: int) -> None:
        self.stack = stack
        self.epochs = epochs
        self.client = Client(stack.url, api_key=stack.api_key)

    def run(self) -> None:
        self.check_exposure()
        dataset = self.upload()
        teacher = self.submit(self.teacher(dataset, epochs=self.epochs))
        student = self.submit(self.student(dataset, teacher, epochs=self.epochs))
        expect(self.job(student)["state"] == "waiting", "the student waits for its teacher")
        self.until_training(teacher)
        for name in ("api", "redis", "postgres"):
            self.stack.restart(name)
            self.makes_progress(teacher)
        self.stack.restart("trainer")
        self.until_training(teacher, attempt=2)
        self.stack.kill("trainer")
        self.succeeds(teacher, attempts=3)
        self.until_training(student)
        self.stack.restart("distiller")
        self.succeeds(student, attempts=2)
        self.promote_and_predict(student)

    def check_exposure(self) -> None:
        """Check that only the API's port is published and that it requires a key."""
        published = {
            (container["Service"], publisher["PublishedPort"])
            for container in self.stack.containers()
            for publisher in container.get("Publishers") or []
            if publisher["PublishedPort"]
        }
        port = int(self.stack.url.rpartition(":")[2])
        expect(published == {("api", port)}, f"only the API's port is published: {published}")
        with Client(self.stack.url) as anonymous:
            for path in ("/jobs", "/models", "/datasets"):
                try:
                    anonymous.get(path)
                except CommandFailed as refused:
                    expect(refused.status == 401, f"{path} without a key: {refused.status}")
                else:
                    raise AssertionError(f"{path} answers without a key")
        self.stack.say("only the API is published, and it requires a key")

    def upload(self) -> str:
        words = (("clean", "positive"), ("dirty", "negative"))
        rows = [
            {"text": f"review {i}: the room was {words[i % 2][0]}", "sentiment": words[i % 2][1]}
            for i in range(400)
        ]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        card = self.client.post(
            "/datasets",
            data={
                "name": "reviews",
                "heads": '[{"name": "sentiment", "type": "single_label"}]',
            },
            files={"file": ("reviews.jsonl", text, "application/x-ndjson")},
        )
        self.stack.say(f"dataset {card['id']}")
        return str(card["id"])

    def teacher(self, dataset: str, *, epochs: int) -> dict[str, Any]:
        tokenizer = {"train": True, "vocab_size": 400}
        return {
            **self._job("teacher", dataset, epochs),
            "model": {"config": TINY, "tokenizer": tokenizer},
        }

    def student(self, dataset: str, teacher: str, *, epochs: int) -> dict[str, Any]:
        return {
            **self._job("distill", dataset, epochs),
            "teacher": {"job_id": teacher},
            "student": {"config": TINY | {"num_hidden_layers": 1}, "tokenizer": "teacher"},
        }

    @staticmethod
    def _job(kind: str, dataset: str, epochs: int) -> dict[str, Any]:
        return {
            "kind": kind,
            "dataset_id": dataset,
            "training": {
                "epochs": epochs,
                "eval_every_epochs": 20,
                "checkpoint_every_steps": 50,
                "learning_rate": 0.002,
                "max_length": 32,
            },
            "recipe": {"compute": "float32", "reduce": "float32"},
            "resources": {"ranks": 2, "device": "cpu"},
        }

    def submit(self, spec: dict[str, Any]) -> str:
        job = self.client.post("/jobs", json=spec)
        self.stack.say(f"{spec['kind']} job {job['id']}: {job['state']}")
        return str(job["id"])

    def job(self, job_id: str) -> dict[str, Any]:
        """Return a job, retrying where a restart cut the connection."""
        job: dict[str, Any] = self._retrying(lambda: self.client.get(f"/jobs/{job_id}"))
        return job

    def _retrying(self, request: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 60
        while True:
            try:
                return request()
            except CommandFailed as refused:
                # 503: the database is unavailable. No status: no response.
                if refused.status not in (None, 503) or time.monotonic() > deadline:
                    raise
                time.sleep(_LOOK_SECONDS)

    def _until(self, job_id: str, wanted: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        deadline = time.monotonic() + _JOB_SECONDS
        while True:
            job = self.job(job_id)
            if wanted(job) or job["state"] in ("succeeded", "failed", "cancelled"):
                return job
            expect(time.monotonic() < deadline, f"{job_id} takes too long: {job['state']}")
            time.sleep(_LOOK_SECONDS)

    def until_training(self, job_id: str, *, attempt: int = 1) -> None:
        job = self._until(
            job_id,
            lambda job: (
                job["attempt"] == attempt
                and job["phase"] == "training"
                and (job["progress"] or {}).get("step", 0) > 0
            ),
        )
        expect(
            job["state"] == "running", f"{job_id} is in training: {job['state']} {job['message']}"
        )
        self.stack.say(f"{job_id} trains: attempt {attempt}, step {job['progress']['step']}")

    def makes_progress(self, job_id: str) -> None:
        """Expect the running attempt to make further steps."""
        before = self.job(job_id)
        step = (before["progress"] or {}).get("step", 0)
        after = self._until(job_id, lambda job: (job["progress"] or {}).get("step", 0) > step)
        expect(
            (after["state"], after["attempt"]) == ("running", before["attempt"]),
            f"{job_id} makes progress: {after['state']} in attempt {after['attempt']}; more --epochs?",
        )
        self.stack.say(f"{job_id} makes progress: step {after['progress']['step']}")

    def succeeds(self, job_id: str, *, attempts: int) -> None:
        job = self._until(job_id, lambda _: False)
        expect(job["state"] == "succeeded", f"{job_id}: {job['state']} {job['message']}")
        endings = [attempt["ending"] for attempt in job["attempts"]]
        expect(len(endings) == attempts, f"{job_id} took {attempts} attempts: {endings}")
        expect(endings.count("succeeded") == 1, f"exactly one attempt wrote the result: {endings}")
        models = self.client.get("/models")["items"]
        mine = [model for model in models if model["job_id"] == job_id]
        expect(len(mine) == 1, f"{job_id} has one model: {mine}")
        accuracy = job["metrics"]["heads"]["sentiment"]["accuracy"]
        self.stack.say(f"{job_id} succeeded: attempts {endings}, accuracy {accuracy:.3f}")

    def promote_and_predict(self, job_id: str) -> None:
        model = self.job(job_id)["model_id"]
        body = {"force": True, "reason": "an end-to-end test"}
        self.client.post(f"/models/{model}/promote", json=body)
        self.predicts()
        self.stack.restart("api")
        self.predicts()
        self.stack.compose("stop", "postgres", "redis")
        self.predicts()
        self.stack.say("predictions continue while Postgres and Redis are stopped")
        self.stack.compose("up", "--detach", "--wait", "--no-build", "--no-recreate")

    def predicts(self) -> None:
        body = {"inputs": ["the room was clean", "the room was dirty"]}
        answer = self._retrying(lambda: self.client.post("/predict", json=body))
        best = [max(labels, key=lambda label: label["score"])["label"] for labels in answer]
        expect(best == ["positive", "negative"], f"the student tells the two words apart: {answer}")
        self.stack.say(f"predicted {best}")


def expect(condition: bool, message: str) -> None:
    """Raise AssertionError with the message unless the condition holds."""
    if not condition:
        raise AssertionError(message)


if __name__ == "__main__":
    main()
