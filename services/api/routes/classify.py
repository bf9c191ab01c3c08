"""Prediction with the classification API of vLLM and SGLang."""

from __future__ import annotations

import secrets
import time
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
    active_student,
    count_usage,
    predict_texts,
    prediction_response,
)
from services.api.problems import ProblemError
from services.api.serving.prediction import Prediction, Score
from services.api.text_inputs import TextInput, to_text
from services.shared.jobs.db.model_queries import DEFAULT_ALIAS

router = APIRouter(
    tags=["predict"],
    route_class=FastRoute,
    dependencies=[PREDICT_SCOPE],
    responses=problems(400, 401, 403, 404, 413, 422, 429, 500, 503),
)


class ClassifyRequest(BaseModel):
    """The request of vLLM and SGLang."""

    model_config = ConfigDict(
        extra="forbid", strict=True, json_schema_extra={"examples": [{"input": ["房间很干净"]}]}
    )

    model: Annotated[str, Field(max_length=200)] | None = Field(
        None, description="Name, version or alias of the serving model; checked if given."
    )
    input: TextInput | Annotated[list[TextInput], Field(min_length=1, fail_fast=True)] = Field(
        description="One text or a list of texts; pairs and chats (our extension) as for /predict."
    )
    truncate_prompt_tokens: Literal[-1] | None = Field(
        None, description="-1 truncates longer texts to the model's maximum length."
    )


class ClassifyHead(BaseModel):
    """The result of one head; `probs` is in the order of `labels`.

    `predicted` (our extension) lists the labels that a multi-label head predicts, most likely first.
    """

    label: str
    probs: list[float]
    labels: list[str]
    num_classes: int
    predicted: list[str] | None = None


class ClassifyText(BaseModel):
    """The result for one text: the first head's fields, and all heads in `heads` (our extension)."""

    index: int
    label: str
    probs: list[float]
    num_classes: int
    predicted: list[str] | None = None
    heads: dict[str, ClassifyHead] | None = None


class ClassifyAnswer(BaseModel):
    """The response of vLLM; `heads` is present if the student has several."""

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
    responses={200: {"model": ClassifyAnswer, "headers": RESPONSE_HEADERS}},
)
async def classify(
    body: ClassifyRequest, request: Request, context: ContextDep, alias: Alias = DEFAULT_ALIAS
) -> Response:
    student = await active_student(context, alias, request=request)
    if body.model not in (None, alias, student.name, student.version):
        raise ProblemError("not-found", f"The model {body.model!r} is not being served.")
    predictions = await predict_texts(
        [to_text(item) for item in (body.input if isinstance(body.input, list) else [body.input])],
        request=request,
        context=context,
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
        "usage": count_usage(predictions),
    }
    return prediction_response(content, predictions)


class _HeadResult(TypedDict, total=False):
    """A `ClassifyHead`; `predicted` is absent for a single-label head."""

    label: str
    probs: list[float]
    labels: list[str]
    num_classes: int
    predicted: list[str]


def _classified(index: int, prediction: Prediction) -> dict[str, object]:
    heads = {name: _classified_head(scores) for name, scores in prediction.scores.items()}
    first = next(iter(heads.values()))
    plain = {"label", "probs", "num_classes", "predicted"}
    fields: dict[str, object] = {name: value for name, value in first.items() if name in plain}
    answer = {"index": index, **fields}
    return {**answer, "heads": heads} if len(heads) > 1 else answer


def _classified_head(scores: list[Score]) -> _HeadResult:
    in_order = sorted(scores, key=lambda score: score.label)  # labels are sorted: class order
    is_multi_label = scores[0].predicted is not None
    result: _HeadResult = {
        "label": scores[0].label,
        "probs": [score.score for score in in_order],
        "labels": [score.label for score in in_order],
        "num_classes": len(scores),
    }
    if is_multi_label:
        result["predicted"] = [score.label for score in scores if score.predicted]
    return result
