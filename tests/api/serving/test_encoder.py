"""From text to tokens, whatever the text."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from services.api.serving.encoder import MAX_CHARACTERS_PER_TOKEN, TokenizerEncoder
from services.api.serving.errors import TextTooLong, UnusableText
from services.shared.model.tokens import encode, train_tokenizer

MAX_LENGTH = 12


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Any:
    directory: Path = tmp_path_factory.mktemp("tokenizer")
    return train_tokenizer(
        ["the room was clean", "房间很干净"], vocab_size=320, directory=directory
    )


@pytest.fixture(scope="module")
def encoder(tokenizer: Any) -> TokenizerEncoder:
    return TokenizerEncoder(tokenizer.backend_tokenizer.to_str(), max_length=MAX_LENGTH)


@given(
    st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=60), min_size=1, max_size=4)
)
def test_texts_become_the_tokens_that_training_saw(
    tokenizer: Any, encoder: TokenizerEncoder, texts: list[str]
) -> None:
    tokens, cut = encode(texts, tokenizer, max_length=MAX_LENGTH)
    found = encoder.encode(texts, truncate=True)
    assert [each.tokens for each in found] == tokens
    assert [each.truncated for each in found] == cut


def test_a_long_text_is_named_with_its_tokens(tokenizer: Any, encoder: TokenizerEncoder) -> None:
    long = "the " * 12
    with pytest.raises(TextTooLong) as refusal:
        encoder.encode(["a", long], truncate=False)
    found = refusal.value
    tokens = len(tokenizer(long)["input_ids"])
    assert (found.index, found.tokens, found.limit) == (1, tokens, MAX_LENGTH)


def test_megabytes_are_cut_before_they_are_tokenised(encoder: TokenizerEncoder) -> None:
    window = (MAX_LENGTH + 1) * MAX_CHARACTERS_PER_TOKEN
    huge = "the room " * 600_000
    [found] = encoder.encode([huge], truncate=True)
    [expected] = encoder.encode([huge[:window]], truncate=True)
    assert found.tokens == expected.tokens
    assert found.truncated
    with pytest.raises(TextTooLong) as refusal:
        encoder.encode([huge], truncate=False)
    assert refusal.value.tokens <= window + 2


def test_half_a_surrogate_pair_is_no_text(encoder: TokenizerEncoder) -> None:
    with pytest.raises(UnusableText, match="Text 1 has a lone surrogate"):
        encoder.encode(["fine", "\ud83d"], truncate=True)


def test_a_text_of_which_no_token_is_left_is_refused(tokenizer: Any) -> None:
    bare = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    bare.post_processor = None
    encoder = TokenizerEncoder(bare.to_str(), max_length=MAX_LENGTH)
    with pytest.raises(UnusableText, match="Text 0 is empty"):
        encoder.encode([""], truncate=False)
