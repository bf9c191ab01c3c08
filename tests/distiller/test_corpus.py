from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from services.distiller.corpus import Corpus, add_unlabelled, read_corpus
from services.shared.datasets.card import Head, Split
from services.shared.datasets.stored_card import read_card

if TYPE_CHECKING:
    from tests.distiller.conftest import MakeDataset


Parts = tuple[list[Head], dict[Split, Corpus]]


@pytest.fixture(scope="module")
def parts(dataset_dir: Path) -> Parts:
    heads = read_card(dataset_dir).heads
    return heads, {split: read_corpus(dataset_dir, split, heads) for split in Split}


def test_unlabelled_texts_come_after_the_labelled_ones_without_labels(
    parts: Parts, new_dataset: MakeDataset
) -> None:
    heads, labelled = parts
    more = new_dataset({Split.TRAIN: 20, Split.VALIDATION: 5, Split.TEST: 5}, seed=7, heads=[])
    train, duplicates = add_unlabelled(
        labelled[Split.TRAIN], [more], held_out=[labelled[Split.TEST]], heads=heads
    )
    assert len(train) == 240 + 30
    assert duplicates == 0
    assert (train.rows.labels["sentiment"][240:] == -100).all()
    assert np.isnan(train.rows.labels["topics"][240:]).all()
    np.testing.assert_array_equal(
        train.rows.labels["topics"][:240], labelled[Split.TRAIN].rows.labels["topics"]
    )


def test_held_out_and_known_texts_are_left_out(
    parts: Parts, new_dataset: MakeDataset, dataset_dir: Path
) -> None:
    heads, labelled = parts
    held_out = [labelled[Split.VALIDATION], labelled[Split.TEST]]
    # The dataset itself as unlabelled text: every text is a duplicate.
    train, duplicates = add_unlabelled(
        labelled[Split.TRAIN], [dataset_dir], held_out=held_out, heads=heads
    )
    assert len(train) == 240
    assert duplicates == 340


def test_the_same_unlabelled_text_is_taken_once(parts: Parts, new_dataset: MakeDataset) -> None:
    heads, labelled = parts
    more = new_dataset(dict.fromkeys(Split, 8), seed=9, heads=[])
    train, duplicates = add_unlabelled(
        labelled[Split.TRAIN], [more, more], held_out=[], heads=heads
    )
    assert (len(train), duplicates) == (240 + 24, 24)


def test_labels_of_an_unlabelled_dataset_are_ignored(
    parts: Parts, new_dataset: MakeDataset
) -> None:
    heads, labelled = parts
    more = new_dataset({Split.TRAIN: 20, Split.VALIDATION: 1, Split.TEST: 1}, seed=7)
    train, _ = add_unlabelled(labelled[Split.TRAIN], [more], held_out=[], heads=heads)
    assert (train.rows.labels["sentiment"][240:] == -100).all()


def test_the_origin_of_a_text_names_file_and_line(parts: Parts, new_dataset: MakeDataset) -> None:
    heads, labelled = parts
    more = new_dataset(
        {Split.TRAIN: 3, Split.VALIDATION: 2, Split.TEST: 1}, seed=7, dataset_id="ds_more"
    )
    train, _ = add_unlabelled(labelled[Split.TRAIN], [more], held_out=[], heads=heads)
    assert train.origin(0) == "line 1 of ds_test/train"
    assert train.origin(242) == "line 3 of ds_more/train"
    assert train.origin(244) == "line 2 of ds_more/validation"


def test_the_share_of_labelled_texts_is_counted_by_head(parts: Parts) -> None:
    heads, labelled = parts
    shares = labelled[Split.TRAIN].labelled_shares(heads)
    assert shares == {"sentiment": pytest.approx(0.9), "topics": pytest.approx(0.9)}
