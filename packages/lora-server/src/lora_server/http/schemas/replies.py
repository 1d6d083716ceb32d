"""Replies, for the API's description: what a client may rely on. Nothing is checked against them.

Further fields may come; clients have to let them pass.
"""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict


class Reply(BaseModel):
    """The base of all replies."""

    model_config = ConfigDict(extra="allow")


class ErrorDetail(Reply):
    """What went wrong."""

    message: str
    type: str
    param: str | None
    code: str
    details: list[str] | None = None
    """All reasons, where there are several. Left out otherwise."""


class ErrorReply(Reply):
    """Every answer of a status from 400 on."""

    error: ErrorDetail


class AdapterState(Reply):
    """What is known of an adapter beyond what every model has."""

    digest: str
    rank: int
    residency: Literal["device", "host", "disk"]
    pinned: bool
    bytes: int


class ModelCard(Reply):
    """A card: the base model, or an adapter."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    root: str
    parent: str | None
    max_model_len: int


class AdapterCard(ModelCard):
    """An adapter's card."""

    lora: AdapterState


class ModelList(Reply):
    """Cards of everything that `model` may name."""

    object: Literal["list"]
    data: list[ModelCard]


class AdapterList(Reply):
    """Cards of the adapters."""

    object: Literal["list"]
    data: list[AdapterCard]


class DeletedReply(Reply):
    """An adapter's name is forgotten."""

    id: str
    object: Literal["model"]
    deleted: bool


class StatusReply(Reply):
    """Where the service is in its life."""

    status: Literal["starting", "ready", "draining"]


class VersionReply(Reply):
    """The server's version."""

    version: str


class Usage(Reply):
    """Tokens read and generated."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int


class _GenerationReply(Reply):
    id: str
    created: int
    model: str
    system_fingerprint: str
    usage: Usage


class CompletionChoice(Reply):
    """One continuation."""

    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None


class CompletionReply(_GenerationReply):
    """Reply of `/v1/completions`."""

    object: Literal["text_completion"]
    choices: list[CompletionChoice]


class AnswerMessage(Reply):
    """What the assistant says."""

    role: Literal["assistant"]
    content: str
    refusal: None


class ChatChoice(Reply):
    """One answer."""

    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: Literal["stop", "length"]
    stop_reason: str | int | None


class ChatReply(_GenerationReply):
    """Reply of `/v1/chat/completions`."""

    object: Literal["chat.completion"]
    choices: list[ChatChoice]


class _PoolingReply(Reply):
    id: str
    model: str
    usage: Usage


class Embedding(Reply):
    """The vector of one text; a text in base64 where that was asked for."""

    object: Literal["embedding"]
    index: int
    embedding: list[float] | str


class EmbeddingReply(_PoolingReply):
    """Reply of `/v1/embeddings`."""

    object: Literal["list"]
    data: list[Embedding]


class Classification(Reply):
    """The label of one text."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassifyReply(_PoolingReply):
    """Reply of `/classify`."""

    object: Literal["list"]
    data: list[Classification]


class PooledText(Reply):
    """What the model says of one text: an embedding, one row of labels, or one row a token."""

    object: Literal["pooling"]
    index: int
    data: list[Any] | str


class PoolReply(_PoolingReply):
    """Reply of `/pooling`."""

    object: Literal["list"]
    data: list[PooledText]


class Score(Reply):
    """The score of one pair."""

    object: Literal["score"]
    index: int
    score: float


class ScoreReply(_PoolingReply):
    """Reply of `/score`."""

    object: Literal["list"]
    data: list[Score]


class RankedDocument(Reply):
    """One document and how well it answers."""

    index: int
    relevance_score: float
    document: dict[str, str] | None = None


class RerankReply(_PoolingReply):
    """Reply of `/rerank`."""

    results: list[RankedDocument]
