from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from services.shared.memory.architecture.hf_config import config_of, dimensions_of
from services.shared.memory.architecture.pooling import (
    Pooling,
    checkpoint_pooling,
    checkpoint_prefix,
)
from services.shared.memory.errors import InvalidInput

BERT = {
    "model_type": "bert",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 320,
    "max_position_embeddings": 64,
}


def write(directory: Path, pooling: dict[str, Any], kind: str = "models.Pooling") -> Path:
    """Write the files of a sentence-transformers checkpoint whose pooling is not the last module."""
    modules = [
        {"idx": 0, "path": "", "type": "sentence_transformers.models.Transformer"},
        {"idx": 1, "path": "1_Pooling", "type": f"sentence_transformers.{kind}"},
        {"idx": 2, "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
    ]
    (directory / "modules.json").write_text(json.dumps(modules), "utf-8")
    (directory / "1_Pooling").mkdir()
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling), "utf-8")
    return directory


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, Pooling.MEAN),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_cls_token": True}, Pooling.FIRST),
        ({"pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}, Pooling.LAST),
        ({"word_embedding_dimension": 32}, Pooling.MEAN),
        ({"embedding_dimension": 32, "pooling_mode": "cls"}, Pooling.FIRST),
    ],
)
def test_the_pooling_of_sentence_transformers_is_read(
    config: dict[str, Any], expected: Pooling, tmp_path: Path
) -> None:
    assert checkpoint_pooling(write(tmp_path, config)) is expected


def test_the_module_is_found_under_its_newer_name(tmp_path: Path) -> None:
    kind = "sentence_transformer.modules.pooling.Pooling"
    assert checkpoint_pooling(write(tmp_path, {"pooling_mode": "mean"}, kind)) is Pooling.MEAN


def test_a_checkpoint_without_these_files_has_neither(tmp_path: Path) -> None:
    assert checkpoint_pooling(tmp_path) is None
    assert checkpoint_prefix(tmp_path) == ""


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": False}, "pools by max;"),
        ({"pooling_mode_max_tokens": True, "pooling_mode_mean_tokens": True}, "mean and max"),
        ({"pooling_mode": "weightedmean"}, "pools by weightedmean"),
        ({"pooling_mode": "mean", "include_prompt": False}, "mean without the prompt"),
    ],
)
def test_another_pooling_is_refused_with_the_field_that_replaces_it(
    config: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    with pytest.raises(InvalidInput, match=problem) as caught:
        checkpoint_pooling(write(tmp_path, config))
    assert "set pooling" in str(caught.value)


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"prompts": {"query": "query: "}, "default_prompt_name": "query"}, "query: "),
        ({"prompts": {"query": "query: "}, "default_prompt_name": None}, ""),
        ({"prompts": {}, "default_prompt_name": "query"}, ""),
        ({"__version__": {}}, ""),
    ],
)
def test_the_prefix_is_the_default_prompt(
    config: dict[str, Any], expected: str, tmp_path: Path
) -> None:
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps(config), "utf-8")
    assert checkpoint_prefix(tmp_path) == expected


def test_the_pooling_of_a_config_survives_a_round_trip() -> None:
    dims = dimensions_of(BERT | {"classifier_pooling": "mean"})
    assert dims.mean_pooling
    assert dimensions_of(config_of(dims)) == dims
    assert not dimensions_of(BERT | {"classifier_pooling": "cls"}).mean_pooling
