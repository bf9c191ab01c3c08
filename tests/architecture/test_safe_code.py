"""Our code never unpickles, runs checkpoint code, builds SQL from strings or installs unpinned versions."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = sorted(path for room in ("services", "docker") for path in (ROOT / room).rglob("*.py"))
UNPICKLERS = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "shelve", "marshal"}


def calls(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Call):
            yield node


def keywords(call: ast.Call) -> dict[str | None, object]:
    found: dict[str | None, object] = {}
    for keyword in call.keywords:
        value = keyword.value
        found[keyword.arg] = value.value if isinstance(value, ast.Constant) else ast.unparse(value)
    return found


def loaders() -> list[tuple[str, str, dict[str | None, object]]]:
    """Return location, callee and keywords of every call like `AutoModel.from_pretrained`."""
    return [
        (f"{path.relative_to(ROOT)}:{call.lineno}", ast.unparse(call.func), keywords(call))
        for path in OURS
        for call in calls(path)
        if isinstance(call.func, ast.Attribute)
        and call.func.attr in ("from_pretrained", "from_config")
    ]


def test_checkpoint_code_is_never_run() -> None:
    """transformers runs Python files of a checkpoint only with `trust_remote_code`."""
    found = loaders()
    assert len(found) >= 4
    for where, what, given in found:
        if what.endswith("from_pretrained"):
            assert given.get("trust_remote_code") is False, where
            assert given.get("local_files_only") is True, where
        assert given.get("trust_remote_code", False) is False, where
    for path in OURS:
        assert not re.search(r"trust_remote_code\W+True", path.read_text("utf-8")), path


def test_weights_are_read_only_from_safetensors() -> None:
    models = [
        (where, given)
        for where, what, given in loaders()
        if what.endswith("from_pretrained") and not re.search("Tokenizer|Config", what)
    ]
    assert models
    for where, given in models:
        assert given.get("use_safetensors") is True, where


def test_nothing_is_ever_unpickled() -> None:
    assert len(OURS) > 200
    for path in OURS:
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            assert not _unpickles(node), f"{path}:{node.lineno}"  # type: ignore[attr-defined]


def _unpickles(node: ast.AST) -> bool:
    if isinstance(node, ast.Import):
        return bool({name.name.partition(".")[0] for name in node.names} & UNPICKLERS)
    if isinstance(node, ast.ImportFrom):
        module = node.module or ""
        return module.partition(".")[0] in UNPICKLERS or module.startswith(
            "torch.distributed.checkpoint"
        )
    if isinstance(node, ast.Attribute):
        return ast.unparse(node) in ("torch.load", "torch.jit.load", "torch.save")
    return isinstance(node, ast.Call) and keywords(node).get("allow_pickle", False) is not False


def test_the_unpickling_check_detects_each_form() -> None:
    """Otherwise the test above could pass by detecting nothing."""
    for line in (
        "import pickle",
        "from joblib import load",
        "torch.load(x)",
        "np.load(x, allow_pickle=True)",
        "np.load(x, allow_pickle=y)",
    ):
        assert any(_unpickles(node) for node in ast.walk(ast.parse(line))), line


def test_sql_is_never_built_from_strings() -> None:
    """ruff's S608 looks for SQL in strings; this test checks what SQLAlchemy receives as text."""
    for path in OURS:
        for call in calls(path):
            if ast.unparse(call.func) in ("text", "sqlalchemy.text", "sa.text", "op.execute"):
                assert not any(isinstance(arg, ast.JoinedStr | ast.BinOp) for arg in call.args), (
                    f"{path}:{call.lineno}"
                )


PINS = ["constraints.txt", "constraints.compat.txt", "tests/fuzz/requirements.txt"]


@pytest.mark.parametrize("name", PINS)
def test_every_version_is_pinned(name: str) -> None:
    lines = [line.split("#")[0].strip() for line in (ROOT / name).read_text().splitlines()]
    requirements = [line for line in lines if line]
    assert requirements
    for line in requirements:
        assert re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.+_-]+( *;.*)?", line), line


def test_every_dependency_has_a_pin() -> None:
    project = (ROOT / "pyproject.toml").read_text()
    extras = project.split("[project.optional-dependencies]")[1].split("\n[")[0]
    names = {re.split(r"[\[=<>;]", item)[0] for item in re.findall(r'"([^"]+)"', extras)}
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert len(names) > 20
    assert names - {"stillhouse"} <= pinned


def test_every_installation_uses_the_pins() -> None:
    files = [ROOT / "Makefile", *(ROOT / "docker").iterdir()]
    installs = [
        (path.name, line)
        for path in files
        if path.is_file()
        for line in path.read_text("utf-8").replace("\\\n", " ").splitlines()
        if re.search(r"pip\"? install", line) and not line.lstrip().startswith("#")
    ]
    assert len(installs) >= 3
    for name, line in installs:
        assert re.search(r" -c |--constraint|==", line), (name, line)
