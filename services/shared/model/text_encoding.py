"""How texts become what a tokenizer takes: pairs by its own encoding of pairs, chats by its chat template.

Training and serving call the same functions.
"""

from __future__ import annotations

from typing import Any

from jinja2 import TemplateError
from tokenizers import processors
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from services.shared.datasets.text import Chat, Pair, Text, TextKind, plain_text

_TOKEN_TYPES = "token_type_ids"


def prepare_tokenizer(tokenizer: PreTrainedTokenizerBase, kind: TextKind) -> None:
    """Give the tokenizer of a model for pairs a separator, where its own encoding of pairs has none.

    Most tokenizers of decoders put nothing between the two texts. Theirs gets the separator token, or else
    the token that ends a text; it is saved with the tokenizer. Raises ValueError for a tokenizer that
    cannot encode pairs.
    """
    if kind is not TextKind.PAIR:
        return
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise ValueError(
            "the tokenizer cannot encode pairs of texts: it has no tokenizer.json; choose another model"
        )
    backend = tokenizer.backend_tokenizer
    alone = [backend.encode(text, add_special_tokens=False).ids for text in ("a", "b")]
    if backend.encode("a", "b").ids != alone[0] + alone[1]:
        return
    separator = tokenizer.sep_token or tokenizer.eos_token or tokenizer.unk_token
    if separator is None:
        raise ValueError("the tokenizer cannot encode pairs: it defines no sep, eos or unk token")
    template = processors.TemplateProcessing(
        single="$A",
        pair=f"$A {separator} $B:1",
        special_tokens=[(separator, tokenizer.convert_tokens_to_ids(separator))],
    )
    own = backend.post_processor
    backend.post_processor = template if own is None else processors.Sequence([own, template])


def marks_types(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether models of this tokenizer are given token types."""
    return _TOKEN_TYPES in tokenizer.model_input_names


def tokenizer_input(
    text: Text, tokenizer: PreTrainedTokenizerBase
) -> tuple[str | tuple[str, str], bool]:
    """Return what the tokenizer takes, and whether it adds its special tokens.

    A chat template writes the special tokens itself. Raises ValueError where it refuses the messages.
    """
    if isinstance(text, Pair):
        return (text.text, text.text_pair), True
    if isinstance(text, Chat) and tokenizer.chat_template is not None:
        return _render(text, tokenizer), False
    return plain_text(text), True


def _render(chat: Chat, tokenizer: PreTrainedTokenizerBase) -> str:
    messages: Any = [message._asdict() for message in chat.messages]
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False))
    except (TemplateError, TypeError, ValueError, KeyError) as error:
        raise ValueError(f"the tokenizer's chat template refuses the messages: {error}") from error
