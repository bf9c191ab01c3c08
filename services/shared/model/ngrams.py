"""Character n-grams of texts as sparse vectors, in bounded memory.

N-grams are hashed into 2^22 buckets. Those that occur in at least two training texts become features, the
most frequent first, weighted as scikit-learn's TfidfVectorizer(analyzer="char", ngram_range=(1, 3), min_df=2,
sublinear_tf=True) does.

Legend: N texts, F features, M non-zero values of all texts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

MAX_CHARACTERS = 1_000  # of a text
_NGRAMS = (1, 2, 3)
_BUCKET_BITS = 22
_MIN_TEXTS = 2  # a feature of one training text says nothing about others
_CHUNK_TEXTS = 1_000


@dataclass(frozen=True)
class SparseVectors:
    """Sparse rows: the features of text i are [offsets[i], offsets[i + 1])."""

    features: Array  # int64 [M]
    weights: Array  # float32 [M]
    offsets: Array  # int64 [N + 1]


@dataclass(frozen=True)
class NgramVectorizer:
    """The features of a set of training texts."""

    feature_of_bucket: Array  # int32 [2^22], -1 where the bucket is no feature
    idf: Array  # float32 [F]

    def transform(self, texts: Sequence[str]) -> SparseVectors:
        """Return TF-IDF vectors of length 1; a text without any feature is an empty row."""
        features, weights, sizes = [], [], []
        for start in range(0, len(texts), _CHUNK_TEXTS):
            rows, buckets, counts = _count(texts[start : start + _CHUNK_TEXTS])
            found = self.feature_of_bucket[buckets]
            known = found >= 0
            rows, found = rows[known], found[known].astype(np.int64)
            values = (1 + np.log(counts[known])) * self.idf[found]
            num_texts = len(texts[start : start + _CHUNK_TEXTS])
            norms = np.sqrt(np.bincount(rows, values**2, num_texts))
            features.append(found)
            weights.append((values / norms[rows]).astype(np.float32))
            sizes.append(np.bincount(rows, minlength=num_texts))
        offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
        return SparseVectors(np.concatenate(features), np.concatenate(weights), offsets)


def fit_vectorizer(texts: Sequence[str], *, max_features: int) -> NgramVectorizer:
    """Choose the features of training texts; there is at least one text."""
    frequency = np.zeros(1 << _BUCKET_BITS, np.int32)
    for start in range(0, len(texts), _CHUNK_TEXTS):
        _, buckets, _ = _count(texts[start : start + _CHUNK_TEXTS])
        frequency += np.bincount(buckets, minlength=len(frequency)).astype(np.int32)
    chosen = np.flatnonzero(frequency >= min(_MIN_TEXTS, frequency.max()))
    order = np.argsort(-frequency[chosen], kind="stable")[:max_features]
    chosen = chosen[order]
    feature_of_bucket = np.full(len(frequency), -1, np.int32)
    feature_of_bucket[chosen] = np.arange(len(chosen))
    idf = np.log((1 + len(texts)) / (1 + frequency[chosen])) + 1
    return NgramVectorizer(feature_of_bucket, idf.astype(np.float32))


def _count(texts: Sequence[str]) -> tuple[Array, Array, Array]:
    """Return row, bucket and count of the n-grams of each text, sorted by row and bucket."""
    codes = [
        np.frombuffer(text[:MAX_CHARACTERS].lower().encode("utf-32-le", "surrogatepass"), "<u4")
        for text in texts
    ]
    rows = np.repeat(np.arange(len(texts)), [len(c) for c in codes])
    flat = np.concatenate(codes).astype(np.uint64)
    keys = [_keys(flat, rows, length) for length in _NGRAMS]
    found, counts = np.unique(np.concatenate(keys), return_counts=True)
    return found >> _BUCKET_BITS, found & ((1 << _BUCKET_BITS) - 1), counts


def _keys(codes: Array, rows: Array, length: int) -> Array:
    """Return `row << 22 | bucket` of each n-gram of the given length within one text."""
    count = max(0, len(codes) - length + 1)
    hashes = np.full(count, length, np.uint64)
    for start in range(length):
        # Multiplicative hashing, wrapping at 64 bits.
        hashes = (hashes ^ codes[start : start + count]) * np.uint64(0x9E3779B97F4A7C15)
        hashes ^= hashes >> np.uint64(29)
    within = rows[:count] == rows[length - 1 : length - 1 + count]
    buckets = (hashes >> np.uint64(64 - _BUCKET_BITS)).astype(np.int64)
    keys: Array = ((rows[:count] << _BUCKET_BITS) | buckets)[within]
    return keys
