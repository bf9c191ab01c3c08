"""One bit flipped anywhere in a stored file is noticed by whoever reads it."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from services.distiller.signal_file import SignalFile, SignalIdentity
from services.shared.datasets.card import Head, Split
from services.shared.datasets.ingest import ingest
from services.shared.datasets.stored_card import DamagedDataset, read_card
from services.shared.datasets.upload import Format, HeadColumn, Layout
from services.shared.files.sealed_json import seal, unseal
from services.shared.model.artifact import (
    InvalidArtifact,
    read_artifact,
    save_classifier,
    seal_artifact,
    verify_artifact,
)
from services.shared.model.tokens import read_rows

if TYPE_CHECKING:
    from tests.model.conftest import MakeClassifier

FLIPS = 100


def flip_bits(path: Path, read: Callable[[], object]) -> int:
    """Flip one bit at each of FLIPS random places; return how often `read` did not name the file."""
    draw, content = random.Random(path.name), path.read_bytes()
    unnoticed = 0
    for _ in range(FLIPS):
        damaged = bytearray(content)
        damaged[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        try:
            read()
        except (DamagedDataset, InvalidArtifact) as error:
            unnoticed += path.name not in str(error)
        else:
            unnoticed += 1
    path.write_bytes(content)
    read()
    return unnoticed


@pytest.fixture
def stored_dataset(tmp_path: Path) -> Path:
    upload = tmp_path / "upload.csv"
    rows = [f"the room number {n} was {'good' if n % 2 else 'bad'},{n % 2}" for n in range(200)]
    upload.write_text("\n".join(["text,label", *rows]))
    ingest(
        upload,
        format=Format.CSV,
        layout=Layout(heads=[HeadColumn(name="label")]),
        id="ds_1",
        name="reviews",
        datasets_dir=tmp_path,
    )
    return tmp_path / "ds_1"


@pytest.mark.parametrize("split", list(Split))
def test_a_flipped_bit_in_a_stored_split_is_noticed(stored_dataset: Path, split: Split) -> None:
    heads = read_card(stored_dataset).heads

    path = stored_dataset / f"{split}.parquet"
    assert flip_bits(path, lambda: read_rows(stored_dataset, split, heads)) == 0


def test_a_flipped_bit_in_a_dataset_card_is_noticed(stored_dataset: Path) -> None:
    path = stored_dataset / "dataset.json"
    assert flip_bits(path, lambda: read_card(stored_dataset)) == 0


def test_a_dataset_stored_without_hashes_is_still_read(stored_dataset: Path) -> None:
    card = read_card(stored_dataset)
    (stored_dataset / "dataset.json").write_text(card.model_dump_json())
    assert read_card(stored_dataset) == card
    assert len(read_rows(stored_dataset, Split.TRAIN, card.heads)) == card.rows[Split.TRAIN]


def test_a_flipped_bit_in_any_file_of_an_artifact_is_noticed(
    tmp_path: Path, make_classifier: MakeClassifier, tokenizer_dir: Path, heads: list[Head]
) -> None:
    directory = tmp_path / "model"
    classifier = make_classifier("qwen3")
    save_classifier(classifier, directory)
    shutil.copytree(tokenizer_dir, directory, dirs_exist_ok=True)
    seal_artifact(
        directory, heads=heads, pooling=classifier.pooling, prefix="", lineage={}, metrics={}
    )
    for path in sorted(p for p in directory.rglob("*") if p.is_file()):
        assert flip_bits(path, lambda: verify_artifact(read_artifact(directory))) == 0, path.name


def test_a_flipped_bit_in_cached_teacher_outputs_is_noticed(tmp_path: Path) -> None:
    identity = SignalIdentity(
        teacher_sha256="a" * 64,
        tokenizer_sha256="b" * 64,
        text_sha256="c" * 64,
        max_length=48,
        precision="float32",
        outputs={"sentiment": [0, 1]},
    )
    file = SignalFile(tmp_path / "signals.safetensors", identity)
    outputs = {"sentiment": torch.randn(30, 2), "tapped": torch.randn(30, 2, 4).bfloat16()}
    file.write(outputs)

    def read() -> dict[str, torch.Tensor]:
        found = file.read()
        if found is None:
            raise InvalidArtifact(file.path.name)
        return found

    assert flip_bits(file.path, read) == 0
    found = read()
    assert all(torch.equal(found[name], values) for name, values in outputs.items())


def test_a_document_of_format_1_has_no_checksum() -> None:
    assert unseal(b'{"format": 1, "a": 2}') == {"format": 1, "a": 2}
    assert unseal(str(seal({"a": 2})).replace("'", '"').encode())["a"] == 2
    with pytest.raises(ValueError, match="checksum"):
        unseal(b'{"format": 2, "a": 2}')
