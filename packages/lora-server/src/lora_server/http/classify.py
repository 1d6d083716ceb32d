"""`POST /classify`: the labels of texts, in vLLM's shape; each adapter with labels of its own."""

from __future__ import annotations

from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from lora_server.engine.pooling_request import PoolingKind
from lora_server.errors import InvalidRequestError
from lora_server.http.activation import activate, given_labels
from lora_server.http.auth import UserRoute
from lora_server.http.describe import answers
from lora_server.http.pooling_prepare import (
    PoolingCall,
    encode_input,
    start_call,
    usage_of,
    wants_activation,
)
from lora_server.http.pooling_reply import json_reply
from lora_server.http.schemas import replies
from lora_server.http.schemas.pooling import ClassifyBody
from lora_server.http.streaming import reply_while_connected
from lora_server.model.labels import LabelSet, ProblemType

router = APIRouter(route_class=UserRoute)


@router.post("/classify", **answers(replies.ClassifyReply))
async def create_classification(body: ClassifyBody, request: Request) -> Response:
    """Classify one or several texts."""
    call = start_call(request, body)
    labels = labels_of(call)
    if call.pooling.is_per_token:
        raise InvalidRequestError("this server's head answers for each token: use /pooling")
    return await reply_while_connected(request, _reply(call, body, labels))


def labels_of(call: PoolingCall) -> LabelSet:
    """Return the labels of what answers.

    Raises:
        InvalidRequestError: neither the adapter nor the base has a trained head.
    """
    labels = call.pooling.labels(call.selection.adapters)
    if labels is not None:
        return labels
    if call.pooling.head is None:
        what = f"the server runs --task {call.pooling.task}, which loads no classification head"
    else:
        what = (
            f"{call.selection.label} has no trained classification head: name an adapter that "
            "brings one"
        )
    raise InvalidRequestError(what, param="model")


async def _reply(call: PoolingCall, body: ClassifyBody, labels: LabelSet) -> Response:
    texts = await encode_input(call, body.input)
    values = await call.run(texts, PoolingKind.LOGITS)
    data = [
        {"index": index, **_describe(logits[0], labels, is_active=wants_activation(body))}
        for index, logits in enumerate(values)
    ]
    head = call.head("list", "classify")
    return json_reply({**head, "data": data, "usage": usage_of(texts)})


def _describe(logits: np.ndarray, labels: LabelSet, *, is_active: bool) -> dict[str, Any]:
    """Return what is told of one text's logits `[labels]`."""
    values = activate(logits, labels) if is_active else logits.astype(np.float64)
    found: dict[str, Any] = {
        "label": labels.names[int(values.argmax())],
        "probs": values.tolist(),
        "num_classes": len(labels),
    }
    if labels.problem_type is ProblemType.MULTI_LABEL and is_active:
        found["labels"] = given_labels(values, labels)
    return found
