"""`POST /score` and `POST /rerank`: how well texts belong together, in vLLM's and Cohere's shapes.

What answers with one label scores pairs together (a cross-encoder). Without any head the score is
the cosine of the two embeddings.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fastapi import APIRouter, Request, Response

from lora_server.engine.pooling_request import PoolingKind
from lora_server.errors import InvalidRequestError
from lora_server.http.activation import activate
from lora_server.http.auth import UserRoute
from lora_server.http.describe import answers
from lora_server.http.pooling_prepare import PoolingCall, start_call, usage_of, wants_activation
from lora_server.http.pooling_reply import json_reply
from lora_server.http.pooling_text import EncodedText
from lora_server.http.schemas import replies
from lora_server.http.schemas.pooling import RerankBody, ScoreBody
from lora_server.http.streaming import reply_while_connected
from lora_server.model.labels import LabelSet

router = APIRouter(route_class=UserRoute)


@router.post("/score", **answers(replies.ScoreReply))
@router.post("/v1/score", **answers(replies.ScoreReply))
async def create_score(body: ScoreBody, request: Request) -> Response:
    """Score one text against several, or pairs in order."""
    call = start_call(request, body)
    labels = _scoring_labels(call)
    return await reply_while_connected(request, _score_reply(call, body, labels))


@router.post("/rerank", **answers(replies.RerankReply))
@router.post("/v1/rerank", **answers(replies.RerankReply))
@router.post("/v2/rerank", **answers(replies.RerankReply))
async def create_rerank(body: RerankBody, request: Request) -> Response:
    """Order documents by how well they answer a query."""
    call = start_call(request, body)
    labels = _scoring_labels(call)
    return await reply_while_connected(request, _rerank_reply(call, body, labels))


def _scoring_labels(call: PoolingCall) -> LabelSet | None:
    """Return the one label that scores; None where embeddings are compared.

    Raises:
        InvalidRequestError: what answers has a head that cannot score.
    """
    if call.pooling.is_per_token:
        raise InvalidRequestError("this server's head answers for each token and cannot score")
    labels = call.pooling.labels(call.selection.adapters)
    if labels is not None and len(labels) != 1:
        raise InvalidRequestError(
            f"{call.selection.label} has a head of {len(labels)} labels; a score needs one of 1",
            param="model",
        )
    return labels


async def _score_reply(call: PoolingCall, body: ScoreBody, labels: LabelSet | None) -> Response:
    pairs = _pairs(body)
    scores, texts = await _scores(call, pairs, labels, is_active=wants_activation(body))
    data = [{"index": i, "object": "score", "score": score} for i, score in enumerate(scores)]
    head = call.head("list", "score")
    return json_reply({**head, "data": data, "usage": usage_of(texts)})


async def _rerank_reply(call: PoolingCall, body: RerankBody, labels: LabelSet | None) -> Response:
    documents = [doc if isinstance(doc, str) else doc.text for doc in body.documents]
    limit = body.max_tokens_per_doc
    read = [call.pooling.text.cut_text(doc, limit) for doc in documents] if limit else documents
    pairs = [(body.query, doc) for doc in read]
    scores, texts = await _scores(call, pairs, labels, is_active=wants_activation(body))
    order = sorted(range(len(documents)), key=lambda i: (-scores[i], i))
    results: list[dict[str, Any]] = [
        {"index": i, "relevance_score": scores[i], "document": {"text": documents[i]}}
        for i in order[: body.top_n or None]
    ]
    if body.return_documents is False:
        for result in results:
            del result["document"]
    usage = usage_of(texts)
    head = {"id": f"rerank-{call.unique}", "model": call.selection.model}
    return json_reply({**head, "results": results, "usage": usage})


def _pairs(body: ScoreBody) -> list[tuple[str, str]]:
    """Return the pairs that two texts or lists of texts stand for."""
    first = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    second = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(first) == 1:
        first = first * len(second)
    if len(first) != len(second):
        raise InvalidRequestError(
            f"text_1 has {len(first)} texts and text_2 {len(second)}; expected one, or as many",
            param="text_1",
        )
    return list(zip(first, second, strict=True))


async def _scores(
    call: PoolingCall,
    pairs: Sequence[tuple[str, str]],
    labels: LabelSet | None,
    *,
    is_active: bool,
) -> tuple[list[float], list[EncodedText]]:
    """Return a score for each pair, and the texts that were read."""
    if labels is None:
        return await _cosines(call, pairs)
    texts = await call.encode(pairs)
    logits = np.concatenate(await call.run(texts, PoolingKind.LOGITS))
    values = activate(logits, labels) if is_active else logits.astype(np.float64)
    return values[:, 0].tolist(), texts


async def _cosines(
    call: PoolingCall, pairs: Sequence[tuple[str, str]]
) -> tuple[list[float], list[EncodedText]]:
    """Return the cosine of the embeddings of each pair; a text that occurs twice is read once."""
    unique = list(dict.fromkeys(text for pair in pairs for text in pair))
    texts = await call.encode([(text, None) for text in unique])
    values = await call.run(texts, PoolingKind.EMBED)
    vectors = {
        text: vector.astype(np.float64) / max(float(np.linalg.norm(vector)), 1e-12)
        for text, vector in zip(unique, values, strict=True)
    }
    return [float(vectors[first] @ vectors[second]) for first, second in pairs], texts
