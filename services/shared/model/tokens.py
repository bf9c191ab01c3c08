"""Tokenisation: from texts to token ids to padded batches.

Legend: N texts, B texts of a batch, S tokens, C classes of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from services.shared.datasets.card import DatasetCard, Head, HeadType, Split
from services.shared.datasets.stored_card import verify_split
from services.shared.model.metrics import MISSING

Array = npt.NDArray[Any]

CHUNK_TEXTS = 1000  # that are tokenised at once
PAD, UNKNOWN, BEGIN, END = "<pad>", "<unk>", "<s>", "</s>"


@dataclass(frozen=True)
class Rows:
    """The texts of a split, their line in the uploaded file and their labels.

    `labels[head]` is int32 [N] with -100 where missing, or float32 [N, C] with a NaN row where missing.
    """

    texts: list[str]
    lines: Array  # int64 [N]
    labels: dict[str, Array]

    def __len__(self) -> int:
        return len(self.texts)


@dataclass(frozen=True)
class TokenisedSplit:
    """A tokenised split: text i is `flat[offsets[i]:offsets[i + 1]]`."""

    flat: Array  # int32
    offsets: Array  # int64 [N + 1]
    lines: Array  # int64 [N]
    labels: dict[str, Array]  # as in Rows
    truncated: int  # number of texts longer than the limit

    def __len__(self) -> int:
        return len(self.lines)

    @property
    def lengths(self) -> Array:
        """Return the number of tokens of each text, int64 [N]."""
        return np.diff(self.offsets)

    def tokens(self, row: int) -> Array:
        """Return the token ids of one text."""
        tokens: Array = self.flat[self.offsets[row] : self.offsets[row + 1]]
        return tokens


@dataclass(frozen=True)
class Batch:
    """Right-padded texts. A row of weight 0 is a dummy that equalises the forward passes of the ranks."""

    input_ids: Tensor  # int64 [B, S]
    attention_mask: Tensor | None  # int64 [B, S]; None where nothing is padded
    labels: dict[str, Tensor]  # int64 [B] with -100 | float32 [B, C] with NaN rows
    weight: Tensor  # float32 [B], 1 or 0

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device."""
        mask = self.attention_mask
        return Batch(
            input_ids=self.input_ids.to(device, non_blocking=True),
            attention_mask=None if mask is None else mask.to(device, non_blocking=True),
            labels={k: v.to(device, non_blocking=True) for k, v in self.labels.items()},
            weight=self.weight.to(device, non_blocking=True),
        )


def load_tokenizer(directory: Path | str) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a local directory, with a padding token, padding on the right.

    Raises ValueError where there is none, or where it needs custom code.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(directory), local_files_only=True, trust_remote_code=False
        )
    except (OSError, KeyError, ImportError, ValueError) as error:
        raise ValueError(f"{directory} has no readable tokenizer: {error}") from error
    tokenizer.padding_side = "right"
    tokenizer.truncation_side = "right"
    if tokenizer.pad_token_id is None:
        # Any token id works: padding is masked, and causal attention never reaches it.
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.unk_token
    if tokenizer.pad_token_id is None:
        raise ValueError(f"{directory}: the tokenizer defines no pad, eos or unk token to pad with")
    return tokenizer


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, directory: Path
) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer, write it to `directory` and return it.

    Every text becomes `<s> text </s>`: an encoder is pooled at the first token, a decoder at the last.
    The same texts in the same order give the same tokenizer.
    """
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD, UNKNOWN, BEGIN, END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer=trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A {END}",
        special_tokens=[(BEGIN, bpe.token_to_id(BEGIN)), (END, bpe.token_to_id(END))],
    )
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=bpe,
        pad_token=PAD,
        unk_token=UNKNOWN,
        bos_token=BEGIN,
        eos_token=END,
        padding_side="right",
    )
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(directory))
    return load_tokenizer(directory)


def select_heads(card: DatasetCard, names: Sequence[str] | None) -> list[Head]:
    """Return the named heads of a dataset, or all of them. Raises ValueError for unknown names."""
    if names is None:
        return list(card.heads)
    by_name = {head.name: head for head in card.heads}
    unknown = [name for name in names if name not in by_name]
    if unknown:
        raise ValueError(
            f"dataset {card.name!r} has no head {', '.join(unknown)}; it has {', '.join(by_name)}"
        )
    return [by_name[name] for name in names]


def read_rows(dataset_dir: Path, split: Split, heads: Sequence[Head]) -> Rows:
    """Read texts and the labels of `heads`; a head that the dataset lacks has no labels.

    Raises DamagedDataset where the file is not as it was stored.
    """
    verify_split(dataset_dir, split)
    path = dataset_dir / f"{split}.parquet"
    schema = pq.read_schema(path)
    known = [head.name for head in heads if head.name in schema.names]
    table = pq.read_table(path, columns=["text", "line", *known])
    size = table.num_rows
    labels = {
        head.name: _labels(table.column(head.name), head)
        if head.name in known
        else _no_labels(head, size)
        for head in heads
    }
    lines = table.column("line").to_numpy().astype(np.int64)
    return Rows(texts=table.column("text").to_pylist(), lines=lines, labels=labels)


def tokenise(rows: Rows, tokenizer: PreTrainedTokenizerBase, *, max_length: int) -> TokenisedSplit:
    """Tokenise texts to at most `max_length` tokens each, special tokens kept.

    In chunks: a list of Python integers takes ten times the memory of the array that is kept.
    """
    chunks, lengths, truncated = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)], 0
    for start in range(0, len(rows), CHUNK_TEXTS):
        texts = rows.texts[start : start + CHUNK_TEXTS]
        tokens, cut = encode(texts, tokenizer, max_length=max_length)
        lengths.append(np.fromiter(map(len, tokens), dtype=np.int64, count=len(tokens)))
        flat = itertools.chain.from_iterable(tokens)
        chunks.append(np.fromiter(flat, dtype=np.int32, count=int(lengths[-1].sum())))
        truncated += sum(cut)
    offsets = np.concatenate([np.zeros(1, np.int64), np.cumsum(np.concatenate(lengths))])
    return TokenisedSplit(
        np.concatenate(chunks), offsets, rows.lines, rows.labels, truncated=truncated
    )


def read_split(
    dataset_dir: Path,
    split: Split,
    heads: Sequence[Head],
    *,
    tokenizer: PreTrainedTokenizerBase,
    max_length: int,
) -> TokenisedSplit:
    """Read and tokenise one split of a stored dataset."""
    return tokenise(read_rows(dataset_dir, split, heads), tokenizer, max_length=max_length)


def encode(
    texts: Sequence[str], tokenizer: PreTrainedTokenizerBase, *, max_length: int | None
) -> tuple[list[list[int]], list[bool]]:
    """Return the token ids of each text, and whether it was truncated to `max_length`.

    A text without any token (blank, to some tokenizers) becomes one padding token.
    """
    if not texts:
        return [], []
    tokens = _encode_whole(texts, tokenizer)
    truncated = [max_length is not None and len(ids) > max_length for ids in tokens]
    for row, is_truncated in enumerate(truncated):
        if is_truncated:
            # Tokenised again, not sliced: only the tokenizer knows which special tokens to keep.
            tokens[row] = tokenizer(texts[row], truncation=True, max_length=max_length)["input_ids"]
    return [ids or [tokenizer.pad_token_id] for ids in tokens], truncated


def _encode_whole(texts: Sequence[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the token ids of whole texts, with the special tokens that the tokenizer adds."""
    if isinstance(tokenizer, PreTrainedTokenizerFast):
        backend = tokenizer.backend_tokenizer
        backend.no_truncation()
        backend.no_padding()
        # Without offsets into the text, which nothing here reads: half the time.
        return [encoding.ids for encoding in backend.encode_batch_fast(list(texts))]
    ids: list[list[int]] = tokenizer(
        list(texts), return_attention_mask=False, return_token_type_ids=False, verbose=False
    )["input_ids"]
    return ids


def collate(split: TokenisedSplit, rows: Sequence[int], pad_id: int) -> Batch:
    """Return a padded batch of some texts; without rows, one dummy text of weight 0 without labels."""
    if not rows:
        return _dummy(split, pad_id)
    ids, mask = pad([split.tokens(row) for row in rows], pad_id)
    chosen = np.asarray(rows)
    labels = {name: _tensor(values[chosen]) for name, values in split.labels.items()}
    return Batch(ids, mask, labels, weight=torch.ones(len(rows)))


def pad(tokens: Sequence[Sequence[int] | Array], pad_id: int) -> tuple[Tensor, Tensor | None]:
    """Return input_ids [B, S] and attention_mask [B, S], None where all have the same length."""
    lengths = np.array([len(ids) for ids in tokens])
    width = int(lengths.max())
    ids = np.full((len(tokens), width), pad_id, dtype=np.int64)
    for row, numbers in enumerate(tokens):
        ids[row, : lengths[row]] = numbers
    if (lengths == width).all():
        return torch.from_numpy(ids), None
    mask = (np.arange(width) < lengths[:, None]).astype(np.int64)
    return torch.from_numpy(ids), torch.from_numpy(mask)


def _dummy(split: TokenisedSplit, pad_id: int) -> Batch:
    labels = {}
    for name, values in split.labels.items():
        missing = MISSING if values.ndim == 1 else np.nan
        labels[name] = _tensor(np.full((1, *values.shape[1:]), missing, dtype=values.dtype))
    return Batch(torch.full((1, 1), pad_id), None, labels, weight=torch.zeros(1))


def _tensor(values: Array) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.long() if values.ndim == 1 else tensor


def _labels(column: pa.ChunkedArray, head: Head) -> Array:
    if head.type is HeadType.SINGLE_LABEL:
        filled: Array = column.fill_null(MISSING).to_numpy().astype(np.int32)
        return filled
    values = np.zeros((len(column), len(head.labels)), dtype=np.float32)
    for row, indices in enumerate(column.to_pylist()):
        values[row, :] = np.nan if indices is None else 0.0
        if indices:
            values[row, indices] = 1.0
    return values


def _no_labels(head: Head, size: int) -> Array:
    if head.type is HeadType.SINGLE_LABEL:
        return np.full(size, MISSING, dtype=np.int32)
    return np.full((size, len(head.labels)), np.nan, dtype=np.float32)
