"""Prediction with the API of Hugging Face text-embeddings-inference (TEI)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, TypedDict

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import Response

from services.api.deps import Alias, ContextDep
from services.api.fast_route import PREDICT_SCOPE, FastRoute
from services.api.openapi import problems
from services.api.prediction import (
    RESPONSE_HEADERS,
    Usage,
    count_usage,
    predict_texts,
    prediction_response,
    select_heads,
)
from services.api.serving.prediction import Prediction, Score
from services.api.text_inputs import ChatInput, PairInput, TextInput, to_text
from services.shared.datasets.text import Pair, Text
from services.shared.jobs.db.model_queries import DEFAULT_ALIAS

router = APIRouter(
    tags=["predict"],
    route_class=FastRoute,
    dependencies=[PREDICT_SCOPE],
    responses=problems(400, 401, 403, 404, 413, 422, 429, 500, 503),
)


class PredictRequest(BaseModel):
    """TEI's request. A flat list is a batch here (for TEI `["a", "b"]` is one pair)."""

    model_config = ConfigDict(
        extra="forbid",
        strict=True,
        json_schema_extra={"examples": [{"inputs": ["房间很干净", "电池两天就坏了"]}]},
    )

    inputs: (
        TextInput
        | Annotated[
            list[TextInput | Annotated[list[str], Field(min_length=1, max_length=2)]],
            Field(
                min_length=1, fail_fast=True
            ),  # error messages for a thousand invalid items took 35 ms
        ]
    ) = Field(
        description="One text, a list of texts, or TEI's batch of lists of one text or of a pair. A text is a "
        "string, or what the model was trained on: a pair or a chat."
    )
    truncate: bool = Field(False, description="Truncate longer texts instead of rejecting them.")
    truncation_direction: Literal["Right"] = Field(
        "Right", description="The end at which texts are truncated."
    )
    raw_scores: bool = Field(False, description="Logits instead of probabilities.")
    top_k: Annotated[int, Field(ge=1, le=100_000)] | None = Field(
        None, description="Maximum number of labels per head."
    )
    threshold: Annotated[float, Field(ge=0, le=1)] | None = Field(
        None,
        description="The probability above which a multi-label head predicts a label, instead of the "
        "one calibrated for each label.",
    )
    heads: Annotated[list[str], Field(min_length=1, max_length=1000)] | None = Field(
        None, description="Heads to return; all by default."
    )
    detail: bool = Field(False, description="Include model, tokens and usage.")


class LabelScore(BaseModel):
    """One label and its probability (or logit)."""

    label: str
    score: float
    predicted: bool | None = Field(
        None, description="Multi-label heads only: whether the label is predicted."
    )


class HeadDetail(BaseModel):
    """The best label of a head and all scores."""

    label: str
    score: float
    scores: list[LabelScore]


class TextDetail(BaseModel):
    """The result for one text."""

    index: int
    heads: dict[str, HeadDetail]
    tokens: int
    truncated: bool


class PredictDetail(BaseModel):
    """The response with `detail`."""

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
            "headers": RESPONSE_HEADERS,
            "description": "One head: labels by score; several heads: a map by head; for a list of texts: a list.",
        }
    },
)
async def predict(
    body: PredictRequest, request: Request, context: ContextDep, alias: Alias = DEFAULT_ALIAS
) -> Response:
    texts = _texts(body.inputs)
    predictions = await predict_texts(
        texts,
        request=request,
        context=context,
        alias=alias,
        field="inputs",
        truncate=body.truncate,
        heads=body.heads,
    )
    if body.detail:
        return prediction_response(_detail(predictions, body), predictions)
    answers = [_by_head(prediction, body) for prediction in predictions]
    plain = [next(iter(a.values())) if len(a) == 1 else a for a in answers]
    return prediction_response(plain if isinstance(body.inputs, list) else plain[0], predictions)


def _texts(inputs: TextInput | Sequence[TextInput | list[str]]) -> list[Text]:
    if isinstance(inputs, str | PairInput | ChatInput):
        return [to_text(inputs)]
    return [_text(item) for item in inputs]


def _text(item: TextInput | list[str]) -> Text:
    if not isinstance(item, list):
        return to_text(item)
    return Pair(*item) if len(item) == 2 else item[0]


class _Scored(TypedDict, total=False):
    """A `LabelScore`; `predicted` is absent for a single-label head."""

    label: str
    score: float
    predicted: bool


def _by_head(prediction: Prediction, body: PredictRequest) -> dict[str, list[_Scored]]:
    return {
        name: [_scored(score, body) for score in prediction.scores[name][: body.top_k]]
        for name in select_heads(prediction.scores, body.heads)
    }


def _scored(score: Score, body: PredictRequest) -> _Scored:
    answer: _Scored = {
        "label": score.label,
        "score": score.logit if body.raw_scores else score.score,
    }
    if score.predicted is None:
        return answer
    threshold = body.threshold
    answer["predicted"] = score.predicted if threshold is None else score.score > threshold
    return answer


def _detail(predictions: Sequence[Prediction], body: PredictRequest) -> dict[str, object]:
    data = []
    for index, prediction in enumerate(predictions):
        heads = {
            name: {"label": scores[0]["label"], "score": scores[0]["score"], "scores": scores}
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
        "usage": count_usage(predictions),
    }
