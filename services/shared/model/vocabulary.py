"""Leaves out the vocabulary rows that a dataset never uses, so that a small student is not mostly embedding.

What is kept: every piece that the texts use; special and added tokens; and what unseen texts need, which
is every piece of one character (the 256 byte pieces of a byte-level tokenizer are among them) and the
byte-fallback pieces. Kept rows keep their order. A text whose pieces are all kept is divided as before:

    Unigram    the best path consists of kept pieces and the others only compete with it; the piece of
               the lowest score is kept, since the score of an unknown character derives from it
    BPE        with a piece the parts of every merge that makes it are kept, so all merges of the text remain
    WordPiece  the longest match at each place is kept, and longer pieces only disappear
"""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, Tokenizer
from transformers import PretrainedConfig, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from services.shared.datasets.text import Text
from services.shared.model.segments import plain_ids
from services.shared.model.tokens import CHUNK_TEXTS, encode

_BYTE_PIECE = re.compile(r"^<0x[0-9A-Fa-f]{2}>$")
_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
)
# RoBERTa and its kin count positions from the padding id, so that low ids must not move.
_LOW_IDS = 16


class NotTrimmable(ValueError):
    """The rows of a tokenizer's vocabulary cannot be left out."""


@dataclass(frozen=True)
class TrimmedVocabulary:
    """A tokenizer with fewer pieces; its piece i was row `kept[i]`, in ascending order."""

    tokenizer: PreTrainedTokenizerBase
    kept: list[int]


def trim_tokenizer(
    tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text], *, keep: Collection[int] = ()
) -> TrimmedVocabulary:
    """Return the tokenizer with the pieces that `texts` need, the ids of `keep` and the fallback pieces.

    Raises NotTrimmable for tokenizers other than Unigram, BPE and WordPiece.
    """
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise NotTrimmable("trim_vocabulary needs a tokenizer.json; this tokenizer has none")
    document = json.loads(tokenizer.backend_tokenizer.to_str())
    model = document["model"]
    pieces = _pieces(model)
    ids = {piece: number for number, piece in pieces.items()}
    ids |= {added["content"]: added["id"] for added in document["added_tokens"]}
    kept = set(keep) | _used(tokenizer, texts) | {a["id"] for a in document["added_tokens"]}
    kept |= _processor_ids(document["post_processor"])
    kept |= {number for number, piece in pieces.items() if _is_fallback(piece, model)}
    kept |= set(range(min(_LOW_IDS, len(pieces))))
    if model["type"] == "BPE":
        kept = _with_parts(kept, pieces, ids, model)
    if model["type"] == "Unigram":
        kept.add(min(pieces, key=lambda number: model["vocab"][number][1]))
    order = sorted(kept & set(ids.values()))
    trimmed = _build(tokenizer, _renumbered(document, order))
    _check_equal(tokenizer, trimmed, texts[:CHUNK_TEXTS], order)
    return TrimmedVocabulary(trimmed, order)


def trim_config(config: PretrainedConfig, kept: Sequence[int]) -> PretrainedConfig:
    """Return the configuration of a model whose embedding has only the rows `kept`."""
    new = {old: number for number, old in enumerate(kept)}
    trimmed = copy.deepcopy(config)
    for name, numbers in special_ids(config).items():
        found = [new[number] for number in numbers if number in new]  # some rows have no token
        many = isinstance(getattr(config, name), list)
        setattr(trimmed, name, found if many else next(iter(found), None))
    trimmed.vocab_size = len(kept)
    return trimmed


def special_ids(config: PretrainedConfig) -> dict[str, list[int]]:
    """Return the token ids that a configuration refers to, by field; those outside of its rows are left out."""
    found = {}
    for name in config.to_dict():
        value = getattr(config, name, None) if name.endswith("_token_id") else None
        numbers: list[Any] = value if isinstance(value, list) else [value]
        if all(isinstance(n, int) and 0 <= n < config.vocab_size for n in numbers):
            found[name] = numbers
    return found


def unknown_share(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text]) -> float:
    """Return the share of unknown tokens among all tokens of the texts; 0 where there are none."""
    total = unknown = 0
    for ids in _encoded(tokenizer, texts):
        total += len(ids)
        unknown += ids.count(tokenizer.unk_token_id) if tokenizer.unk_token_id is not None else 0
    return unknown / total if total else 0.0


def changed_share(
    full: PreTrainedTokenizerBase, trimmed: TrimmedVocabulary, texts: Sequence[Text]
) -> float:
    """Return the share of the texts that the smaller vocabulary divides otherwise."""
    pairs = zip(_encoded(full, texts), _encoded(trimmed.tokenizer, texts), strict=True)
    changed = sum(before != [trimmed.kept[i] for i in after] for before, after in pairs)
    return changed / len(texts) if texts else 0.0


def _encoded(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text]) -> Iterable[list[int]]:
    for start in range(0, len(texts), CHUNK_TEXTS):
        found, _ = encode(texts[start : start + CHUNK_TEXTS], tokenizer, max_length=None, prefix="")
        yield from map(plain_ids, found)


def _used(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text]) -> set[int]:
    used: set[int] = set()
    for ids in _encoded(tokenizer, texts):
        used.update(ids)
    return used


def _pieces(model: Mapping[str, Any]) -> dict[int, str]:
    """Return the pieces of a tokenizer's model by id."""
    if model["type"] == "Unigram":
        return {number: piece for number, (piece, _) in enumerate(model["vocab"])}
    if model["type"] in ("BPE", "WordPiece"):
        return {number: piece for piece, number in model["vocab"].items()}
    raise NotTrimmable(
        f"trim_vocabulary: a tokenizer of type {model['type']} has no pieces to fall back to; Unigram, "
        "BPE and WordPiece have"
    )


def _is_fallback(piece: str, model: Mapping[str, Any]) -> bool:
    """Return whether a piece is one character or one byte: what unseen texts are made of."""
    prefix, suffix = model.get("continuing_subword_prefix"), model.get("end_of_word_suffix")
    bare = piece.removeprefix(prefix or "").removesuffix(suffix or "")
    return len(bare) == 1 or len(piece) == 1 or _BYTE_PIECE.match(piece) is not None


def _with_parts(
    kept: Collection[int],
    pieces: Mapping[int, str],
    ids: Mapping[str, int],
    model: Mapping[str, Any],
) -> set[int]:
    """Return kept ids with the parts, and the parts' parts, of every merge that makes one of them."""
    made_of: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for left, right in map(_merge, model["merges"]):
        made_of[_merged(left, right, model)].append((left, right))
    found, waiting = set(kept), [pieces[number] for number in kept if number in pieces]
    while waiting:
        for pair in made_of.get(waiting.pop(), ()):
            new = [part for part in pair if ids[part] not in found]
            found.update(ids[part] for part in new)
            waiting += new
    return found


def _merge(entry: str | Sequence[str]) -> tuple[str, str]:
    left, right = entry.split(" ") if isinstance(entry, str) else entry
    return left, right


def _merged(left: str, right: str, model: Mapping[str, Any]) -> str:
    return left + right.removeprefix(model.get("continuing_subword_prefix") or "")


def _processor_ids(processor: Mapping[str, Any] | None) -> set[int]:
    """Return the ids that a post-processor adds to a text."""
    if processor is None:
        return set()
    found = {number for entry in _templates(processor) for number in entry["ids"]}
    found |= {processor[name][1] for name in ("sep", "cls") if name in processor}
    for part in processor.get("processors", ()):
        found |= _processor_ids(part)
    return found


def _templates(processor: Mapping[str, Any]) -> list[dict[str, Any]]:
    return list(processor.get("special_tokens", {}).values())


def _renumbered(document: Mapping[str, Any], kept: Sequence[int]) -> dict[str, Any]:
    """Return a tokenizer.json with the kept pieces only, under their new numbers."""
    new = {old: number for number, old in enumerate(kept)}
    trimmed = copy.deepcopy(dict(document))
    model = trimmed["model"]
    if model["type"] == "Unigram":
        if model.get("unk_id") is not None:
            model["unk_id"] = new[model["unk_id"]]
        model["vocab"] = [model["vocab"][old] for old in kept if old < len(model["vocab"])]
    else:
        model["vocab"] = {p: new[old] for p, old in model["vocab"].items() if old in new}
    if model["type"] == "BPE":
        vocab = model["vocab"]
        model["merges"] = [
            merge
            for merge in model["merges"]
            if all(part in vocab for part in (*_merge(merge), _merged(*_merge(merge), model)))
        ]
    for added in trimmed["added_tokens"]:
        added["id"] = new[added["id"]]
    _renumber_processor(trimmed["post_processor"], new)
    trimmed["padding"] = trimmed["truncation"] = None
    return trimmed


def _renumber_processor(processor: dict[str, Any] | None, new: Mapping[int, int]) -> None:
    if processor is None:
        return
    for entry in _templates(processor):
        entry["ids"] = [new[number] for number in entry["ids"]]
    for name in ("sep", "cls"):
        if name in processor:
            processor[name] = [processor[name][0], new[processor[name][1]]]
    for part in processor.get("processors", ()):
        _renumber_processor(part, new)


def _build(
    tokenizer: PreTrainedTokenizerBase, document: Mapping[str, Any]
) -> PreTrainedTokenizerBase:
    """Return a tokenizer that reads its tokenizer.json alone: no class of its own adds pieces again."""
    added = {
        entry["content"]: AddedToken(**{k: v for k, v in entry.items() if k != "id"})
        for entry in document["added_tokens"]
    }
    special = {
        name: added.get(token, token)
        for name in _SPECIAL_TOKENS
        if (token := getattr(tokenizer, name, None)) is not None
    }
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer.from_str(json.dumps(document)),
        model_max_length=tokenizer.model_max_length,
        model_input_names=tokenizer.model_input_names,
        padding_side="right",
        truncation_side="right",
        chat_template=tokenizer.chat_template,
        **special,
    )


def _check_equal(
    full: PreTrainedTokenizerBase,
    trimmed: PreTrainedTokenizerBase,
    texts: Sequence[Text],
    kept: Sequence[int],
) -> None:
    """Raise NotTrimmable unless both divide the texts alike."""
    pairs = zip(_encoded(full, texts), _encoded(trimmed, texts), strict=True)
    if any(before != [kept[i] for i in after] for before, after in pairs):
        raise NotTrimmable(
            "trim_vocabulary: this tokenizer divides texts differently without its unused pieces"
        )
