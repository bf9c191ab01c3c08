from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from services.distiller.corpus import Corpus
from services.shared.datasets.card import Split
from services.shared.datasets.stored_card import read_card
from services.shared.model.tokens import read_rows
from tests.distiller.corpora import read_corpus

if TYPE_CHECKING:
    from tests.distiller.conftest import MakeDataset


def read(directory: Path, split: Split, *unlabelled: Path, dataset_dir: Path) -> Corpus:
    return read_corpus(directory / "corpus", dataset_dir, split, unlabelled=unlabelled)


def test_unlabelled_texts_come_after_the_labelled_ones_without_labels(
    dataset_dir: Path, new_dataset: MakeDataset, tmp_path: Path
) -> None:
    more = new_dataset({Split.TRAIN: 20, Split.VALIDATION: 5, Split.TEST: 5}, seed=7, heads=[])
    train = read(tmp_path, Split.TRAIN, more, dataset_dir=dataset_dir)
    assert len(train) == 240 + 30
    assert (train.num_labelled, train.num_duplicates) == (240, 0)
    assert (train.rows.labels["sentiment"][240:] == -100).all()
    assert np.isnan(train.rows.labels["topics"][240:]).all()
    labelled = read_rows(dataset_dir, Split.TRAIN, read_card(dataset_dir).heads)
    assert list(train.rows.texts[:240]) == list(labelled.texts)
    for head, values in labelled.labels.items():
        np.testing.assert_array_equal(train.rows.labels[head][:240], values)


def test_held_out_and_known_texts_are_left_out(dataset_dir: Path, tmp_path: Path) -> None:
    # The dataset itself as unlabelled text: every text is a duplicate.
    train = read(tmp_path, Split.TRAIN, dataset_dir, dataset_dir=dataset_dir)
    assert len(train) == 240
    assert train.num_duplicates == 340


def test_the_same_unlabelled_text_is_taken_once(
    dataset_dir: Path, new_dataset: MakeDataset, tmp_path: Path
) -> None:
    more = new_dataset(dict.fromkeys(Split, 8), seed=9, heads=[])
    train = read(tmp_path, Split.TRAIN, more, more, dataset_dir=dataset_dir)
    assert (len(train), train.num_duplicates) == (240 + 24, 24)


def test_labels_of_an_unlabelled_dataset_are_ignored(
    dataset_dir: Path, new_dataset: MakeDataset, tmp_path: Path
) -> None:
    more = new_dataset({Split.TRAIN: 20, Split.VALIDATION: 1, Split.TEST: 1}, seed=7)
    train = read(tmp_path, Split.TRAIN, more, dataset_dir=dataset_dir)
    assert (train.rows.labels["sentiment"][240:] == -100).all()


def test_the_origin_of_a_text_names_file_and_line(
    dataset_dir: Path, new_dataset: MakeDataset, tmp_path: Path
) -> None:
    more = new_dataset(
        {Split.TRAIN: 3, Split.VALIDATION: 2, Split.TEST: 1}, seed=7, dataset_id="ds_more"
    )
    train = read(tmp_path, Split.TRAIN, more, dataset_dir=dataset_dir)
    assert train.origin(0) == "line 1 of ds_test/train"
    assert train.origin(242) == "line 3 of ds_more/train"
    assert train.origin(244) == "line 2 of ds_more/validation"


def test_the_share_of_labelled_texts_is_counted_by_head(dataset_dir: Path, tmp_path: Path) -> None:
    train = read(tmp_path, Split.TRAIN, dataset_dir=dataset_dir)
    shares = train.labelled_shares(read_card(dataset_dir).heads)
    assert shares == {"sentiment": pytest.approx(0.9), "topics": pytest.approx(0.9)}
