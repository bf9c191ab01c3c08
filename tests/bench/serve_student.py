"""Serves an artifact through our API for the benchmarks.

    python serve_student.py ARTIFACT PORT [--null | --int8]

With --null the engine does not compute; with --int8 it uses the weights that the benchmark of the engines
quantized, whatever their gate says. There is no database and no broker: only prediction routes are used.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import uvicorn
from fastapi import FastAPI

from services.api.app import create_app
from services.api.auth.keys import Keys
from services.api.deps import AppContext
from services.api.sandboxes import create_sandboxes
from services.api.server import server_config
from services.api.serving.active_models import ActiveModel
from services.api.serving.encoder import TokenizerEncoder
from services.api.serving.prediction import FloatArray
from services.api.serving.predictor import Predictor
from services.api.serving.promotion import Promotion
from services.api.serving.settings import ServingSettings
from services.api.settings import ApiSettings
from services.api.telemetry import Metrics
from services.shared.datasets.card import Head
from services.shared.jobs.db.store import open_store

HEADS = [Head(name="h3", labels=["a", "b", "c"])]


class NullEngine:
    """Returns the same logits for every text."""

    kind = "null"
    runs_on_cpu = True

    def run(self, texts: Sequence[Sequence[int]], *, threads: int = 1) -> dict[str, FloatArray]:
        return {"h3": np.tile(np.array([0.1, 0.2, 0.3], np.float32), (len(texts), 1))}

    def computed_tokens(self, lengths: Sequence[int]) -> int:
        return sum(lengths)

    def close(self) -> None:
        """Do nothing."""


def main() -> None:
    """Serve until terminated."""
    parser = argparse.ArgumentParser()
    parser.add_argument("artifact", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("--null", action="store_true")
    parser.add_argument("--int8", action="store_true")
    options = parser.parse_args()
    promotions = [Promotion("prm_1", "default", "mdl_1", "bench", "mdl_1", options.artifact)]
    metrics = Metrics()
    predictor = Predictor(
        ServingSettings(),
        promotions=list if options.null or options.int8 else lambda: promotions,
        registry=metrics.registry,
    )
    if options.null:
        predictor.active_models.swap("default", _null_student(options.artifact))
    if options.int8:
        predictor.active_models.swap("default", _int8_student(options.artifact, predictor.settings))
    unused: Any = None
    settings = ApiSettings(
        database_url="postgresql+psycopg://nobody@127.0.0.1:1/nothing",
        broker_url="redis://127.0.0.1:1/0",
        data_dir=Path(tempfile.gettempdir()),
        port=options.port,
    )
    context = AppContext(
        settings=settings,
        store=open_store(settings),
        send=unused,
        predictor=predictor,
        admission=unused,
        keys=Keys({}),
        metrics=metrics,
        sandboxes=create_sandboxes(settings),
    )

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        predictor.start()
        yield
        await predictor.stop()

    app = create_app(context, lifespan=lifespan)
    uvicorn.Server(server_config(app, settings)).run()


def _null_student(artifact: Path) -> ActiveModel:
    tokenizer = (artifact / "tokenizer.json").read_text()
    encoder = TokenizerEncoder(tokenizer, max_length=256)
    return ActiveModel("null", "null", "null", HEADS, 256, encoder, NullEngine())


def _int8_student(artifact: Path, settings: ServingSettings) -> ActiveModel:
    # Imported here, because the server of the tests needs no torch.
    from services.api.serving.engines.engine import warm_up
    from services.shared.model.artifact import load_classifier
    from tests.bench.engines import int8_engine
    from tests.bench.synthetic import DTYPE, MAX_LENGTH
    from tests.bench.synthetic import HEADS as heads

    plain = load_classifier(artifact, dtype=DTYPE)
    engine = int8_engine(artifact, plain, compiles=True)
    del plain
    warm_up(
        engine,
        batch_tokens=settings.batch_tokens,
        max_length=MAX_LENGTH,
        threads=settings.threads,
    )
    encoder = TokenizerEncoder((artifact / "tokenizer.json").read_text(), max_length=MAX_LENGTH)
    return ActiveModel("bench", "int8", "mdl_1", heads, MAX_LENGTH, encoder, engine)


if __name__ == "__main__":
    main()
