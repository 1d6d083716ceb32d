"""`POST /pooling`: what the model says of texts, in vLLM's shape: embeddings, or rows of labels."""

from __future__ import annotations

import numpy as np
from fastapi import APIRouter, Request, Response

from lora_server.config import Task
from lora_server.engine.pooling_request import PoolingKind
from lora_server.http.activation import activate
from lora_server.http.auth import UserRoute
from lora_server.http.classify import labels_of
from lora_server.http.describe import answers
from lora_server.http.pooling_prepare import (
    PoolingCall,
    encode_input,
    start_call,
    usage_of,
    wants_activation,
)
from lora_server.http.pooling_reply import json_reply, write_vector
from lora_server.http.schemas import replies
from lora_server.http.schemas.pooling import PoolBody
from lora_server.http.streaming import reply_while_connected
from lora_server.model.labels import LabelSet

router = APIRouter(route_class=UserRoute)


@router.post("/pooling", **answers(replies.PoolReply))
async def create_pooling(body: PoolBody, request: Request) -> Response:
    """Answer with embeddings, with the labels of texts, or with those of every token."""
    call = start_call(request, body)
    labels = None if call.pooling.task is Task.EMBED else labels_of(call)
    return await reply_while_connected(request, _reply(call, body, labels))


async def _reply(call: PoolingCall, body: PoolBody, labels: LabelSet | None) -> Response:
    texts = await encode_input(call, body.input)
    values = await call.run(texts, PoolingKind.EMBED if labels is None else PoolingKind.LOGITS)
    data = [
        {
            "index": index,
            "object": "pooling",
            "data": write_vector(_active(rows, call, body, labels), body.encoding_format),
        }
        for index, rows in enumerate(values)
    ]
    if labels is not None:
        for item, text in zip(data, texts, strict=True):
            item["labels"] = list(labels.names)
            if call.pooling.is_per_token:
                item["tokens"] = [call.pooling.text.token_text(token) for token in text.token_ids]
    head = call.head("list", "pool")
    return json_reply({**head, "data": data, "usage": usage_of(texts)})


def _active(
    rows: np.ndarray, call: PoolingCall, body: PoolBody, labels: LabelSet | None
) -> np.ndarray:
    """Return an embedding, one row of labels, or one row a token."""
    if labels is None:
        return rows
    values = activate(rows, labels) if wants_activation(body) else rows.astype(np.float64)
    return values if call.pooling.is_per_token else values[0]
