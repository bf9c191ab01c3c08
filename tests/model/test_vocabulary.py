from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from services.shared.model.tokens import load_tokenizer, train_tokenizer
from services.shared.model.vocabulary import (
    NotTrimmable,
    changed_share,
    trim_config,
    trim_tokenizer,
    unknown_share,
)
from tests.model.conftest import TEXTS

if TYPE_CHECKING:
    from tests.model.conftest import MakeClassifier

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
CORPUS = [*TEXTS, *(f"{word} {word}s and the un{word}able {word}ing" for word in ("kind", "book"))]
SEEN = [CORPUS[0], CORPUS[2]]
UNSEEN = [CORPUS[5], "屏幕坏了", "an unkindable zebra ☃"]

MakeTokenizer = Callable[[Path], PreTrainedTokenizerBase]


def wrapped(tokenizer: Tokenizer, post: str = "template") -> PreTrainedTokenizerBase:
    begin, end = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("</s>")
    assert begin is not None
    assert end is not None
    if post == "bert":
        tokenizer.post_processor = processors.BertProcessing(("</s>", end), ("<s>", begin))
    else:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A </s>", special_tokens=[("<s>", begin), ("</s>", end)]
        )
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        pad_token="<pad>",
        mask_token="<mask>",
    )


def byte_bpe(directory: Path) -> PreTrainedTokenizerBase:
    return train_tokenizer(CORPUS, vocab_size=360, directory=directory)


def character_bpe(_directory: Path) -> PreTrainedTokenizerBase:
    bpe = Tokenizer(models.BPE(unk_token="<unk>", continuing_subword_prefix="##"))
    bpe.pre_tokenizer = pre_tokenizers.Whitespace()
    trainer = trainers.BpeTrainer(
        vocab_size=160, special_tokens=SPECIAL, show_progress=False, continuing_subword_prefix="##"
    )
    bpe.train_from_iterator(CORPUS, trainer)
    return wrapped(bpe)


def unigram(_directory: Path) -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrapped(tokenizer)


def word_piece(_directory: Path) -> PreTrainedTokenizerBase:
    tokenizer = Tokenizer(models.WordPiece(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=200, special_tokens=SPECIAL, show_progress=False)
    tokenizer.train_from_iterator(CORPUS, trainer)
    return wrapped(tokenizer, post="bert")


KINDS = [byte_bpe, character_bpe, unigram, word_piece]


def ids(tokenizer: PreTrainedTokenizerBase, texts: Sequence[str]) -> list[list[int]]:
    return [list(row) for row in tokenizer(list(texts))["input_ids"]]


@pytest.mark.parametrize("make", KINDS)
def test_texts_of_kept_pieces_are_divided_as_before(make: MakeTokenizer, tmp_path: Path) -> None:
    full = make(tmp_path / "full")
    trimmed = trim_tokenizer(full, SEEN)
    trimmed.tokenizer.save_pretrained(tmp_path / "trimmed")
    loaded = load_tokenizer(tmp_path / "trimmed")
    assert len(SPECIAL) < len(trimmed.kept) < len(full)
    assert [[trimmed.kept[i] for i in row] for row in ids(loaded, SEEN)] == ids(full, SEEN)
    assert loaded.get_vocab() == {
        piece: trimmed.kept.index(number)
        for piece, number in full.get_vocab().items()
        if number in trimmed.kept
    }


@pytest.mark.parametrize("make", KINDS)
def test_unseen_texts_fall_back_to_characters_instead_of_unknown_tokens(
    make: MakeTokenizer, tmp_path: Path
) -> None:
    full = make(tmp_path / "full")
    trimmed = trim_tokenizer(full, SEEN)
    known = UNSEEN[:1]  # every character of it is in the corpus
    assert changed_share(full, trimmed, known) == 1.0
    assert unknown_share(trimmed.tokenizer, known) == unknown_share(full, known) == 0.0
    assert unknown_share(trimmed.tokenizer, UNSEEN) <= unknown_share(full, UNSEEN)


@pytest.mark.parametrize("kind", ["bert", "xlm-roberta", "modernbert", "qwen3", "llama"])
def test_logits_are_equal_to_the_bit_where_all_pieces_are_kept(
    kind: str, make_classifier: MakeClassifier, tmp_path: Path
) -> None:
    full = byte_bpe(tmp_path / "full")
    model = make_classifier(kind, vocab_size=len(full))
    trimmed = trim_tokenizer(full, SEEN)
    config = trim_config(model.config, trimmed.kept)
    small = copy.deepcopy(model)
    small.backbone.resize_token_embeddings(len(trimmed.kept))
    with torch.no_grad():
        rows = model.backbone.get_input_embeddings().weight[trimmed.kept]
        small.backbone.get_input_embeddings().weight.copy_(rows)
        assert config.vocab_size == len(rows) < model.config.vocab_size
        for text in SEEN:
            before = model(torch.tensor(ids(full, [text])))
            after = small(torch.tensor(ids(trimmed.tokenizer, [text])))
            assert all(torch.equal(before[head], after[head]) for head in before)


def test_special_tokens_of_the_configuration_keep_their_meaning(
    make_classifier: MakeClassifier, tmp_path: Path
) -> None:
    full = byte_bpe(tmp_path / "full")
    config = copy.deepcopy(make_classifier("llama", vocab_size=len(full)).config)
    config.bos_token_id, config.eos_token_id = 2, [3, 350]
    kept = trim_tokenizer(full, SEEN, keep=[2, 3, 350]).kept
    trimmed = trim_config(config, kept)
    assert (trimmed.bos_token_id, trimmed.pad_token_id) == (2, 0)
    assert [kept[i] for i in trimmed.eos_token_id] == [3, 350]


def test_a_tokenizer_of_whole_words_is_refused() -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "good": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=words, unk_token="<unk>"
    )
    with pytest.raises(NotTrimmable, match="type WordLevel has no pieces to fall back to"):
        trim_tokenizer(tokenizer, ["good"])
