"""Prediction, in the shapes of text-embeddings-inference (`/predict`) and vLLM (`/v1/classify`)."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse

from services.api.body import screen_json
from services.api.deps import Alias, Parts, PartsDep, Student
from services.api.errors import FieldError, ProblemError, invalid
from services.api.keys import Scope, requires
from services.api.openapi import problems
from services.api.serving.errors import NoStudent, TextTooLong, UnusableText
from services.api.serving.prediction import Prediction, Score
from services.shared.jobs.model_rows import DEFAULT_ALIAS

router = APIRouter(
    tags=["predict"],
    dependencies=[Depends(requires(Scope.PREDICT)), Depends(screen_json)],
    responses=problems(400, 401, 403, 404, 413, 422, 429, 500, 503),
)

_HEADERS = {
    "X-Model-Version": {"schema": {"type": "string"}, "description": "The model that answered."},
    "Server-Timing": {"schema": {"type": "string"}, "description": "Milliseconds a stage."},
}


class PredictRequest(BaseModel):
    """TEI's request. A flat list is a batch here (for TEI `["a", "b"]` is one pair)."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"inputs": ["房间很干净", "电池两天就坏了"]}]},
    )

    inputs: (
        str
        | Annotated[
            list[str | Annotated[list[str], Field(min_length=1, max_length=1)]], Field(min_length=1)
        ]
    ) = Field(description="One text, a list of texts, or TEI's batch of one-element lists.")
    truncate: bool = Field(False, description="Cut longer texts instead of refusing them.")
    truncation_direction: Literal["Right"] = Field("Right", description="The end that is cut.")
    raw_scores: bool = Field(False, description="Logits instead of probabilities.")
    top_k: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        None, description="Most labels a head."
    )
    heads: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = Field(
        None, description="Heads to answer for; all if left out."
    )
    detail: bool = Field(False, description="Answer with model, tokens and usage.")


class LabelScore(BaseModel):
    """One label and its probability (or logit)."""

    label: str
    score: float


class HeadDetail(BaseModel):
    """The best label of a head and all scores."""

    label: str
    score: float
    scores: list[LabelScore]


class TextDetail(BaseModel):
    """The answer for one text."""

    index: int
    heads: dict[str, HeadDetail]
    tokens: int
    truncated: bool


class Usage(BaseModel):
    """Tokens read."""

    prompt_tokens: int
    total_tokens: int


class PredictDetail(BaseModel):
    """The answer with `detail`."""

    model: str
    version: str
    data: list[TextDetail]
    usage: Usage


Ranked = list[LabelScore]
PredictAnswer = Ranked | dict[str, Ranked] | list[Ranked] | list[dict[str, Ranked]] | PredictDetail


@router.post(
    "/predict",
    operation_id="predict",
    summary="Classify texts with the promoted student",
    responses={
        200: {
            "model": PredictAnswer,
            "headers": _HEADERS,
            "description": "One head: labels by score; several: a map by head; a list for a list.",
        }
    },
)
async def predict(
    body: PredictRequest, parts: PartsDep, alias: Alias = DEFAULT_ALIAS
) -> JSONResponse:
    texts = _texts(body.inputs)
    predictions = await _classify(
        texts, parts=parts, alias=alias, field="inputs", truncate=body.truncate, heads=body.heads
    )
    if body.detail:
        return _answer(_detail(predictions, body), predictions)
    answers = [_by_head(prediction, body) for prediction in predictions]
    plain = [next(iter(a.values())) if len(a) == 1 else a for a in answers]
    return _answer(plain[0] if isinstance(body.inputs, str) else plain, predictions)


class ClassifyRequest(BaseModel):
    """The request of vLLM and SGLang."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"examples": [{"input": ["房间很干净"]}]}
    )

    model: Annotated[str, Field(max_length=200)] | None = Field(
        None, description="Name, version or alias of the model that serves; checked if given."
    )
    input: str | Annotated[list[str], Field(min_length=1)]
    truncate_prompt_tokens: Literal[-1] | None = Field(
        None, description="-1 cuts longer texts to the model's length."
    )


class ClassifyHead(BaseModel):
    """One head's answer; `probs` is in the order of `labels`."""

    label: str
    probs: list[float]
    labels: list[str]
    num_classes: int


class ClassifyText(BaseModel):
    """One text's answer. The plain fields are the first head's; `heads` has them all (ours)."""

    index: int
    label: str
    probs: list[float]
    num_classes: int
    heads: dict[str, ClassifyHead] | None = None


class ClassifyAnswer(BaseModel):
    """The response of vLLM; `heads` appears where the student has several."""

    id: str
    object: Literal["list"]
    created: int
    model: str
    data: list[ClassifyText]
    usage: Usage


@router.post(
    "/v1/classify",
    operation_id="classify",
    summary="Classify texts (vLLM and SGLang shape)",
    responses={200: {"model": ClassifyAnswer, "headers": _HEADERS}},
)
async def classify(
    body: ClassifyRequest, parts: PartsDep, alias: Alias = DEFAULT_ALIAS
) -> JSONResponse:
    student = await _student(parts, alias)
    if body.model not in (None, alias, student.name, student.version):
        raise ProblemError("not-found", f"The model {body.model!r} does not serve here now.")
    predictions = await _classify(
        _texts(body.input),
        parts=parts,
        alias=alias,
        field="input",
        truncate=body.truncate_prompt_tokens is not None,
    )
    content = {
        "id": f"classify-{secrets.token_hex(12)}",
        "object": "list",
        "created": int(time.time()),
        "model": predictions[0].model,
        "data": [_classified(index, p) for index, p in enumerate(predictions)],
        "usage": _usage(predictions),
    }
    return _answer(content, predictions)


def _texts(inputs: str | Sequence[str | list[str]]) -> list[str]:
    if isinstance(inputs, str):
        return [inputs]
    return [text if isinstance(text, str) else text[0] for text in inputs]


async def _classify(
    texts: list[str],
    *,
    parts: Parts,
    alias: str,
    field: str,
    truncate: bool,
    heads: list[str] | None = None,
) -> Sequence[Prediction]:
    most = parts.settings.predict_most_texts
    if len(texts) > most:
        raise ProblemError("too-large", f"{len(texts)} texts; one request may have {most}.")
    student = await _student(parts, alias)
    _chosen((head.name for head in student.heads), heads)
    try:
        predictions = await parts.predictor.predict(texts, truncate=truncate, alias=alias)
    except (TextTooLong, UnusableText) as error:
        raise _refused(error, field=field) from error
    # A swap between the two calls may have brought another student.
    _chosen(predictions[0].scores, heads)
    return predictions


def _refused(error: TextTooLong | UnusableText, *, field: str) -> ProblemError:
    slug = "text-too-long" if isinstance(error, TextTooLong) else "unusable-text"
    place = FieldError(field=f"{field}.{error.index}", message=str(error))
    return ProblemError(slug, str(error), errors=[place])


async def _student(parts: Parts, alias: str) -> Student:
    student = parts.predictor.active(alias)
    if student is not None:
        return student
    if alias != DEFAULT_ALIAS and await run_in_threadpool(parts.store.active, alias) is None:
        raise ProblemError("not-found", f"No model has ever been promoted to {alias!r}.")
    raise NoStudent(alias)


def _chosen(available: Iterable[str], wanted: list[str] | None) -> list[str]:
    names = list(available)
    for index, name in enumerate(wanted or ()):
        if name not in names:
            raise invalid(
                f"heads.{index}", f"The model has no head {name[:80]!r}; it has {', '.join(names)}."
            )
    return names if wanted is None else wanted


def _by_head(prediction: Prediction, body: PredictRequest) -> dict[str, list[dict[str, Any]]]:
    return {
        name: [
            _scored(score, raw=body.raw_scores) for score in prediction.scores[name][: body.top_k]
        ]
        for name in _chosen(prediction.scores, body.heads)
    }


def _scored(score: Score, *, raw: bool) -> dict[str, Any]:
    return {"label": score.label, "score": score.logit if raw else score.score}


def _detail(predictions: Sequence[Prediction], body: PredictRequest) -> dict[str, Any]:
    data = []
    for index, prediction in enumerate(predictions):
        heads = {
            name: {**scores[0], "scores": scores}
            for name, scores in _by_head(prediction, body).items()
        }
        data.append(
            {
                "index": index,
                "heads": heads,
                "tokens": prediction.tokens,
                "truncated": prediction.truncated,
            }
        )
    first = predictions[0]
    return {
        "model": first.model,
        "version": first.version,
        "data": data,
        "usage": _usage(predictions),
    }


def _classified(index: int, prediction: Prediction) -> dict[str, Any]:
    heads = {name: _classified_head(scores) for name, scores in prediction.scores.items()}
    first = next(iter(heads.values()))
    answer = {"index": index, **{k: first[k] for k in ("label", "probs", "num_classes")}}
    return {**answer, "heads": heads} if len(heads) > 1 else answer


def _classified_head(scores: list[Score]) -> dict[str, Any]:
    in_order = sorted(scores, key=lambda score: score.label)  # labels are sorted: class order
    return {
        "label": scores[0].label,
        "probs": [score.score for score in in_order],
        "labels": [score.label for score in in_order],
        "num_classes": len(scores),
    }


def _usage(predictions: Sequence[Prediction]) -> dict[str, int]:
    tokens = sum(prediction.tokens for prediction in predictions)
    return {"prompt_tokens": tokens, "total_tokens": tokens}


def _answer(content: Any, predictions: Sequence[Prediction]) -> JSONResponse:
    slowest = [max(p.timing[stage] for p in predictions) for stage in range(3)]
    stages = zip(("tokenise", "queue", "compute"), slowest, strict=True)
    headers = {
        "X-Model-Version": predictions[0].version,
        "Server-Timing": ", ".join(f"{name};dur={1000 * s:.2f}" for name, s in stages),
    }
    return JSONResponse(content, headers=headers)
