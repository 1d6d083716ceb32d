"""`POST /v1/embeddings`: texts to vectors, as the OpenAI API has it."""

from __future__ import annotations

import numpy as np
from fastapi import APIRouter, Request, Response

from lora_server.engine.pooling_request import PoolingKind
from lora_server.errors import InvalidRequestError
from lora_server.http.auth import UserRoute
from lora_server.http.describe import answers
from lora_server.http.pooling_prepare import PoolingCall, encode_input, start_call, usage_of
from lora_server.http.pooling_reply import json_reply, write_vector
from lora_server.http.schemas import replies
from lora_server.http.schemas.pooling import EmbeddingBody
from lora_server.http.streaming import reply_while_connected

router = APIRouter(route_class=UserRoute)


@router.post("/v1/embeddings", **answers(replies.EmbeddingReply))
async def create_embeddings(body: EmbeddingBody, request: Request) -> Response:
    """Embed one or several texts."""
    call = start_call(request, body)
    length = call.pooling.embedding_length
    if body.dimensions is not None and body.dimensions > length:
        raise InvalidRequestError(
            f"dimensions is {body.dimensions}, and an embedding of this model has {length}",
            param="dimensions",
        )
    return await reply_while_connected(request, _reply(call, body))


async def _reply(call: PoolingCall, body: EmbeddingBody) -> Response:
    texts = await encode_input(call, body.input)
    values = await call.run(texts, PoolingKind.EMBED)
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": write_vector(_shortened(vector, body.dimensions), body.encoding_format),
        }
        for index, vector in enumerate(values)
    ]
    head = call.head("list", "embd")
    return json_reply({**head, "data": data, "usage": usage_of(texts)})


def _shortened(vector: np.ndarray, dimensions: int | None) -> np.ndarray:
    """Return the first numbers of an embedding, of the length that the whole one had."""
    if dimensions is None or dimensions == len(vector):
        return vector
    kept = vector[:dimensions]
    norm = np.linalg.norm(kept)
    return kept * (np.linalg.norm(vector) / norm) if norm > 0 else kept
