"""The attacks: each does what once hurt, and returns what it saw, or raises NotHeld.

Bounds on time are those of a shared machine: each attack once took many times as long.
"""

from __future__ import annotations

import json
import signal
import socket
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import psutil
import psycopg

from tests.adversary.target import Target, upload

MIB = 2**20
_ANSWERS = (400, 413, 422, 503)  # what a request that asks for too much is answered


class NotHeld(AssertionError):
    """An attack had an effect; the message says which."""


@dataclass(frozen=True)
class Attack:
    """An attack, and what it tries in words."""

    tries: str
    act: Callable[[Target], str]
    is_long: bool = False  # left to `make adversary`

    @property
    def name(self) -> str:
        return self.act.__name__


def _hold(condition: bool, otherwise: str) -> None:
    if not condition:
        raise NotHeld(otherwise)


def _refused(response: httpx.Response, *statuses: int) -> None:
    _hold(
        response.status_code in statuses,
        f"answered {response.status_code}: {response.text[:120]}",
    )


def _timed(act: Callable[[], httpx.Response], *, bound: float) -> tuple[httpx.Response, float]:
    started = time.perf_counter()
    response = act()
    seconds = time.perf_counter() - started
    _hold(seconds < bound, f"took {seconds:.1f} s")
    return response, seconds


def patterns(attacked: Target) -> str:
    """Send texts on which the patterns of a diagnosis once backtracked."""
    fields = ("sharding_strategy", "model_name", "device", "optimizer", "precision", "wrap_policy")
    worst = 0.0
    with attacked.client("submitter") as client, attacked.latency() as probes:
        for field in fields:
            for text in ("stage" + " " * 1990, "1.1" * 660, "z" * 1990):
                diagnose = partial(client.post, "/diagnoses", json={field: text})
                response, seconds = _timed(diagnose, bound=15)
                _refused(response, 200, 422)
                worst = max(worst, seconds)
    return f"slowest diagnosis {worst:.2f} s, /livez at most {max(probes):.2f} s"


def endless_header(attacked: Target) -> str:
    """Send a header without end, and no key."""
    sent = 0
    with attacked.connect() as connection, suppress(ConnectionError, TimeoutError):
        connection.sendall(b"GET /livez HTTP/1.1\r\nHost: 127.0.0.1\r\nX-Endless: ")
        while sent < 4 * MIB:
            connection.sendall(b"a" * 4096)
            sent += 4096
            time.sleep(0.0005)
    _hold(sent <= 512 * 1024, f"{sent} bytes were taken")
    return f"closed after {sent // 1024} KiB"


def slow_headers(attacked: Target) -> str:
    """Hold 100 connections whose headers never end."""
    with ExitStack() as stack, attacked.latency() as probes:
        held = [stack.enter_context(attacked.connect()) for _ in range(100)]
        for each in held:
            each.sendall(b"GET /livez HTTP/1.1\r\nX: ")
        started = time.perf_counter()
        for each in held:
            with suppress(ConnectionError):
                _hold(b" 408 " in each.recv(4096), "a connection was not closed")
    seconds = time.perf_counter() - started
    return f"all closed after {seconds:.1f} s, /livez at most {max(probes):.2f} s"


def smuggling(attacked: Target) -> str:
    """Send a request with two lengths."""
    with attacked.connect() as connection:
        head = attacked.head(
            "submitter",
            b"POST",
            b"/diagnoses",
            b"Content-Length: 4",
            b"Content-Length: 40",
        )
        connection.sendall(head + b"{}{}GET /jobs HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n")
        answer = connection.recv(65536)
    _hold(answer.startswith(b"HTTP/1.1 400"), f"answered {answer[:60]!r}")
    return "400"


def stalled_uploads(attacked: Target) -> str:
    """Begin eight uploads with one key and stall, while another key uploads."""
    head = attacked.head(
        "submitter",
        b"POST",
        b"/datasets",
        b"Content-Type: multipart/form-data; boundary=x",
        b"Content-Length: 1000000",
    )
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(attacked.connect()).sendall(head + b"--x\r\n")
        time.sleep(0.5)
        response, seconds = _timed(lambda: upload(attacked, "other"), bound=20)
        _refused(response, 201)
    return f"another key's upload took {seconds:.1f} s"


def abandoned_uploads(attacked: Target) -> str:
    """Begin uploads and leave, twice as many as are validated at once."""
    head = attacked.head(
        "submitter",
        b"POST",
        b"/datasets",
        b"Content-Type: multipart/form-data; boundary=x",
        b"Content-Length: 1000000",
    )
    for _ in range(16):
        with attacked.connect() as connection:
            connection.sendall(head + b"--x\r\n")
    time.sleep(0.5)
    response, seconds = _timed(lambda: upload(attacked, "submitter"), bound=20)
    _refused(response, 201)
    left = [path for path in attacked.api.settings.uploads_dir.iterdir() if path.stat().st_size]
    _hold(not left, f"{len(left)} files were left")
    return f"the next upload took {seconds:.1f} s, nothing left in uploads"


def event_streams(attacked: Target) -> str:
    """Open 60 event streams of one job with one key."""
    path = f"/jobs/{attacked.job()}/events".encode()
    statuses = []
    with ExitStack() as stack, attacked.latency() as probes:
        for _ in range(60):
            connection = stack.enter_context(attacked.connect())
            connection.sendall(attacked.head("submitter", b"GET", path))
            statuses.append(int(connection.recv(64)[9:12]))
        ready = httpx.get(f"{attacked.api.url}/readyz", timeout=60)
        _refused(ready, 200)
        seconds = ready.elapsed.total_seconds()
        _hold(seconds < 5, f"/readyz took {seconds:.1f} s")
    opened = statuses.count(200)
    _hold(opened == attacked.api.settings.event_streams_per_key, f"{opened} streams were opened")
    return f"{opened} opened, {statuses.count(429)} refused, /livez at most {max(probes):.2f} s"


def promotion_by_job(attacked: Target) -> str:
    """Let a job promote its model, with a key that may only submit."""
    distill = {
        "student": {**attacked.spec()["model"], "tokenizer": "teacher"},
        "promote": "when_passed",
        "gate": {"min_macro_f1_share": 0},
    }
    teacher = {name: value for name, value in attacked.spec().items() if name != "kind"}
    chain = {"kind": "chain", "teacher": teacher, "distill": distill}
    with attacked.client("submitter") as client:
        _refused(client.post("/jobs", json=chain), 403)
    return "403"


def reading_without_scope(attacked: Target) -> str:
    """Read with a key for predictions, and with one of another project."""
    paths = ("/jobs", "/datasets", "/models", "/promotions", "/audit", f"/jobs/{attacked.job()}")
    with attacked.client("classifier") as client:
        for path in paths:
            _refused(client.get(path), 403)
    with attacked.client("other") as client:
        for path in (f"/jobs/{attacked.job()}", f"/datasets/{attacked.dataset()}"):
            _refused(client.get(path), 404)
    return f"403 on {len(paths)} paths, 404 on another project's"


def million_layers(attacked: Target) -> str:
    """Plan a model of a million layers."""
    config = {**attacked.spec()["model"]["config"], "num_hidden_layers": 10**6}
    body = attacked.spec(model={"config": config, "tokenizer": {"train": True, "vocab_size": 400}})
    with attacked.client("submitter") as client, attacked.latency() as probes:
        response, seconds = _timed(lambda: client.post("/jobs/plan", json=body), bound=45)
    _refused(response, *_ANSWERS)
    return f"{response.status_code} after {seconds:.1f} s, /livez at most {max(probes):.2f} s"


def many_unlabelled(attacked: Target) -> str:
    """Name 25,000 unlabelled datasets."""
    spec = {
        "kind": "distill",
        "dataset_id": attacked.dataset(),
        "teacher": {"job_id": attacked.job()},
        "student": {**attacked.spec()["model"], "tokenizer": "teacher"},
        "unlabelled_dataset_ids": [f"ds_{number:013}" for number in range(25_000)],
    }
    with attacked.client("submitter") as client:
        response, seconds = _timed(lambda: client.post("/jobs", json=spec), bound=15)
    _refused(response, *_ANSWERS)
    return f"{response.status_code} after {seconds:.2f} s"


def many_digits(attacked: Target) -> str:
    """Send sizes of 5,000 digits."""
    digits = "9" * 5000
    bodies = {
        "/diagnoses": f'{{"ranks": {digits}}}',
        "/jobs/plan": json.dumps(attacked.spec()).replace('"hidden_size": 32', f'"hidden_size": {digits}'),
        "/predict": f'{{"inputs": "a", "top_k": {digits}}}',
    }  # fmt: skip
    headers = {"Content-Type": "application/json"}
    seen = []
    for path, body in bodies.items():
        with attacked.client("classifier" if path == "/predict" else "submitter") as client:
            response = client.post(path, content=body, headers=headers)
        _refused(response, *_ANSWERS)
        seen.append(str(response.status_code))
    return ", ".join(seen)


def deep_json(attacked: Target) -> str:
    """Nest JSON half a million levels deep."""
    with attacked.client("submitter") as client:
        response, seconds = _timed(
            lambda: client.post(
                "/jobs", content=b"[" * 500_000, headers={"Content-Type": "application/json"}
            ),
            bound=10,
        )
    _refused(response, *_ANSWERS)
    return f"{response.status_code} after {seconds:.2f} s"


def long_csv_header(attacked: Target) -> str:
    """Upload a CSV file whose header has 196 KB."""
    for line in (b"a," * 98_000, b'"' * 196_000, b"a;b,c|d\t" * 24_500):
        content = line + b"\nx,y\n"
        act = partial(upload, attacked, "submitter", content=content, file="rows.csv")
        response, seconds = _timed(act, bound=20)
        _refused(response, *_ANSWERS)
    return f"{response.status_code} after {seconds:.2f} s"


def tiny_rows(attacked: Target) -> str:
    """Upload 6 MiB of tiny JSON lines, a quarter of a million."""
    before = attacked.rss()
    content = b'{"text":"a","label":"b"}\n' * (MIB // 4)
    response, seconds = _timed(
        lambda: upload(attacked, "submitter", content=content, heads='[{"name": "label"}]'),
        bound=80,
    )
    growth = attacked.rss() - before
    _refused(response, 201, *_ANSWERS)
    _hold(growth < 300 * MIB, f"the API grew by {growth / MIB:.0f} MiB")
    return f"{response.status_code} after {seconds:.1f} s, the API grew by {growth / MIB:.0f} MiB"


def read_only_database(attacked: Target) -> str:
    """Make the database read-only while requests arrive."""
    url = str(attacked.api.settings.database_url).replace("+psycopg", "")
    own = attacked.spec()

    def switch(value: str) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            connection.execute("SET default_transaction_read_only = off")
            connection.execute(
                f"ALTER DATABASE stillhouse SET default_transaction_read_only = {value}"
            )
            connection.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = 'stillhouse' AND pid <> pg_backend_pid()"
            )  # fmt: skip

    switch("on")
    try:
        with attacked.client("submitter") as client:
            response = client.post("/jobs", json=own)
        _refused(response, 503)
        _hold("INSERT" not in response.text, "the answer quotes SQL")
        _refused(httpx.get(f"{attacked.api.url}/readyz", timeout=60), 503)
    finally:
        switch("off")
    with attacked.client("submitter") as client:
        _refused(client.post("/jobs", json=own), 202)
    return "503 without SQL, /readyz 503, 202 afterwards"


def frozen_broker(attacked: Target) -> str:
    """Stop the broker's process and submit ten jobs at once."""
    directory = (attacked.api.settings.data_dir.parent / "valkey").resolve()
    (broker,) = [  # other tests of this process may have a broker of their own
        each
        for each in psutil.Process().children(recursive=True)
        if each.name() == "valkey-server" and Path(each.cwd()) == directory
    ]
    spec = attacked.spec()

    def submit(_: int) -> httpx.Response:
        with attacked.client("submitter") as client:
            return client.post("/jobs", json=spec)

    broker.send_signal(signal.SIGSTOP)
    started = time.perf_counter()
    try:
        with ThreadPoolExecutor(10) as pool:
            answers = list(pool.map(submit, range(10)))
    finally:
        seconds = time.perf_counter() - started
        broker.send_signal(signal.SIGCONT)
    for answer in answers:
        _refused(answer, 202)
    _hold(seconds < 20, f"took {seconds:.1f} s")
    return f"ten accepted in {seconds:.1f} s; their messages are sent later"


def forged_address(attacked: Target) -> str:
    """Guess keys under a different X-Forwarded-For each time."""
    statuses = []
    with httpx.Client(base_url=attacked.api.url, timeout=60) as client:
        for number in range(100):
            headers = {"Authorization": "Bearer x", "X-Forwarded-For": f"10.0.0.{number}"}
            statuses.append(client.get("/jobs", headers=headers).status_code)
    _hold(429 in statuses, "100 wrong keys were answered 401")
    return f"{statuses.count(401)} times 401, then 429"


def odd_methods(attacked: Target) -> str:
    """Send methods to public paths that they do not have."""
    for path in ("/openapi.json", "/docs", "/livez", "/readyz"):
        for method in ("OPTIONS", "POST", "TRACE", "PURGE"):
            _refused(httpx.request(method, f"{attacked.api.url}{path}", timeout=30), 405, 400)
    log = attacked.api.log.read_text(errors="replace")
    _hold("Traceback" not in log, "there is a traceback in the log")
    return "405 on 16, no traceback in the log"


def silent_reader(attacked: Target) -> str:
    """Ask for the API description on 50 connections and read nothing."""
    with ExitStack() as stack, attacked.latency() as probes:
        for _ in range(50):
            connection = stack.enter_context(attacked.connect())
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(b"GET /openapi.json HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" * 5)
        time.sleep(2)
    _hold(max(probes) < 10, f"/livez took {max(probes):.1f} s")
    return f"/livez at most {max(probes):.2f} s"


ATTACKS = [
    Attack("texts on which patterns backtrack (diagnosis)", patterns, is_long=True),
    Attack("a header without end, no key", endless_header),
    Attack("100 headers that never end, no key", slow_headers),
    Attack("two Content-Length headers", smuggling),
    Attack("eight stalled uploads of one key", stalled_uploads),
    Attack("16 abandoned uploads", abandoned_uploads),
    Attack("60 event streams of one key", event_streams),
    Attack("a job that promotes, key without the scope", promotion_by_job),
    Attack("reading with predict, and across projects", reading_without_scope),
    Attack("a plan with a million layers", million_layers),
    Attack("25,000 unlabelled datasets", many_unlabelled),
    Attack("sizes of 5,000 digits", many_digits),
    Attack("JSON nested 500,000 deep", deep_json),
    Attack("a CSV header of 196 KB", long_csv_header),
    Attack("a quarter of a million tiny rows", tiny_rows, is_long=True),
    Attack("a read-only database", read_only_database),
    Attack("a frozen broker", frozen_broker),
    Attack("wrong keys under forged addresses", forged_address),
    Attack("odd methods on public paths", odd_methods),
    Attack("50 clients that read nothing", silent_reader),
]
