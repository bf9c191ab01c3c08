"""The files by which sentence-transformers loads an artifact's backbone with the pooling that was trained."""

from __future__ import annotations

import json
from pathlib import Path

from services.shared.files.atomic_write import write_text
from services.shared.jobs.run_directory import write_json
from services.shared.memory.architecture.pooling import (
    MODULES_FILE,
    POOLING_DIR,
    PROMPTS_FILE,
    Pooling,
)

_PROMPT = "classification"  # the name of the prefix among the prompts


def write_sentence_transformers_files(
    directory: Path, *, pooling: Pooling, prefix: str, max_length: int | None
) -> None:
    """Write modules.json, the pooling, the prompts and the length; nothing without a config.json."""
    config = directory / "config.json"
    if not config.is_file():
        return
    width = json.loads(config.read_text("utf-8")).get("hidden_size")
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": POOLING_DIR,
            "type": "sentence_transformers.models.Pooling",
        },
    ]
    write_text(directory / MODULES_FILE, json.dumps(modules, indent=1) + "\n")
    (directory / POOLING_DIR).mkdir(exist_ok=True)
    pooling_config = {
        "word_embedding_dimension": width,
        "pooling_mode_cls_token": pooling is Pooling.FIRST,
        "pooling_mode_mean_tokens": pooling is Pooling.MEAN,
        "pooling_mode_lasttoken": pooling is Pooling.LAST,
        "include_prompt": True,
    }
    write_json(directory / POOLING_DIR / "config.json", pooling_config)
    prompts = {"prompts": {_PROMPT: prefix}, "default_prompt_name": _PROMPT} if prefix else {}
    write_json(directory / PROMPTS_FILE, {"model_type": "SentenceTransformer", **prompts})
    length = {} if max_length is None else {"max_seq_length": max_length}
    write_json(directory / "sentence_bert_config.json", {**length, "do_lower_case": False})
