"""Bodies of the routes that classify, score, rerank and embed."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal

from pydantic import Discriminator, Field, Tag

from lora_server.http.schemas.openai import MAX_PROMPTS, Prompt, WeightedAdapter
from lora_server.http.schemas.strict import StrictBody

_HARMLESS: Final[Mapping[str, tuple[Any, ...]]] = MappingProxyType({"priority": (0,)})


class PoolingBody(StrictBody):
    """Fields that all pooling routes share."""

    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = _HARMLESS

    model: str | None = None
    lora: list[WeightedAdapter] | None = None
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Cut texts to so many tokens; -1 to the model's limit. Without it longer ones are refused."""
    add_special_tokens: bool | None = None
    user: str | None = None


class EmbeddingBody(PoolingBody):
    """Body of `POST /v1/embeddings`."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Field(ge=1)] | None = None


class ClassifyBody(PoolingBody):
    """Body of `POST /classify`."""

    input: Prompt
    use_activation: bool | None = None
    """False answers with the logits instead of probabilities."""
    activation: bool | None = None
    """vLLM's older name of `use_activation`."""


class PoolBody(ClassifyBody):
    """Body of `POST /pooling`."""

    encoding_format: Literal["float", "base64"] | None = None


def _kind_of_text(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<texts>"


Texts = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(min_length=1, max_length=MAX_PROMPTS), Tag("<texts>")],
    Discriminator(_kind_of_text),
]


class ScoreBody(PoolingBody):
    """Body of `POST /score`: one text against several, or pairs in order."""

    text_1: Texts
    text_2: Texts
    use_activation: bool | None = None
    activation: bool | None = None


class Document(StrictBody):
    """A document as Cohere and Jina write it when it is more than a text."""

    text: str


def _kind_of_document(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<document>"


class RerankBody(PoolingBody):
    """Body of `POST /rerank`, as Cohere, Jina and vLLM have it."""

    query: str
    documents: Annotated[
        list[
            Annotated[
                Annotated[str, Tag("<text>")] | Annotated[Document, Tag("<document>")],
                Discriminator(_kind_of_document),
            ]
        ],
        Field(min_length=1, max_length=MAX_PROMPTS),
    ]
    top_n: Annotated[int, Field(ge=0)] | None = None
    """Most results; 0 and null give all."""
    return_documents: bool | None = None
    """Whether results carry their document; they do unless this is false."""
    max_tokens_per_doc: Annotated[int, Field(ge=1)] | None = None
    """Cut documents to so many tokens, as Cohere's API does."""
    use_activation: bool | None = None
    activation: bool | None = None
