"""Tokenisation: from texts to token ids to padded batches.

Legend: N texts, B texts of a batch, S tokens, C classes of a head.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from services.shared.datasets.card import DatasetCard, Head, HeadType, Split
from services.shared.datasets.stored_card import read_text_kind, verify_split
from services.shared.datasets.text import Text, TextKind, from_columns, with_prefix
from services.shared.model.metrics import MISSING
from services.shared.model.segments import mark_types, unmark_types
from services.shared.model.text_encoding import marks_types, prepare_tokenizer, tokenizer_input

Array = npt.NDArray[Any]

CHUNK_TEXTS = 1000  # that are tokenised at once
_CHUNK_ROWS = 8192  # that are read at once
PAD, UNKNOWN, BEGIN, END = "<pad>", "<unk>", "<s>", "</s>"


@dataclass(frozen=True)
class Rows:
    """The texts of a split, their line in the uploaded file and their labels.

    `labels[head]` is int32 [N] with -100 where missing, or float32 [N, C] with a NaN row where missing.
    """

    texts: Sequence[Text]
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


class Padded(NamedTuple):
    """Texts padded to the same length, in the order of a classifier's arguments."""

    input_ids: Tensor  # int64 [B, S]
    attention_mask: Tensor | None  # int64 [B, S]; None where all texts have the same length
    token_type_ids: Tensor | None  # int64 [B, S]; None where all are 0

    def to(self, device: torch.device | str) -> Padded:
        """Return the texts on a device."""
        return Padded(*(None if part is None else part.to(device) for part in self))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Batch:
    """Right-padded texts. A row of weight 0 is a dummy that equalises the forward passes of the ranks."""

    input_ids: Tensor  # int64 [B, S]
    attention_mask: Tensor | None  # int64 [B, S]; None where nothing is padded
    token_type_ids: Tensor | None  # int64 [B, S]; None where all are 0
    labels: dict[str, Tensor]  # int64 [B] with -100 | float32 [B, C] with NaN rows
    weight: Tensor  # float32 [B], 1 or 0

    @property
    def inputs(self) -> Padded:
        """Return the arguments of a classifier."""
        return Padded(self.input_ids, self.attention_mask, self.token_type_ids)

    def to(self, device: torch.device | str) -> Batch:
        """Return the batch on a device."""
        mask, types = self.attention_mask, self.token_type_ids
        return Batch(
            input_ids=self.input_ids.to(device, non_blocking=True),
            attention_mask=None if mask is None else mask.to(device, non_blocking=True),
            token_type_ids=None if types is None else types.to(device, non_blocking=True),
            labels={k: v.to(device, non_blocking=True) for k, v in self.labels.items()},
            weight=self.weight.to(device, non_blocking=True),
        )


def load_tokenizer(
    directory: Path | str, kind: TextKind = TextKind.SINGLE
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of a local directory, with a padding token, padding on the right.

    `kind` is what it is to encode. Raises ValueError where there is none, or where it needs custom code.
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
    prepare_tokenizer(tokenizer, kind)
    return tokenizer


def train_tokenizer(
    texts: Iterable[str], *, vocab_size: int, directory: Path
) -> PreTrainedTokenizerBase:
    """Train a byte-level BPE tokenizer, write it to `directory` and return it.

    Every text becomes `<s> text </s>`, a pair `<s> text </s> text </s>`: an encoder is pooled at the first
    token, a decoder at the last.
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
        pair=f"{BEGIN} $A {END} $B:1 {END}:1",
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


def iter_rows(dataset_dir: Path, split: Split, heads: Sequence[Head]) -> Iterator[Rows]:
    """Yield the rows of a split in chunks; a head that the dataset lacks has no labels.

    Raises DamagedDataset where the file is not as it was stored.
    """
    verify_split(dataset_dir, split)
    kind = read_text_kind(dataset_dir)
    text_columns = ["text", "text_pair"] if kind is TextKind.PAIR else ["text"]
    with pq.ParquetFile(dataset_dir / f"{split}.parquet") as file:
        names = file.schema_arrow.names
        known = [head.name for head in heads if head.name in names]
        columns = [*text_columns, "line", *known]
        for batch in file.iter_batches(batch_size=_CHUNK_ROWS, columns=columns):
            yield _rows(pa.Table.from_batches([batch]), heads, kind)


def read_rows(dataset_dir: Path, split: Split, heads: Sequence[Head]) -> Rows:
    """Return all rows of a split in memory, as `iter_rows` yields them."""
    chunks = list(iter_rows(dataset_dir, split, heads))
    return Rows(
        texts=[text for rows in chunks for text in rows.texts],
        lines=np.concatenate([np.zeros(0, np.int64), *(rows.lines for rows in chunks)]),
        labels={
            head.name: np.concatenate(
                [no_labels(head, 0), *(rows.labels[head.name] for rows in chunks)]
            )
            for head in heads
        },
    )


def tokenise(
    rows: Rows, tokenizer: PreTrainedTokenizerBase, *, max_length: int, prefix: str
) -> TokenisedSplit:
    """Tokenise texts, each after the model's prefix, to at most `max_length` tokens each, special tokens kept.

    In chunks: a list of Python integers takes ten times the memory of the array that is kept.
    """
    chunks, lengths, truncated = [np.zeros(0, np.int32)], [np.zeros(0, np.int64)], 0
    for start in range(0, len(rows), CHUNK_TEXTS):
        texts = rows.texts[start : start + CHUNK_TEXTS]
        tokens, cut = encode(texts, tokenizer, max_length=max_length, prefix=prefix)
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
    prefix: str,
) -> TokenisedSplit:
    """Read and tokenise one split of a stored dataset."""
    rows = read_rows(dataset_dir, split, heads)
    return tokenise(rows, tokenizer, max_length=max_length, prefix=prefix)


def encode(
    texts: Sequence[Text],
    tokenizer: PreTrainedTokenizerBase,
    *,
    max_length: int | None,
    prefix: str,
) -> tuple[list[list[int]], list[bool]]:
    """Return the token ids of each text, their types marked, and whether it was truncated to `max_length`.

    The prefix, which the model was trained to see before each text, counts in the length. Of a pair, tokens
    are removed from the end of the longer text first. A text without any token (blank, to some tokenizers)
    becomes one padding token. Raises ValueError for a chat that the template refuses.
    """
    if not texts:
        return [], []
    texts = [with_prefix(text, prefix) for text in texts] if prefix else texts
    inputs, special = zip(*(tokenizer_input(text, tokenizer) for text in texts), strict=True)
    tokens = _encode(inputs, tokenizer, special=special[0], max_length=None)
    truncated = [max_length is not None and len(ids) > max_length for ids in tokens]
    rows = [row for row, is_truncated in enumerate(truncated) if is_truncated]
    if rows:
        # Tokenised again, not sliced: only the tokenizer knows which special tokens to keep.
        cut = _encode(
            [inputs[row] for row in rows], tokenizer, special=special[0], max_length=max_length
        )
        for row, ids in zip(rows, cut, strict=True):
            tokens[row] = ids
    return [ids or [tokenizer.pad_token_id] for ids in tokens], truncated


def _encode(
    inputs: Sequence[str | tuple[str, str]],
    tokenizer: PreTrainedTokenizerBase,
    *,
    special: bool,
    max_length: int | None,
) -> list[list[int]]:
    """Return the token ids of each input; `special` adds the tokenizer's special tokens."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        ids: list[list[int]] = tokenizer(
            [str(text) for text in inputs],
            add_special_tokens=special,
            truncation=max_length is not None,
            max_length=max_length,
            return_attention_mask=False,
            return_token_type_ids=False,
            verbose=False,
        )["input_ids"]
        return ids
    backend = tokenizer.backend_tokenizer
    backend.no_padding()
    if max_length is None:
        backend.no_truncation()
    else:
        backend.enable_truncation(max_length, strategy="longest_first")
    # Without offsets into the text, which nothing here reads: half the time.
    encodings = backend.encode_batch_fast(list(inputs), add_special_tokens=special)
    if isinstance(inputs[0], str) or not marks_types(tokenizer):
        return [encoding.ids for encoding in encodings]
    return [mark_types(encoding.ids, encoding.type_ids) for encoding in encodings]


def collate(split: TokenisedSplit, rows: Sequence[int], pad_id: int) -> Batch:
    """Return a padded batch of some texts; without rows, one dummy text of weight 0 without labels."""
    if not rows:
        return _dummy(split, pad_id)
    padded = pad([split.tokens(row) for row in rows], pad_id)
    chosen = np.asarray(rows)
    labels = {name: _tensor(values[chosen]) for name, values in split.labels.items()}
    return Batch(*padded, labels, weight=torch.ones(len(rows)))


def pad(tokens: Sequence[Sequence[int] | Array], pad_id: int) -> Padded:
    """Return token ids with marked types as a padded batch."""
    lengths = np.array([len(ids) for ids in tokens])
    width = int(lengths.max())
    marked = np.full((len(tokens), width), pad_id, dtype=np.int64)
    for row, numbers in enumerate(tokens):
        marked[row, : lengths[row]] = numbers
    ids, types = unmark_types(marked)
    mask = None
    if (lengths < width).any():
        mask = torch.from_numpy((np.arange(width) < lengths[:, None]).astype(np.int64))
    return Padded(torch.from_numpy(ids), mask, None if types is None else torch.from_numpy(types))


def _dummy(split: TokenisedSplit, pad_id: int) -> Batch:
    labels = {}
    for name, values in split.labels.items():
        missing = MISSING if values.ndim == 1 else np.nan
        labels[name] = _tensor(np.full((1, *values.shape[1:]), missing, dtype=values.dtype))
    return Batch(torch.full((1, 1), pad_id), None, None, labels, weight=torch.zeros(1))


def _tensor(values: Array) -> Tensor:
    tensor = torch.from_numpy(np.ascontiguousarray(values))
    return tensor.long() if values.ndim == 1 else tensor


def _rows(table: pa.Table, heads: Sequence[Head], kind: TextKind) -> Rows:
    size = table.num_rows
    labels = {
        head.name: _labels(table.column(head.name), head)
        if head.name in table.column_names
        else no_labels(head, size)
        for head in heads
    }
    lines = table.column("line").to_numpy().astype(np.int64)
    return Rows(texts=_texts(table, kind), lines=lines, labels=labels)


def _texts(table: pa.Table, kind: TextKind) -> Sequence[Text]:
    texts: list[str] = table.column("text").to_pylist()
    if kind is TextKind.SINGLE:
        return texts
    pairs = table.column("text_pair").to_pylist() if kind is TextKind.PAIR else [None] * len(texts)
    return [from_columns(kind, text, pair) for text, pair in zip(texts, pairs, strict=True)]


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


def no_labels(head: Head, size: int) -> Array:
    """Return the labels of texts that have none."""
    if head.type is HeadType.SINGLE_LABEL:
        return np.full(size, MISSING, dtype=np.int32)
    return np.full((size, len(head.labels)), np.nan, dtype=np.float32)
