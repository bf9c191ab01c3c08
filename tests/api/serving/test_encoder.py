"""Texts are encoded as in training, and unusable ones are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from services.api.serving.encoder import MAX_CHARACTERS_PER_TOKEN, TokenizerEncoder
from services.api.serving.errors import TextTooLong, UnusableText
from services.shared.model.tokens import encode, train_tokenizer

MAX_LENGTH = 12


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerFast:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    tokenizer = train_tokenizer(
        ["the room was clean", "房间很干净"], vocab_size=320, directory=directory
    )
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


@pytest.fixture(scope="module")
def encoder(tokenizer: PreTrainedTokenizerFast) -> TokenizerEncoder:
    return TokenizerEncoder(tokenizer.backend_tokenizer.to_str(), max_length=MAX_LENGTH)


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), min_size=1, max_size=4)
)
def test_texts_are_encoded_as_in_training(
    tokenizer: PreTrainedTokenizerFast, encoder: TokenizerEncoder, texts: list[str]
) -> None:
    tokens, cut = encode(texts, tokenizer, max_length=MAX_LENGTH, prefix="")
    found = encoder.encode(texts, truncate=True)
    assert [each.tokens for each in found] == tokens
    assert [each.truncated for each in found] == cut


def test_a_long_text_is_refused_with_its_number_of_tokens(
    tokenizer: PreTrainedTokenizerFast, encoder: TokenizerEncoder
) -> None:
    long = "the " * 12
    with pytest.raises(TextTooLong) as refusal:
        encoder.encode(["a", long], truncate=False)
    found = refusal.value
    tokens = len(tokenizer(long)["input_ids"])
    assert (found.index, found.tokens, found.limit) == (1, tokens, MAX_LENGTH)


def test_megabytes_are_truncated_before_they_are_tokenised(encoder: TokenizerEncoder) -> None:
    window = (MAX_LENGTH + 1) * MAX_CHARACTERS_PER_TOKEN
    huge = "the room " * 600_000
    [found] = encoder.encode([huge], truncate=True)
    [expected] = encoder.encode([huge[:window]], truncate=True)
    assert found.tokens == expected.tokens
    assert found.truncated
    with pytest.raises(TextTooLong) as refusal:
        encoder.encode([huge], truncate=False)
    assert refusal.value.tokens <= window + 2


def test_a_lone_surrogate_is_refused(encoder: TokenizerEncoder) -> None:
    with pytest.raises(UnusableText, match="Text 1 has a lone surrogate"):
        encoder.encode(["fine", "\ud83d"], truncate=True)


def test_a_text_without_tokens_is_refused(tokenizer: PreTrainedTokenizerFast) -> None:
    bare = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    bare.post_processor = None
    encoder = TokenizerEncoder(bare.to_str(), max_length=MAX_LENGTH)
    with pytest.raises(UnusableText, match="Text 0 is empty"):
        encoder.encode([""], truncate=False)
