"""`dataset.json` of a stored dataset: its card, and the SHA-256 of every other file of the dataset.

Whoever reads a split calls `verify_split` first: a bit that flipped on disk may still decode, to another
text or another label. Datasets stored before files were hashed are read unverified.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from services.shared.datasets.card import DatasetCard, Split
from services.shared.datasets.text import TextKind
from services.shared.files.hashing import file_sha256
from services.shared.files.sealed_json import seal, unseal

CARD_FILE = "dataset.json"


class DamagedDataset(ValueError):
    """A file of a stored dataset is not as it was written."""


def write_card(dataset_dir: Path, card: DatasetCard) -> None:
    """Write the card of a dataset whose splits are written already. Raises OSError."""
    files = {path.name: file_sha256(path) for path in sorted(dataset_dir.glob("*.parquet"))}
    document = seal({**card.model_dump(mode="json"), "files": files})
    (dataset_dir / CARD_FILE).write_text(json.dumps(document, indent=2), encoding="utf-8")


def read_card(dataset_dir: Path) -> DatasetCard:
    """Return the card of a stored dataset. Raises DamagedDataset and OSError."""
    path = dataset_dir / CARD_FILE
    document = _read(path)
    try:
        return DatasetCard.model_validate(
            {key: value for key, value in document.items() if key not in ("files", "format")}
        )
    except ValueError as error:
        raise DamagedDataset(f"{path} is damaged: {error}") from error


def read_text_kind(dataset_dir: Path) -> TextKind:
    """Return what the texts of a stored dataset are. Raises DamagedDataset and OSError."""
    path = dataset_dir / CARD_FILE
    return (
        TextKind(_read(path).get("text_kind", TextKind.SINGLE))
        if path.exists()
        else TextKind.SINGLE
    )


def verify_split(dataset_dir: Path, split: Split) -> None:
    """Compare the file of a split with its recorded hash. Raises DamagedDataset and OSError."""
    card_path, path = dataset_dir / CARD_FILE, dataset_dir / f"{split}.parquet"
    if not card_path.exists():
        return
    files = _read(card_path).get("files")
    if files is not None and file_sha256(path) != files.get(path.name):
        raise DamagedDataset(
            f"{path} is damaged: it is not the file that was stored. Upload the dataset again, or "
            "restore the file from a backup"
        )


def _read(path: Path) -> dict[str, Any]:
    try:
        return unseal(path.read_bytes())
    except ValueError as error:
        raise DamagedDataset(f"{path} is damaged: {error}") from error
