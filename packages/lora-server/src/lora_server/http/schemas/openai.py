"""Bodies of the generation routes: OpenAI's fields, vLLM's extensions, and the weighted set."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import Discriminator, Field, Tag, model_validator

from lora_server.http.schemas.strict import StrictBody

MAX_CHOICES: Final = 128
MAX_PROMPTS: Final = 2048
MAX_STOPS: Final = 16
MAX_LOGPROBS: Final = 20
_SEED_LIMIT: Final = 2**63
_FLOAT32_MAX: Final = 3.4e38
"""Scales are float32 in the operators."""

Finite = Annotated[float, Field(allow_inf_nan=False)]
StopText = Annotated[str, Field(min_length=1)]
TokenId = Annotated[int, Field(ge=0)]
TokenIds = Annotated[list[TokenId], Field(min_length=1)]


# The tags below stand in angle brackets, so that error paths can leave them out.


def _kind_of_list(value: Any) -> str | None:
    """Say what a list of prompts holds by its first item, so that errors speak of one form."""
    if not isinstance(value, list):
        return "<text>" if isinstance(value, str) else None
    if value and isinstance(value[0], str):
        return "<texts>"
    return "<many>" if value and isinstance(value[0], list) else "<tokens>"


Prompt = Annotated[
    Annotated[str, Tag("<text>")]
    | Annotated[list[str], Field(max_length=MAX_PROMPTS), Tag("<texts>")]
    | Annotated[TokenIds, Tag("<tokens>")]
    | Annotated[list[TokenIds], Field(max_length=MAX_PROMPTS), Tag("<many>")],
    Discriminator(
        _kind_of_list,
        custom_error_type="prompt_type",
        custom_error_message="must be a text, a list of texts, token ids, or a list of those",
    ),
]


def _kind_of_stop(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<texts>"


Stop = Annotated[
    Annotated[StopText, Tag("<text>")]
    | Annotated[list[StopText], Field(max_length=MAX_STOPS), Tag("<texts>")],
    Discriminator(_kind_of_stop),
]


class WeightedAdapter(StrictBody):
    """One member of the weighted set that answers a request."""

    name: Annotated[str, Field(min_length=1)]
    scale: Annotated[Finite, Field(ge=-_FLOAT32_MAX, le=_FLOAT32_MAX)] = 1.0


class StreamOptions(StrictBody):
    """What a stream contains besides the answer."""

    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {"include_obfuscation": (False,), "continuous_usage_stats": (False,)}
    )

    include_usage: bool | None = None


class GenerationBody(StrictBody):
    """Fields that chat and text completions share."""

    model: str | None = None
    lora: list[WeightedAdapter] | None = None
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=0)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] | None = None
    temperature: Annotated[Finite, Field(ge=0.0)] | None = None
    top_p: Annotated[Finite, Field(gt=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[Finite, Field(ge=0.0, le=1.0)] | None = None
    presence_penalty: Annotated[Finite, Field(ge=-2.0, le=2.0)] | None = None
    frequency_penalty: Annotated[Finite, Field(ge=-2.0, le=2.0)] | None = None
    repetition_penalty: Annotated[Finite, Field(gt=0.0)] | None = None
    logit_bias: dict[str, Annotated[Finite, Field(ge=-100.0, le=100.0)]] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] | None = None
    seed: Annotated[int, Field(ge=-_SEED_LIMIT, lt=_SEED_LIMIT)] | None = None
    stop: Stop | None = None
    include_stop_str_in_output: bool | None = None
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    add_special_tokens: bool | None = None
    return_token_ids: bool | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None

    @model_validator(mode="after")
    def check_stream_options(self) -> Self:
        """Refuse options of a stream that was not asked for."""
        if self.stream_options is not None and not self.stream:
            msg = "stream_options: only allowed with stream: true"
            raise ValueError(msg)
        return self


_HARMLESS: Final[dict[str, tuple[Any, ...]]] = {
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "priority": (0,),
}


class CompletionBody(GenerationBody):
    """Body of `POST /v1/completions`."""

    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {**_HARMLESS, "suffix": ("",)}
    )

    prompt: Prompt
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None


class TextPart(StrictBody):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


def _kind_of_content(value: Any) -> str:
    return "<text>" if isinstance(value, str) else "<parts>"


class ChatMessage(StrictBody):
    """One message of a conversation."""

    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {"tool_calls": ([],), "annotations": ([],)}
    )

    role: Literal["system", "developer", "user", "assistant"]
    content: (
        Annotated[
            Annotated[str, Tag("<text>")] | Annotated[list[TextPart], Tag("<parts>")],
            Discriminator(_kind_of_content),
        ]
        | None
    ) = None
    name: str | None = None

    @model_validator(mode="after")
    def check_content(self) -> Self:
        """Only the assistant may have said nothing."""
        if self.content is None and self.role != "assistant":
            msg = "content is missing"
            raise ValueError(msg)
        return self

    @property
    def text(self) -> str:
        """Return the content as one text; parts are joined by line breaks."""
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""


class ChatBody(GenerationBody):
    """Body of `POST /v1/chat/completions`."""

    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType(
        {
            **_HARMLESS,
            "echo": (False,),
            "function_call": ("none", "auto"),
            "functions": ([],),
            "modalities": (["text"],),
            "parallel_tool_calls": (True, False),
            "response_format": ({"type": "text"},),
            "service_tier": ("auto", "default"),
            "store": (False,),
            "tool_choice": ("none", "auto"),
            "tools": ([],),
        }
    )

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    add_generation_prompt: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def check_logprobs(self) -> Self:
        """Alternatives are part of the log-probabilities."""
        if self.top_logprobs is not None and not self.logprobs:
            msg = "top_logprobs: only allowed with logprobs: true"
            raise ValueError(msg)
        return self
