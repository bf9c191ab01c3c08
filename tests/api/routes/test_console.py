"""The console's files: their policy, caching and size, the vendored libraries, and the messages."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from services.api.console_files import DIRECTORY, console_files, static_imports
from services.shared.jobs.state import JobState, Phase, Reason
from services.shared.memory.forensics.diagnosis import Cause, Confidence, Sharded
from services.shared.memory.planning.plan_contract import Verdict
from tests.api.auth.key_entries import keys_of
from tests.api.harness import Platform

MAX_FIRST_LOAD_BYTES = 150_000
VENDORED = json.loads((DIRECTORY / "vendor" / "vendored.json").read_text())
SOURCES = [p for p in DIRECTORY.rglob("*.js") if "vendor" not in p.parts]


class Elements(HTMLParser):
    """What a page has: scripts, styles, links and attributes."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.inline: list[str] = []
        self._open: str | None = None
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.links += [v for n, v in attrs if n in ("src", "href") and v]
        self.inline += [n for n in found if n.startswith("on") or n == "style"]
        self._open = tag

    def handle_data(self, data: str) -> None:
        if self._open in ("script", "style") and data.strip():
            self.inline.append(data)
        self._open = None


def test_the_page_is_served_without_a_key_and_with_a_strict_policy(offline: Platform) -> None:
    offline.keys = keys_of(ci=("ours", []))
    response = offline.client().get("/")
    assert response.status_code == 200
    policy = response.headers["content-security-policy"]
    directives = dict(part.split(" ", 1) for part in policy.split("; "))
    assert directives["default-src"] == "'none'"
    for name in ("script-src", "style-src", "connect-src", "img-src"):
        assert directives[name] == "'self'"
    for forbidden in ("unsafe", "data:", "blob:", "http", "*"):
        assert forbidden not in policy
    assert directives["require-trusted-types-for"] == "'script'"
    elements = Elements(response.text)
    assert elements.inline == []
    assert all(link.startswith("/console/") for link in elements.links)
    assert len(elements.links) > 8


def test_every_link_of_the_page_and_every_import_is_served(offline: Platform) -> None:
    client = offline.client()
    for link in Elements(client.get("/").text).links:
        response = client.get(link)
        assert response.status_code == 200, link
        assert "immutable" in response.headers["cache-control"]
        assert response.headers["content-security-policy"]
    contents = {
        p.relative_to(DIRECTORY).as_posix(): p.read_bytes() for p in DIRECTORY.rglob("*.js")
    }
    for name in contents:
        for imported in static_imports(name, contents):
            assert imported in contents, (name, imported)


def test_a_file_of_another_version_or_outside_is_not_found(offline: Platform) -> None:
    client = offline.client()
    version = console_files().version
    for path in (
        "/console/other/main.js",
        f"/console/{version}/none.js",
        f"/console/{version}/../app.py",
        f"/console/{version}/%2e%2e/app.py",
        f"/console/{version}/..%2fapp.py",
        f"/console/{version}/index.html",
    ):
        assert client.get(path).status_code == 404, path
    assert client.post(f"/console/{version}/main.js").status_code == 405


def test_what_a_browser_has_is_not_sent_again(offline: Platform) -> None:
    client = offline.client()
    first = client.get("/")
    again = client.get("/", headers={"If-None-Match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    assert first.headers["cache-control"] == "no-cache"
    head = client.head("/")
    assert head.status_code == 200


def test_the_first_load_is_small(record_property: pytest.FixtureRequest) -> None:
    """The page, its styles and the modules of the first view, compressed, with 300 bytes of headers each."""
    console = console_files()
    names = re.findall(r"/console/\w+/([\w./-]+)", console.page.content.decode())
    total = len(console.page.compressed) + sum(
        len(console.files[name].compressed) + 300 for name in dict.fromkeys(names)
    )
    plot = console.files["vendor/uplot/uPlot.iife.min.js"]
    assert total + len(plot.compressed) < MAX_FIRST_LOAD_BYTES
    assert gzip.decompress(plot.compressed) == plot.content


@pytest.mark.parametrize("package", VENDORED)
def test_a_vendored_library_is_what_was_published(package: str) -> None:
    """Name, version, licence and hash of each file are recorded; no other file is there."""
    directory = DIRECTORY / "vendor" / package
    entry = VENDORED[package]
    assert re.fullmatch(r"\d+\.\d+\.\d+", entry["version"])
    assert entry["integrity"].startswith("sha512-")
    assert entry["license"] in ("MIT", "BSD-3-Clause")
    files = {p.relative_to(directory).as_posix(): p for p in directory.rglob("*") if p.is_file()}
    assert set(files) == set(entry["files"])
    assert "LICENSE" in files
    for name, path in files.items():
        assert hashlib.sha256(path.read_bytes()).hexdigest() == entry["files"][name]["sha256"], name


def test_no_source_makes_markup_or_code_of_a_string_or_names_another_origin() -> None:
    forbidden = (
        "innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval(", "new Function",
        "unsafeHTML", "unsafeSVG", "unsafeStatic", "setAttribute(\"style\"", "srcdoc", "//cdn",
        "https://", "http://",
    )  # fmt: skip
    for path in [*SOURCES, DIRECTORY / "index.html", DIRECTORY / "console.css"]:
        text = path.read_text("utf-8")
        assert [word for word in forbidden if word in text] == [], path.name
        assert not re.search(r"style=\$?[\"{]", text), path.name
    assert all(p.read_text("utf-8").startswith("// @ts-check\n") for p in SOURCES)


def messages() -> dict[str, tuple[str, str]]:
    text = (DIRECTORY / "messages.js").read_text("utf-8")
    rows = re.findall(r'^  "([^"]+)": \["((?:[^"\\]|\\.)*)", "((?:[^"\\]|\\.)*)"\],$', text, re.M)
    assert len(rows) == len(re.findall(r'^  "[^"]+": \[', text, re.M))
    assert len({key for key, *_ in rows}) == len(rows)
    return {key: (en, zh) for key, en, zh in rows}


def test_every_message_is_there_in_both_languages_with_the_same_places() -> None:
    for key, (english, chinese) in messages().items():
        assert english.strip(), key
        assert chinese.strip(), key
        places = re.compile(r"\{\w+\}")
        assert sorted(places.findall(english)) == sorted(places.findall(chinese)), key


def test_every_message_that_a_page_shows_exists_and_is_used() -> None:
    known = messages()
    text = "\n".join(path.read_text("utf-8") for path in SOURCES if path.name != "messages.js")
    used = set(re.findall(r"""\b(?:t|known)\(\s*["']([\w.-]+)["']""", text))
    assert used <= set(known), used - set(known)
    prefixes = set(re.findall(r"\b(?:t|known)\(\s*`([\w.-]+)\$", text))
    named = set(re.findall(r'"([a-z_]+\.[\w.-]+)"', text))  # keys that go through a variable
    unused = {
        key
        for key in known
        if key not in used and key not in named and not any(key.startswith(p) for p in prefixes)
    }
    unused -= {f"gate.{each}" for each in ("passed", "refused")}
    assert unused == set()


@pytest.mark.parametrize(
    ("prefix", "values"),
    [
        ("state", JobState),
        ("phase", Phase),
        ("reason", Reason),
        ("cause", Cause),
        ("confidence", Confidence),
        ("sharded", Sharded),
        ("verdict", Verdict),
    ],
)
def test_every_word_of_the_api_has_a_message(prefix: str, values: type[Reason]) -> None:
    known = messages()
    assert {f"{prefix}.{value}" for value in values} <= set(known)


def test_the_wheel_has_the_console() -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert '"services.api" = ["console/**/*"]' in text
