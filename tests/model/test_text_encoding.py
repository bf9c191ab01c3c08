"""Pairs are encoded as the tokenizer encodes pairs, and chats as its chat template writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import BertConfig, BertTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from services.shared.datasets.card import Head
from services.shared.datasets.text import Chat, Message, Pair, TextKind
from services.shared.model.classifier import build_classifier
from services.shared.model.segments import unmark_types
from services.shared.model.tokens import encode, load_tokenizer, pad

WORDS = ["the", "room", "was", "clean", "staff", "kind", "user", "assistant", ":", "yes"]
PAIRS = [
    Pair("the room was clean", "the staff was kind"),
    Pair("clean", "the room was clean the staff was kind yes yes yes"),
    Pair("the room was clean the staff was kind the room was clean", "yes"),
]
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system here') }}{% endif %}"
    "[CLS]{{ m.content }}[SEP]{% endfor %}"
)


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A WordPiece tokenizer with BERT's special tokens and token types."""
    directory = tmp_path_factory.mktemp("bert")
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (directory / "vocab.txt").write_text("\n".join([*special, *WORDS]))
    BertTokenizer(str(directory / "vocab.txt")).save_pretrained(str(directory))
    return directory


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that adds no special tokens, as those of most decoders."""
    directory = tmp_path_factory.mktemp("decoder")
    vocabulary = {word: n for n, word in enumerate(["<unk>", "<end>", *WORDS])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=backend, eos_token="<end>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(str(directory))
    return directory


@pytest.mark.parametrize("max_length", [None, 9])
def test_a_pair_is_what_the_tokenizer_makes_of_it(bert: Path, max_length: int | None) -> None:
    tokenizer = load_tokenizer(bert, TextKind.PAIR)
    found, truncated = encode(PAIRS, tokenizer, max_length=max_length, prefix="")
    for pair, tokens in zip(PAIRS, found, strict=True):
        expected = tokenizer(
            *pair, truncation=max_length is not None, max_length=max_length, padding=False
        )
        ids, _, types = pad([tokens], 0)
        assert ids[0].tolist() == expected["input_ids"]
        assert types is not None
        assert types[0].tolist() == expected["token_type_ids"]
    assert truncated == [False] * 3 if max_length is None else [True] * 3


def test_the_longer_text_is_truncated_first(bert: Path) -> None:
    tokenizer = load_tokenizer(bert, TextKind.PAIR)
    (tokens,), _ = encode(PAIRS[1:2], tokenizer, max_length=7, prefix="")
    ids, _ = unmark_types(pad([tokens], 0).input_ids.numpy())
    assert tokenizer.decode(ids[0]) == "[CLS] clean [SEP] the room was [SEP]"


def test_a_pair_of_a_decoder_gets_a_separator_that_is_saved(decoder: Path, tmp_path: Path) -> None:
    tokenizer = load_tokenizer(decoder, TextKind.PAIR)
    alone, _ = encode(["the room", "yes"], tokenizer, max_length=None, prefix="")
    (joined,), _ = encode([Pair("the room", "yes")], tokenizer, max_length=None, prefix="")
    assert joined == [*alone[0], tokenizer.eos_token_id, *alone[1]]
    tokenizer.save_pretrained(str(tmp_path))
    for kind in (TextKind.SINGLE, TextKind.PAIR):
        loaded = load_tokenizer(tmp_path, kind)
        assert loaded("the room", "yes")["input_ids"] == joined
        assert loaded("the room")["input_ids"] == alone[0]


def test_a_model_of_single_texts_keeps_its_tokenizer(decoder: Path) -> None:
    tokenizer = load_tokenizer(decoder)
    assert tokenizer("the", "yes")["input_ids"] == tokenizer("the yes")["input_ids"]


def test_token_types_reach_a_backbone_that_has_them(bert: Path) -> None:
    tokenizer = load_tokenizer(bert, TextKind.PAIR)
    config = BertConfig(
        vocab_size=20,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
    )
    torch.manual_seed(0)
    classifier = build_classifier(config, [Head(name="same", labels=["no", "yes"])]).eval()
    tokens, _ = encode(PAIRS[:1], tokenizer, max_length=None, prefix="")
    padded = pad(tokens, 0)
    with torch.no_grad():
        expected = classifier.backbone(
            **tokenizer(*PAIRS[0], return_tensors="pt")
        ).last_hidden_state[:, 0]
        found = classifier(*padded)["same"]
        without = classifier(padded.input_ids)["same"]
        linear = classifier.heads["same"](expected)
    torch.testing.assert_close(found, linear)
    assert not torch.allclose(found, without)


def test_messages_are_written_by_the_chat_template(bert: Path) -> None:
    tokenizer = load_tokenizer(bert, TextKind.CHAT)
    chat = Chat((Message("user", "the room was clean"), Message("assistant", "yes")))
    plain, _ = encode([chat], tokenizer, max_length=None, prefix="")
    assert tokenizer.decode(plain[0]) == "[CLS] user : the room was clean assistant : yes [SEP]"
    tokenizer.chat_template = TEMPLATE
    rendered, truncated = encode([chat], tokenizer, max_length=6, prefix="")
    assert tokenizer.decode(rendered[0]) == "[CLS] the room was clean [SEP]"
    assert truncated == [True]
    assert (
        _all_tokens(chat, tokenizer) == encode([chat], tokenizer, max_length=None, prefix="")[0][0]
    )


def test_messages_that_the_template_refuses_are_a_fault_of_the_data(bert: Path) -> None:
    tokenizer = load_tokenizer(bert, TextKind.CHAT)
    tokenizer.chat_template = TEMPLATE
    with pytest.raises(ValueError, match="chat template refuses the messages: no system here"):
        encode([Chat((Message("system", "yes"),))], tokenizer, max_length=None, prefix="")


def _all_tokens(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    messages = [message._asdict() for message in chat.messages]
    found: Any = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    return list(found)
