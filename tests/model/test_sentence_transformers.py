"""sentence-transformers, loading an artifact, gives the states that its heads were trained on: `make test-peers`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from services.shared.datasets.card import Head
from services.shared.memory.architecture.pooling import Pooling
from services.shared.model.artifact import load_classifier
from services.shared.model.classifier import wrap_backbone
from services.shared.model.tokens import encode, load_tokenizer, pad
from tests.model.conftest import TEXTS
from tests.model.test_artifact import export

if TYPE_CHECKING:
    from tests.model.conftest import MakeClassifier


@pytest.mark.peers
@pytest.mark.filterwarnings("ignore")  # the library's own
@pytest.mark.parametrize("prefix", ["", "query: "])
@pytest.mark.parametrize(
    ("kind", "pooling"),
    [
        ("bert", Pooling.FIRST),
        ("bert", Pooling.MEAN),
        ("xlm-roberta", Pooling.MEAN),
        ("modernbert", Pooling.MEAN),
        ("qwen3", Pooling.LAST),
        ("llama", Pooling.MEAN),
    ],
)
def test_embeddings_are_what_the_heads_read(
    kind: str,
    pooling: Pooling,
    prefix: str,
    tmp_path: Path,
    make_classifier: MakeClassifier,
    tokenizer_dir: Path,
    heads: list[Head],
) -> None:
    library = pytest.importorskip("sentence_transformers")
    classifier = wrap_backbone(make_classifier(kind).backbone, heads, pooling=pooling).eval()
    artifact = export(tmp_path / "model", classifier, tokenizer_dir, heads, prefix=prefix)
    embeddings = torch.tensor(
        library.SentenceTransformer(str(artifact), device="cpu").encode(TEXTS)
    )
    loaded, tokenizer = load_classifier(artifact), load_tokenizer(artifact)
    tokens, truncated = encode(TEXTS, tokenizer, max_length=16, prefix=prefix)
    assert any(truncated)
    with torch.no_grad():
        expected = loaded(*pad(tokens, tokenizer.pad_token_id))
        for head in heads:
            found = loaded.heads[head.name](embeddings)
            torch.testing.assert_close(found, expected[head.name], atol=1e-5, rtol=1e-5)
