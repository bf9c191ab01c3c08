"""Shapes: presets, configs and checkpoint headers, held against transformers on the meta device."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModel, PretrainedConfig

from services.shared.memory.architecture import shape
from services.shared.memory.architecture.dimensions import Family
from services.shared.memory.architecture.hf_config import config_of
from services.shared.memory.architecture.parameters import UnitKind
from services.shared.memory.architecture.shape import Shape
from services.shared.memory.errors import InvalidInput
from services.shared.memory.planning.layers import PLANNED_FAMILIES

_TINY = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 60_000,
}
_MOE = {"num_key_value_heads": 2, "num_experts_per_tok": 2}
_LATENT = {
    **_MOE,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "n_shared_experts": 2,
    "moe_intermediate_size": 32,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 24,
}

# At least one config for every family; several where a switch changes the tensors.
_CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("llama", {"num_key_value_heads": 2}),
    ("llama", {"num_key_value_heads": 2, "attention_bias": True, "mlp_bias": True}),
    ("mistral", {"num_key_value_heads": 2}),
    ("mistral", {"num_key_value_heads": 2, "head_dim": 32}),
    ("qwen2", {"num_key_value_heads": 2}),
    ("qwen3", {"num_key_value_heads": 2, "head_dim": 32}),
    ("qwen3", {"num_key_value_heads": 2}),
    ("qwen3", {"num_key_value_heads": 2, "attention_bias": True}),
    ("granite", {"num_key_value_heads": 2}),
    ("gemma", {"num_key_value_heads": 1, "head_dim": 32}),
    ("gemma2", {"num_key_value_heads": 2, "head_dim": 32}),
    ("gemma3_text", {"num_key_value_heads": 2, "head_dim": 32}),
    ("phi3", {"num_key_value_heads": 2, "pad_token_id": 0}),
    ("glm", {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}),
    ("glm4", {"num_key_value_heads": 2, "head_dim": 16, "pad_token_id": 0}),
    ("glm", {"num_key_value_heads": 2, "attention_bias": True, "pad_token_id": 0}),
    ("mixtral", {**_MOE, "num_local_experts": 4}),
    ("qwen3_moe", {**_MOE, "num_experts": 4, "moe_intermediate_size": 32, "head_dim": 32}),
    ("deepseek_v2", {**_LATENT, "q_lora_rank": None}),
    ("deepseek_v3", {**_LATENT, "q_lora_rank": 12}),
    ("gpt_oss", {**_MOE, "num_local_experts": 4, "head_dim": 16, "pad_token_id": 0}),
    ("bert", {}),
    ("roberta", {"max_position_embeddings": 130, "type_vocab_size": 1}),
    ("xlm-roberta", {"type_vocab_size": 1}),
    ("distilbert", {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4}),
    ("modernbert", {}),
    ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4}),
    ("gpt2", {"n_embd": 64, "n_layer": 3, "n_head": 4, "n_inner": 96}),
    ("gpt_neox", {}),
    ("gpt_bigcode", {"n_embd": 64, "n_layer": 3, "n_head": 4}),
    ("falcon", {"ffn_hidden_size": 96}),
    ("falcon", {"new_decoder_architecture": True, "num_kv_heads": 2, "ffn_hidden_size": 96}),
    ("falcon", {"multi_query": False, "parallel_attn": True, "ffn_hidden_size": 96}),
    ("bloom", {"n_layer": 3, "n_head": 4}),
    ("opt", {"ffn_dim": 96, "word_embed_proj_dim": 64}),
    ("t5", {"d_model": 64, "d_kv": 24, "d_ff": 96, "num_layers": 3, "num_heads": 4}),
    ("t5", {"d_model": 64, "d_kv": 24, "d_ff": 96, "num_layers": 3, "num_decoder_layers": 2,
            "num_heads": 4, "feed_forward_proj": "gated-gelu"}),
]  # fmt: skip


_Shapes = dict[str, tuple[int, ...]]


def _parameter_shapes(config: PretrainedConfig) -> _Shapes:
    with torch.device("meta"):
        model = AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    return {name: tuple(value.shape) for name, value in model.named_parameters()}


def _model_shapes(model_type: str, options: dict[str, Any]) -> tuple[dict[str, Any], _Shapes]:
    config = AutoConfig.for_model(model_type, **{**_TINY, **options})
    written = json.loads(config.to_json_string(use_diff=False))
    return written, _parameter_shapes(config)


def _our_shapes(model: Shape) -> _Shapes:
    ours: _Shapes = {}
    for unit in model.units:
        prefix = f"{unit.name}." if unit.kind is UnitKind.LAYER else ""
        ours |= {prefix + tensor.name: tensor.shape for tensor in unit.tensors}
    return ours


def test_every_family_is_compared_to_transformers() -> None:
    assert {name for name, _ in _CONFIGS} == {str(family) for family in Family}


@pytest.mark.parametrize(("model_type", "options"), _CONFIGS)
def test_every_tensor_has_the_name_and_shape_transformers_gives_it(
    model_type: str, options: dict[str, Any]
) -> None:
    config, theirs = _model_shapes(model_type, options)
    assert _our_shapes(shape.from_config(config)) == theirs


# Parameters of the published causal models (and of BERT without its pre-training heads) as counted
# on their Hugging Face pages.
_PUBLISHED = {
    "qwen3-0.6b": 596_049_920,
    "qwen3-8b": 8_190_735_360,
    "qwen3-32b": 32_762_123_264,
    "qwen2.5-7b": 7_615_616_512,
    "llama-2-7b": 6_738_415_616,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "mistral-7b": 7_241_732_096,
    "mixtral-8x7b": 46_702_792_704,
    "gemma-2-9b": 9_241_705_984,
    "t5-11b": 11_307_321_344,
    "deepseek-v3": 671_026_404_352,
    "bloom-176b": 176_247_271_424,
    "gpt2": 124_439_808,
    "bert-base-uncased": 109_482_240,
    "qwen3-embedding-0.6b": 595_776_512,
    "qwen3-embedding-4b": 4_021_774_336,
    "all-minilm-l6": 22_713_216,
    "bge-small-en": 33_360_000,
    "multilingual-e5-small": 117_653_760,
}


@pytest.mark.parametrize(("name", "count"), _PUBLISHED.items())
def test_a_preset_has_the_published_number_of_parameters(name: str, count: int) -> None:
    assert shape.from_preset(name).with_language_head().num_parameters == count


@pytest.mark.parametrize(
    ("spelling", "preset"),
    [
        ("Qwen/Qwen3-32B", "qwen3-32b"),
        ("QWEN3-32B", "qwen3-32b"),
        ("LLaMA-7B", "llama-7b"),
        ("llama3-8b", "llama-3-8b"),
        ("Vicuna-13B", "llama-13b"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", "llama-3-8b"),
        ("mistralai/Mistral-7B-Instruct-v0.3", "mistral-7b-v0.3"),
        ("facebook/opt-1.3b", "opt-1.3b"),
        ("OPT-13B", "opt-13b"),
        ("BAAI/bge-reranker-v2-m3", "bge-m3"),
        ("BAAI/bge-small-en-v1.5", "bge-small-en"),
        ("BAAI/bge-large-zh-v1.5", "chinese-roberta-wwm-ext-large"),
        ("Qwen/Qwen3-Embedding-4B", "qwen3-embedding-4b"),
        ("Qwen/Qwen3-Reranker-0.6B", "qwen3-embedding-0.6b"),
        ("intfloat/multilingual-e5-large-instruct", "xlm-roberta-large"),
        ("sentence-transformers/all-MiniLM-L6-v2", "all-minilm-l6"),
        ("Qwen/Qwen2.5-VL-7B-Instruct", "qwen2.5-7b"),
    ],
)
def test_a_published_name_is_understood(spelling: str, preset: str) -> None:
    assert shape.from_preset(spelling).name == preset


def test_no_two_presets_share_a_spelling() -> None:
    found = [shape.from_preset(name).name for name in shape.preset_names()]
    assert found == list(shape.preset_names())


@pytest.mark.parametrize(
    ("text", "preset"),
    [
        ("DeepSeek-Prover 7B (LLaMA shape)", "deepseek-llm-7b"),
        ("Falcon-7B (inferred from the number)", "falcon-7b"),
        ("we trained StarCoder 15B", "starcoder-15b"),
        ("Qwen1.5-72B GPTQ-Int4", "qwen1.5-72b"),
    ],
)
def test_a_model_is_found_in_free_text(text: str, preset: str) -> None:
    found = shape.find_preset(text)
    assert found is not None
    assert found.name == preset


@pytest.mark.parametrize("text", ["7B", "", "30B (45649), 8B (44473)", "a large model"])
def test_text_that_names_no_model_finds_none(text: str) -> None:
    assert shape.find_preset(text) is None


def test_heads_add_a_weight_and_a_bias_each() -> None:
    bare, headed = shape.from_preset("qwen3-0.6b"), shape.from_preset("qwen3-0.6b", heads=(3, 7))
    assert headed.num_parameters - bare.num_parameters == (3 + 7) * (1024 + 1)


def _qwen3_config(**changes: Any) -> dict[str, Any]:
    config = {**_TINY, "model_type": "qwen3", "num_key_value_heads": 2, "head_dim": 16} | changes
    return {key: value for key, value in config.items() if value is not None}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (_qwen3_config(num_key_value_heads=None), "num_key_value_heads"),
        (_qwen3_config(hidden_size=None, vocab_size=None), "hidden_size, vocab_size"),
        (_qwen3_config(model_type="mamba9"), "unknown architecture 'mamba9'; accepted: llama"),
        (_qwen3_config(model_type=None), "lacks model_type"),
        (_qwen3_config(num_hidden_layers=0), "num_hidden_layers: 0"),
        (_qwen3_config(num_hidden_layers="four"), "num_hidden_layers: 'four'"),
        (_qwen3_config(hidden_size=-64), "hidden_size: -64"),
        (_qwen3_config(hidden_size=10**12), "hidden_size: 1000000000000"),
        (_qwen3_config(num_key_value_heads=3), "num_key_value_heads: 3 do not divide 4"),
    ],
)
def test_a_bad_config_is_refused_by_the_name_of_its_key(config: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words.replace("(", r"\(")):
        shape.from_config(config)


def test_an_unknown_model_is_rejected_with_the_nearest_known_names() -> None:
    with pytest.raises(
        InvalidInput, match=r"'qwen9-8b' is neither.*accepted: .*qwen3-8b"
    ) as raised:
        shape.load("qwen9-8b")
    assert raised.value.accepted.count(", ") <= 6


def test_a_name_like_no_other_is_rejected_with_the_kinds_of_files() -> None:
    with pytest.raises(InvalidInput, match=r"known model; accepted: a directory, config\.json"):
        shape.load("#" * 10_000)


def test_a_missing_file_is_refused_by_name() -> None:
    with pytest.raises(InvalidInput, match=r"there is no file nowhere/config\.json"):
        shape.load("nowhere/config.json")


def _record_safetensors(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    header, end = {}, 0
    for name, dims in shapes.items():
        size = 2
        for length in dims:
            size *= length
        header[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def _record_model(folder: Path) -> Shape:
    config = _qwen3_config(vocab_size=128)
    (folder / "config.json").write_text(json.dumps(config))
    _record_safetensors(folder / "model.safetensors", {"model.embed_tokens.weight": (128, 64)})
    return shape.from_config(config, heads=(3,))


def test_a_directory_with_config_and_weights_is_read(tmp_path: Path) -> None:
    expected = _record_model(tmp_path)
    assert shape.from_pretrained_directory(tmp_path, heads=[3]).dims == expected.dims


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", ""])
def test_load_takes_a_directory_a_config_or_a_safetensors_file(tmp_path: Path, name: str) -> None:
    expected = _record_model(tmp_path)
    assert shape.load(tmp_path / name, heads=[3]).dims == expected.dims


def test_an_index_is_read_with_all_its_shards(tmp_path: Path) -> None:
    expected = _record_model(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "model-1-of-1.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(
        json.dumps({"weight_map": {"model.embed_tokens.weight": "model-1-of-1.safetensors"}})
    )
    assert shape.load(index).dims == expected.dims


def test_an_index_with_a_missing_shard_is_refused(tmp_path: Path) -> None:
    _record_model(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"embed": "model-2-of-2.safetensors"}}))
    with pytest.raises(InvalidInput, match=r"model-2-of-2\.safetensors, which is not in"):
        shape.load(tmp_path)


def test_a_directory_without_weights_is_refused(tmp_path: Path) -> None:
    _record_model(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(InvalidInput, match=r"has no weights; accepted: model.safetensors"):
        shape.from_pretrained_directory(tmp_path)


def test_a_directory_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"has no config.json"):
        shape.load(tmp_path)


@pytest.mark.parametrize("keep_bytes", [0, 5, 20, 200])
def test_a_truncated_safetensors_file_is_refused(tmp_path: Path, keep_bytes: int) -> None:
    _record_model(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep_bytes])
    with pytest.raises(
        InvalidInput, match=r"not a safetensors file, or truncated|is truncated: tensor"
    ):
        shape.load(tmp_path)


def test_weights_that_contradict_the_config_are_refused(tmp_path: Path) -> None:
    _record_model(tmp_path)
    _record_safetensors(tmp_path / "model.safetensors", {"embed_tokens.weight": (256, 64)})
    with pytest.raises(InvalidInput, match=r"shape \(256, 64\), the config says \(128, 64\)"):
        shape.load(tmp_path)


@pytest.mark.parametrize(
    "name",
    [n for n in shape.preset_names() if shape.from_preset(n).dims.family in PLANNED_FAMILIES],
)
def test_a_preset_written_as_a_config_has_its_tensors(name: str) -> None:
    preset = shape.from_preset(name)
    config = AutoConfig.for_model(**config_of(preset.dims))
    assert _parameter_shapes(config) == _our_shapes(preset)
