"""`POST /v1/completions`: text or tokens in, text out, every prompt with its own choices."""

from __future__ import annotations

from fastapi import APIRouter, Request, Response

from lora_server.errors import InvalidRequestError
from lora_server.http.auth import UserRoute
from lora_server.http.completion_reply import CompletionReply
from lora_server.http.context import context_of
from lora_server.http.describe import streams
from lora_server.http.generation import PreparedPrompt
from lora_server.http.prepare import charge_tokens, choose, encode, limits_of, service_of, start
from lora_server.http.sampling import build_sampling, check_token_ids
from lora_server.http.schemas import replies
from lora_server.http.schemas.openai import CompletionBody
from lora_server.http.service import Service
from lora_server.http.streaming import EventStream, reply_while_connected

router = APIRouter(route_class=UserRoute)


@router.post("/v1/completions", **streams(replies.CompletionReply))
async def create_completion(body: CompletionBody, request: Request) -> Response:
    """Continue one or several prompts."""
    selection = choose(request, body)
    service = service_of(request)
    prompts = await _prepare(service, body)
    head, generation = start(service, body, selection, prompts, id_prefix="cmpl")
    charge_tokens(request, generation.usage)
    reply = CompletionReply(service.text, body, head, generation)
    if body.stream:
        return EventStream(reply.chunks(), request_id=context_of(request).request_id)
    return await reply_while_connected(request, reply.whole())


async def _prepare(service: Service, body: CompletionBody) -> list[PreparedPrompt]:
    limits = limits_of(service)
    prompts: list[PreparedPrompt] = []
    for text, token_ids in await _tokenised(service, body):
        if not token_ids:
            raise InvalidRequestError("prompt: a prompt has no tokens", param="prompt")
        check_token_ids(token_ids, limits.vocab_size, param="prompt")
        sampling = build_sampling(body, num_prompt_tokens=len(token_ids), limits=limits)
        prompts.append(PreparedPrompt(token_ids=tuple(token_ids), sampling=sampling, text=text))
    if not prompts:
        raise InvalidRequestError("prompt: the list is empty", param="prompt")
    return prompts


async def _tokenised(service: Service, body: CompletionBody) -> list[tuple[str | None, list[int]]]:
    """Return (text, token ids) of each prompt."""
    texts, token_lists = _split(body.prompt)
    add = body.add_special_tokens is not False
    pairs: list[tuple[str | None, list[int]]] = [(None, ids) for ids in token_lists]
    pairs += [(text, await encode(service.text, text, add_special_tokens=add)) for text in texts]
    return pairs


def _split(
    prompt: str | list[str] | list[int] | list[list[int]],
) -> tuple[list[str], list[list[int]]]:
    """Sort the four forms of `prompt` into texts and lists of token ids; one of them is empty."""
    if isinstance(prompt, str):
        return [prompt], []
    texts = [item for item in prompt if isinstance(item, str)]
    token_lists = [item for item in prompt if isinstance(item, list)]
    token_ids = [item for item in prompt if isinstance(item, int)]
    return texts, [token_ids] if token_ids else token_lists
