"""Logistic regression of scikit-learn on character n-grams, for `tests.bench.baseline`; runs in a venv of its own.

    python peer_sklearn.py < splits.json

Prints one JSON line for each vectorizer and head: accuracy, macro-F1, CPU seconds.
"""

from __future__ import annotations

import json
import sys
import time

from sklearn.feature_extraction.text import (
    HashingVectorizer,
    TfidfTransformer,
    TfidfVectorizer,
)
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import accuracy_score, f1_score
from sklearn.pipeline import make_pipeline


def main() -> None:
    """Train on each head with each vectorizer."""
    data = json.load(sys.stdin)
    ngrams = {"analyzer": "char", "ngram_range": (1, 3)}
    vectorizers = {
        "TfidfVectorizer(sublinear_tf=True)": TfidfVectorizer(**ngrams, sublinear_tf=True),
        "TfidfVectorizer(sublinear_tf=True, min_df=2)": TfidfVectorizer(
            **ngrams, sublinear_tf=True, min_df=2
        ),
        "HashingVectorizer(n_features=2**18), TfidfTransformer": make_pipeline(
            HashingVectorizer(**ngrams, n_features=2**18, norm=None, alternate_sign=False),
            TfidfTransformer(sublinear_tf=True),
        ),
    }
    for name, vectorizer in vectorizers.items():
        began = time.process_time()
        train = vectorizer.fit_transform(data["train"]["texts"])
        test = vectorizer.transform(data["test"]["texts"])
        vectorizing = time.process_time() - began
        for head in data["heads"]:
            began = time.process_time()
            model = LogisticRegression(C=10, max_iter=1000).fit(train, data["train"][head])
            predicted = model.predict(test)
            seconds = vectorizing + time.process_time() - began
            truth = data["test"][head]
            row = {
                "name": name,
                "head": head,
                "accuracy": accuracy_score(truth, predicted),
                "macro_f1": f1_score(truth, predicted, average="macro"),
                "cpu_seconds": seconds,
            }
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
