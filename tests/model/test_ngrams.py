"""Sparse vectors of character n-grams."""

from math import log

import numpy as np
import pytest

from services.shared.model.ngrams import SparseVectors, fit_vectorizer


def dense(vectors: SparseVectors, num_features: int) -> list[list[float]]:
    rows = []
    for start, stop in zip(vectors.offsets, vectors.offsets[1:], strict=False):
        row = np.zeros(num_features)
        row[vectors.features[start:stop]] = vectors.weights[start:stop]
        rows.append(row.tolist())
    return rows


def test_weights_are_those_of_tf_idf_with_sublinear_counts() -> None:
    vectorizer = fit_vectorizer(["aab", "ab", "c"], max_features=100)
    # In two texts: a, b and ab. One text contains c, aa and aab, which are no features.
    assert len(vectorizer.idf) == 3
    assert vectorizer.idf == pytest.approx([log(4 / 3) + 1] * 3)
    (row,) = dense(vectorizer.transform(["aab"]), 3)
    norm = np.sqrt((1 + log(2)) ** 2 + 2)
    assert sorted(row) == pytest.approx(sorted([(1 + log(2)) / norm, 1 / norm, 1 / norm]))


def test_ngrams_do_not_cross_texts_and_ignore_case() -> None:
    vectorizer = fit_vectorizer(["xy", "XY", "zx", "zx"], max_features=100)
    row_of = {
        text: dense(vectorizer.transform([text]), len(vectorizer.idf)) for text in ("xy", "XY")
    }
    assert row_of["xy"] == row_of["XY"]
    assert len(vectorizer.idf) == 5  # x, y, z, xy and zx, but no yx


def test_the_most_frequent_features_are_kept() -> None:
    vectorizer = fit_vectorizer(["a", "a", "a", "b", "b"], max_features=1)
    assert dense(vectorizer.transform(["a", "b"]), 1) == [[1.0], [0.0]]
