"""The licences of the models that an artifact was made from, read from their directories and kept with it."""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

# Model cards begin with a block of metadata between two lines of dashes, in YAML.
_METADATA = re.compile(r"\A---\s*\n(.*?)\n---\s*$", re.DOTALL | re.MULTILINE)
_NAME = re.compile(
    r"^licen[cs]e:\s*[\"']?([A-Za-z0-9][A-Za-z0-9._+-]{0,63})[\"']?\s*$", re.MULTILINE
)
_FILE = re.compile(r"(licen[cs]e|notice|copying|use_policy)([-._].*)?", re.IGNORECASE)
_MAX_BYTES = 1_000_000
_CARD = "README.md"


@dataclass(frozen=True)
class Licence:
    """The licence of one model."""

    name: str | None  # as model hubs write it ("apache-2.0"); None: its card names none
    files: tuple[str, ...] = ()  # its text and notices, by name

    def sentence(self) -> str:
        """Return what is known of the licence, in Markdown, without a full stop."""
        named = f"`{self.name}`" if self.name else "not named by its model card"
        texts = ", ".join(f"[{name}]({name})" for name in self.files)
        return f"{named}, see {texts}" if texts else named


def copy_licence(model_dir: Path, artifact_dir: Path, *, prefix: str = "") -> Licence:
    """Copy the licence files of a model to an artifact, `prefix` before their names; return the licence.

    Raises OSError.
    """
    names = []
    for path in sorted(model_dir.iterdir()):
        if not _FILE.fullmatch(path.name) or not path.is_file():
            continue
        if path.stat().st_size > _MAX_BYTES:
            continue
        shutil.copyfile(path, artifact_dir / f"{prefix}{path.name}")
        names.append(f"{prefix}{path.name}")
    return Licence(_name(model_dir / _CARD), tuple(names))


def _name(card: Path) -> str | None:
    if not card.is_file() or card.stat().st_size > _MAX_BYTES:
        return None
    metadata = _METADATA.search(card.read_text("utf-8", errors="replace"))
    found = _NAME.search(metadata[1]) if metadata else None
    return found[1].lower() if found else None
