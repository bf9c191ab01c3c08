"""The console in a real Chromium, against a platform with real jobs: `make browser-test`.

Playwright drives Debian's chromium-headless-shell, or the Chromium that STILLHOUSE_CHROMIUM names.
"""

from __future__ import annotations

import importlib
import json
import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from tests.fuzz.small_model import SMALL_MODEL
from tests.system.conftest import RunningPlatform, running_platform

pytestmark = [pytest.mark.browser, pytest.mark.timeout(600)]

PAGES = ["jobs", "new", "datasets", "models", "try", "diagnose", "node"]
HOSTILE = '<img src=x onerror="window.broken=1">'
SPEC = {
    "kind": "teacher",
    "model": SMALL_MODEL,
    "training": {"epochs": 4, "learning_rate": 0.01, "max_length": 32},
    "resources": {"ranks": 2, "device": "cpu"},
}


@pytest.fixture(scope="module")
def platform(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningPlatform]:
    with running_platform(tmp_path_factory.mktemp("platform")) as started:
        yield started


@pytest.fixture(scope="module")
def dataset(platform: RunningPlatform) -> str:
    """A dataset whose name and one of whose labels are markup."""
    rows = [
        {"text": f"review {n}: the room was {word}", "mood": label}
        for n in range(200)
        for word, label in (("clean", "positive"), ("dirty", HOSTILE))
    ]
    file = "".join(json.dumps(row) + "\n" for row in rows).encode()
    form = {"name": HOSTILE, "heads": json.dumps([{"name": "mood"}])}
    response = httpx.post(
        f"{platform.url}/datasets", files={"file": ("r.jsonl", file)}, data=form, timeout=60
    )
    assert response.status_code < 300, response.text
    return str(response.json()["id"])


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    path = os.environ.get("STILLHOUSE_CHROMIUM") or shutil.which("chromium-headless-shell")
    assert path, "install chromium-headless-shell, or name a Chromium in STILLHOUSE_CHROMIUM"
    playwright = importlib.import_module("playwright.sync_api")
    with playwright.sync_playwright() as started:
        browser = started.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


class Watched:
    """A page of the browser, and everything about it that should not happen."""

    def __init__(self, chromium: Any, url: str, **options: Any) -> None:
        self.url = url
        self.faults: list[str] = []
        self.context = chromium.new_context(**options)
        self.page = self.context.new_page()
        self.page.set_default_timeout(60_000)
        self.page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        self.page.on("request", self._requested)
        self.page.on("dialog", lambda dialog: self.faults.append(f"dialog: {dialog.message}"))

    def _requested(self, request: Any) -> None:
        if urlsplit(request.url).netloc != urlsplit(self.url).netloc:
            self.faults.append(f"request to {request.url}")

    def open(self, path: str) -> Any:
        """Return the page at a place of the console, once its heading is shown."""
        self.page.goto(f"{self.url}/#/{path}")
        self.page.locator("main h1").first.wait_for()
        return self.page


@pytest.fixture
def watched(chromium: Any, platform: RunningPlatform) -> Iterator[Watched]:
    page = Watched(chromium, platform.url, locale="en-US")
    yield page
    page.context.close()
    assert page.faults == []


@pytest.fixture(scope="module")
def job(chromium: Any, platform: RunningPlatform, dataset: str) -> str:
    """A teacher submitted by the form of the console, and watched until it succeeds; its id."""
    watched = Watched(chromium, platform.url, locale="en-US")
    page = watched.open("new")
    page.locator("#spec-json").fill(json.dumps(SPEC | {"dataset_id": dataset, "name": HOSTILE}))
    plan = page.locator("section.plan")
    plan.get_by_text("fits", exact=True).first.wait_for()
    assert page.locator("#spec-json").get_attribute("aria-invalid") in (None, "false")
    page.get_by_role("button", name="Submit").click()
    page.wait_for_url("**/#/job/job_*")
    page.get_by_text("succeeded", exact=True).first.wait_for(timeout=400_000)
    assert watched.faults == []
    found = str(page.url).rsplit("/", 1)[1].split("?")[0]
    watched.context.close()
    return found


@pytest.mark.parametrize("width", [375, 1280])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_opens_without_errors_and_fits_its_width(
    chromium: Any, platform: RunningPlatform, dataset: str, width: int, scheme: str
) -> None:
    watched = Watched(
        chromium,
        platform.url,
        viewport={"width": width, "height": 800},
        color_scheme=scheme,
        locale="en-US",
    )
    for name in PAGES:
        page = watched.open(name)
        page.wait_for_load_state("load")
        wider = page.evaluate("document.documentElement.scrollWidth - window.innerWidth")
        assert wider <= 0, name
    watched.context.close()
    assert watched.faults == []


def test_a_chinese_browser_reads_chinese(chromium: Any, platform: RunningPlatform) -> None:
    watched = Watched(chromium, platform.url, locale="zh-CN")
    page = watched.open("jobs")
    assert page.locator("main h1").inner_text() == "任务"
    assert page.evaluate("document.documentElement.lang").startswith("zh")
    watched.context.close()
    assert watched.faults == []


def test_a_submitted_job_trains_and_its_curves_survive_a_reload(watched: Watched, job: str) -> None:
    page = watched.open(f"job/{job}")
    page.locator("canvas").first.wait_for()
    before = page.locator("canvas").count()
    assert before >= 4
    page.reload()
    page.locator("canvas").nth(before - 1).wait_for()


def test_names_and_labels_are_shown_as_text(
    watched: Watched, platform: RunningPlatform, dataset: str, job: str
) -> None:
    for path in ("jobs", f"job/{job}", f"datasets/{dataset}", "models"):
        page = watched.open(path)
        page.get_by_text(HOSTILE).first.wait_for()
        assert page.locator("main img").count() == 0
        assert page.evaluate("window.broken") is None


def test_a_promotion_by_button_is_what_try_it_asks(
    watched: Watched, platform: RunningPlatform, job: str
) -> None:
    model = httpx.get(f"{platform.url}/jobs/{job}").json()["model_id"]
    page = watched.open(f"models/{model}")
    page.get_by_role("button", name="Promote").first.click()
    page.locator("[data-promotion]").first.wait_for()
    promoted = httpx.get(f"{platform.url}/promotions").json()["items"]
    assert [each["model_id"] for each in promoted] == [model]
    deadline = time.monotonic() + 60
    while not httpx.post(f"{platform.url}/predict", json={"inputs": "x"}).is_success:
        assert time.monotonic() < deadline
        time.sleep(0.2)
    page = watched.open("try")
    page.locator("#texts").fill("the room was clean")
    page.locator("form button.primary").first.click()
    page.locator(".answer-side").get_by_text("positive").first.wait_for()


def test_a_pasted_log_is_diagnosed(watched: Watched) -> None:
    page = watched.open("diagnose")
    page.locator("#log").fill(
        "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 932.00 MiB. GPU 0 has a total "
        "capacity of 63.98 GiB of which 300.00 MiB is free. Process 1 has 63.6 GiB memory in use."
    )
    page.locator("form button.primary").first.click()
    page.locator("main section").get_by_text("932").first.wait_for()


def test_the_first_load_is_small_and_paints_soon(
    chromium: Any, platform: RunningPlatform, tmp_path: Path
) -> None:
    watched = Watched(chromium, platform.url, locale="en-US")
    sizes: list[int] = []
    watched.page.on(
        "requestfinished", lambda request: sizes.append(request.sizes()["responseBodySize"])
    )
    page = watched.open("jobs")
    page.wait_for_load_state("load")
    assert 0 < sum(sizes) <= 150_000
    paint = page.evaluate("performance.getEntriesByName('first-contentful-paint')[0].startTime")
    print(f"first load {sum(sizes):,} bytes, first contentful paint {paint:.0f} ms")
    watched.context.close()
