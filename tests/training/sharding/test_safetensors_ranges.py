"""Ranges of tensors: what the library writes we read, what we write the library reads."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from services.shared.training.sharding.safetensors_ranges import Layout, TensorFile, TensorWriter

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8]


def some(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return (torch.arange(torch.Size(shape).numel()) % 200).reshape(shape).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_the_library_writes_is_read(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"a": some(dtype, 3, 5), "b": some(dtype, 7)}
    save_file(tensors, tmp_path / "x.safetensors")
    with TensorFile(tmp_path / "x.safetensors") as file:
        assert file.entries["a"].shape == (3, 5)
        assert torch.equal(file.read("a").view(3, 5), tensors["a"])
        assert torch.equal(file.read("b"), tensors["b"])


@settings(max_examples=60, deadline=None)
@given(span=st.tuples(st.integers(0, 15), st.integers(0, 15)).map(sorted))
def test_any_range_is_that_range(tmp_path_factory: pytest.TempPathFactory, span: list[int]) -> None:
    path = tmp_path_factory.mktemp("ranges") / "x.safetensors"
    tensor = some(torch.bfloat16, 3, 5)
    save_file({"other": some(torch.float32, 2), "a": tensor}, path)
    start, stop = span
    with TensorFile(path) as file:
        assert torch.equal(file.read("a", start, stop), tensor.view(-1)[start:stop])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_we_write_the_library_reads(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = {"b": some(dtype, 4, 2), "a": some(dtype, 0), "c": some(dtype)}
    path = tmp_path / "x.safetensors"
    layout = [Layout(name, dtype, tuple(value.shape)) for name, value in tensors.items()]
    writer = TensorWriter(path, layout)
    for value in tensors.values():
        writer.append(value)
    writer.close()
    read = load_file(path)
    assert read.keys() == tensors.keys()
    assert all(torch.equal(read[name], value) for name, value in tensors.items())
    assert writer.num_bytes == path.stat().st_size


def raw(header: object, data: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is not a safetensors file"),
        (b"\xff" * 8, "longer than the file"),
        (struct.pack("<Q", 4) + b"nope", "is not a safetensors file"),
        (raw([1, 2]), "is not a safetensors file"),
        (raw({"a": {"dtype": "F32"}}), "is not a safetensors file"),
        (raw({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}, b"1234"), "F99"),
        (
            raw({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, b"1234"),
            "states a false size",
        ),
        (raw({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}), "is truncated"),
        (raw({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [4, 0]}}), "is not a size"),
        (raw({"a": {"dtype": "F32", "shape": 4, "data_offsets": [0, 4]}}), "is not a safetensors"),
    ],
)
def test_a_file_that_is_no_whole_safetensors_file_is_refused(
    tmp_path: Path, content: bytes, words: str
) -> None:
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=words):
        TensorFile(path)


@settings(max_examples=150, deadline=None)
@given(content=st.binary(max_size=200))
def test_no_bytes_do_worse_than_a_refusal(
    tmp_path_factory: pytest.TempPathFactory, content: bytes
) -> None:
    path = tmp_path_factory.mktemp("noise") / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(ValueError, match="safetensors"):
        TensorFile(path)
