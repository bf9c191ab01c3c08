from __future__ import annotations

import logging
from pathlib import Path
from typing import cast

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from transformers import PreTrainedTokenizerBase

from services.shared.datasets.card import DatasetCard, Head, HeadType, Split
from services.shared.datasets.stored_card import read_card
from services.shared.model.tokens import (
    Rows,
    TokenisedSplit,
    collate,
    encode,
    load_tokenizer,
    read_split,
    select_heads,
    tokenise,
    train_tokenizer,
)

TEXTS = ["good book", "awful hotel, awful price", "no label here", "书 很好"]


@pytest.fixture
def dataset_dir(tmp_path: Path, heads: list[Head]) -> Path:
    table = pa.table(
        {
            "text": TEXTS,
            "line": pa.array([1, 2, 3, 4], pa.int64()),
            "sentiment": pa.array([1, 0, None, 1], pa.int32()),
            "topics": pa.array([[0], [1, 2], None, []], pa.list_(pa.int32())),
        }
    )
    pq.write_table(table, tmp_path / "train.parquet")
    card = DatasetCard(
        id="ds_1",
        name="notes",
        heads=heads,
        rows={Split.TRAIN: 4, Split.VALIDATION: 0, Split.TEST: 0},
        label_counts={},
        missing_labels={},
        sha256="0" * 64,
    )
    (tmp_path / "dataset.json").write_text(card.model_dump_json())
    return tmp_path


def read(
    dataset_dir: Path, heads: list[Head], tokenizer_dir: Path, max_length: int = 64
) -> TokenisedSplit:
    return read_split(
        dataset_dir,
        Split.TRAIN,
        heads,
        tokenizer=load_tokenizer(tokenizer_dir),
        max_length=max_length,
        prefix="",
    )


def test_a_split_keeps_lines_labels_and_missing_labels(
    dataset_dir: Path, heads: list[Head], tokenizer_dir: Path
) -> None:
    split = read(dataset_dir, heads, tokenizer_dir)
    assert split.lines.tolist() == [1, 2, 3, 4]
    assert split.labels["sentiment"].tolist() == [1, 0, -100, 1]
    expected = [[1, 0, 0], [0, 1, 1], [np.nan] * 3, [0, 0, 0]]
    np.testing.assert_array_equal(split.labels["topics"], expected)


def test_a_head_that_the_dataset_lacks_is_missing_throughout(
    dataset_dir: Path, tokenizer_dir: Path
) -> None:
    other = [
        Head(name="mood", labels=["a", "b"]),
        Head(name="tags", type=HeadType.MULTI_LABEL, labels=["x", "y"]),
    ]
    split = read(dataset_dir, other, tokenizer_dir)
    assert split.labels["mood"].tolist() == [-100] * 4
    assert np.isnan(split.labels["tags"]).all()


def test_tokens_decode_to_their_texts(
    dataset_dir: Path, heads: list[Head], tokenizer_dir: Path
) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    split = read(dataset_dir, heads, tokenizer_dir)
    found = [tokenizer.decode(split.tokens(i), skip_special_tokens=True) for i in range(4)]
    assert found == TEXTS
    assert split.lengths.tolist() == [len(split.tokens(i)) for i in range(4)]


def test_chunks_of_texts_are_tokenised_as_the_whole_would_be(
    tokenizer_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    rows = Rows([f"{TEXTS[i % 4]} {'very ' * (i % 9)}{i}" for i in range(47)], np.arange(47), {})
    whole = tokenise(rows, tokenizer, max_length=20, prefix="")
    monkeypatch.setattr("services.shared.model.tokens.CHUNK_TEXTS", 5)
    chunked = tokenise(rows, tokenizer, max_length=20, prefix="")
    np.testing.assert_array_equal(chunked.flat, whole.flat)
    np.testing.assert_array_equal(chunked.offsets, whole.offsets)
    assert chunked.truncated == whole.truncated > 0


def test_tokens_are_those_of_the_tokenizer_itself(tokenizer_dir: Path) -> None:
    """A truncation or padding that an earlier call has set must not stick."""
    tokenizer = load_tokenizer(tokenizer_dir)
    expected = [tokenizer(text)["input_ids"] for text in TEXTS]
    tokenizer(TEXTS, truncation=True, max_length=4, padding=True)
    assert encode(TEXTS, tokenizer, max_length=None, prefix="")[0] == expected


def test_no_texts_are_an_empty_split(tokenizer_dir: Path) -> None:
    split = tokenise(
        Rows([], np.zeros(0, np.int64), {}), load_tokenizer(tokenizer_dir), max_length=8, prefix=""
    )
    assert (len(split), split.offsets.tolist(), len(split.flat)) == (0, [0], 0)


def test_a_truncated_text_keeps_its_special_tokens_and_is_counted(
    dataset_dir: Path, heads: list[Head], tokenizer_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    with caplog.at_level(logging.WARNING):
        split = read(dataset_dir, heads, tokenizer_dir, max_length=12)
    assert caplog.records == []
    whole = read(dataset_dir, heads, tokenizer_dir).lengths
    assert split.truncated == (whole > 12).sum() > 0
    assert split.lengths.max() == 12
    ids = split.tokens(1)
    assert [ids[0], ids[-1]] == [tokenizer.bos_token_id, tokenizer.eos_token_id]


def test_a_batch_is_padded_on_the_right(
    dataset_dir: Path, heads: list[Head], tokenizer_dir: Path
) -> None:
    split = read(dataset_dir, heads, tokenizer_dir)
    batch = collate(split, [0, 1], pad_id=0)
    length = int(split.lengths[0])
    assert batch.input_ids.shape == (2, int(split.lengths[1]))
    assert batch.attention_mask is not None
    assert batch.attention_mask.sum(dim=1).tolist() == split.lengths[:2].tolist()
    assert batch.input_ids[0, :length].tolist() == split.tokens(0).tolist()
    assert (batch.input_ids[0, length:] == 0).all()
    assert batch.labels["sentiment"].tolist() == [1, 0]


def test_texts_of_one_length_need_no_mask(
    dataset_dir: Path, heads: list[Head], tokenizer_dir: Path
) -> None:
    split = read(dataset_dir, heads, tokenizer_dir)
    assert collate(split, [0, 0], pad_id=0).attention_mask is None


def test_no_rows_give_one_dummy_text_of_weight_0_without_labels(
    dataset_dir: Path, heads: list[Head], tokenizer_dir: Path
) -> None:
    batch = collate(read(dataset_dir, heads, tokenizer_dir), [], pad_id=7)
    assert batch.input_ids.tolist() == [[7]]
    assert batch.weight.tolist() == [0.0]
    assert batch.labels["sentiment"].tolist() == [-100]
    assert batch.labels["topics"].isnan().all()


def test_the_same_texts_train_the_same_tokenizer(tmp_path: Path) -> None:
    texts = [f"text number {i} about book {i % 7}" for i in range(200)]
    for name in ("a", "b"):
        train_tokenizer(texts, vocab_size=400, directory=tmp_path / name)
    one, other = (tmp_path / n / "tokenizer.json" for n in ("a", "b"))
    assert one.read_bytes() == other.read_bytes()


def test_a_trained_tokenizer_decodes_any_text_to_itself(tokenizer_dir: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    text = "  emoji 🙂, tabs\t and ünïcödé  "
    (ids,), _ = encode([text], tokenizer, max_length=None, prefix="")
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_tokenizer_without_padding_token_pads_with_its_end_token(
    tmp_path: Path, tokenizer_dir: Path
) -> None:
    tokenizer = load_tokenizer(tokenizer_dir)
    tokenizer.pad_token = None
    tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.pad_token_id == loaded.eos_token_id


def test_a_directory_without_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="has no readable tokenizer"):
        load_tokenizer(tmp_path)


def test_an_empty_text_becomes_one_padding_token() -> None:
    class Wordless:
        pad_token_id = 3

        def __call__(self, texts: list[str], **_options: object) -> dict[str, list[list[int]]]:
            return {"input_ids": [[] for _ in texts]}

    assert encode([""], cast("PreTrainedTokenizerBase", Wordless()), max_length=8, prefix="") == (
        [[3]],
        [False],
    )


def test_unknown_heads_are_refused_with_the_known_ones(dataset_dir: Path) -> None:
    card = read_card(dataset_dir)
    assert [h.name for h in select_heads(card, ["topics"])] == ["topics"]
    with pytest.raises(ValueError, match="has no head mood; it has sentiment, topics"):
        select_heads(card, ["mood"])


def test_every_tensor_of_a_batch_moves_to_the_device(
    dataset_dir: Path, heads: list[Head], tokenizer_dir: Path
) -> None:
    batch = collate(read(dataset_dir, heads, tokenizer_dir), [0, 1], pad_id=0).to("meta")
    assert batch.attention_mask is not None
    tensors = [batch.input_ids, batch.attention_mask, batch.weight, *batch.labels.values()]
    assert {t.device for t in tensors} == {torch.device("meta")}
