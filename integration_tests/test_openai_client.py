"""The official `openai` client drives the server as it drives any other."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Any

import openai
import pytest
from support.requests import PROMPT
from support.server import BASE_NAME
from transformers import AutoTokenizer

if TYPE_CHECKING:
    from collections.abc import Iterator

    from openai.types.chat import ChatCompletionMessageParam
    from support.fixture_types import StartServer
    from support.oracle import Choice
    from support.server import Server
    from support.worlds import World

KEY = "a key of the tests"
NUM_TOKENS = 16
GREEDY: dict[str, Any] = {"temperature": 0.0, "max_tokens": NUM_TOKENS}
IGNORE_EOS = {"ignore_eos": True}
MESSAGES: list[ChatCompletionMessageParam] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What is the question?"},
]


@pytest.fixture(scope="module")
def server(llama: World, start_server: StartServer) -> Iterator[Server]:
    flags = ["--api-key", KEY, "--max-loras", "4"]
    with start_server(llama, *llama.lora_modules(), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0) as made:
        yield made


class Expectation:
    """PEFT's greedy texts for one world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._tokenizer: Any = AutoTokenizer.from_pretrained(world.base)

    def chat(self, choice: Choice) -> str:
        return self.completion(choice, self.chat_prompt())

    def chat_prompt(self) -> tuple[int, ...]:
        rendered = self._tokenizer.apply_chat_template(
            MESSAGES, add_generation_prompt=True, tokenize=False
        )
        return self.encode(rendered)

    def completion(self, choice: Choice, prompt: tuple[int, ...]) -> str:
        answer = self._world.oracle.greedy(choice, prompt, NUM_TOKENS)
        text: str = self._tokenizer.decode(answer.token_ids, skip_special_tokens=True)
        return text

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self._tokenizer(text, add_special_tokens=False)["input_ids"])


@pytest.fixture(scope="module")
def expectation(llama: World) -> Expectation:
    return Expectation(llama)


@pytest.mark.parametrize("adapter", [None, "a05", "a11"])
def test_chat_answers_as_peft_does(
    adapter: str | None, client: openai.OpenAI, expectation: Expectation
) -> None:
    model = adapter or BASE_NAME

    reply = client.chat.completions.create(
        model=model, messages=MESSAGES, temperature=0, max_tokens=NUM_TOKENS, extra_body=IGNORE_EOS
    )

    assert reply.model == model
    assert reply.object == "chat.completion"
    assert reply.choices[0].message.role == "assistant"
    assert reply.choices[0].message.content == expectation.chat(adapter)
    assert reply.choices[0].finish_reason == "length"
    assert reply.usage is not None
    assert reply.usage.completion_tokens == NUM_TOKENS
    assert reply.usage.total_tokens == reply.usage.prompt_tokens + NUM_TOKENS


def test_a_streamed_chat_adds_up_to_the_whole_one(
    client: openai.OpenAI, expectation: Expectation
) -> None:
    stream = client.chat.completions.create(
        model="a05",
        messages=MESSAGES,
        temperature=0,
        max_tokens=NUM_TOKENS,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=IGNORE_EOS,
    )
    chunks = list(stream)

    pieces = [choice.delta.content or "" for chunk in chunks for choice in chunk.choices]
    endings = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert "".join(pieces) == expectation.chat("a05")
    assert sum(1 for piece in pieces if piece) > 3
    assert [reason for reason in endings if reason is not None] == ["length"]
    assert endings[-1] == "length"
    assert {chunk.model for chunk in chunks} == {"a05"}
    assert len({chunk.id for chunk in chunks}) == 1
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == NUM_TOKENS


def test_completions_answer_text_lists_and_tokens(
    client: openai.OpenAI, expectation: Expectation
) -> None:
    texts = ["the answer", "héllo, wörld"]

    one = client.completions.create(model="a13", prompt=texts[0], **GREEDY, extra_body=IGNORE_EOS)
    many = client.completions.create(model="a13", prompt=texts, **GREEDY, extra_body=IGNORE_EOS)
    tokens = client.completions.create(
        model="a13", prompt=list(PROMPT), **GREEDY, extra_body=IGNORE_EOS
    )

    expected = [expectation.completion("a13", expectation.encode(text)) for text in texts]
    assert one.choices[0].text == expected[0]
    assert [choice.text for choice in many.choices] == expected
    assert tokens.choices[0].text == expectation.completion("a13", PROMPT)


def test_a_streamed_completion_adds_up_to_the_whole_one(
    client: openai.OpenAI, expectation: Expectation
) -> None:
    stream = client.completions.create(
        model="a03", prompt=list(PROMPT), stream=True, **GREEDY, extra_body=IGNORE_EOS
    )

    text = "".join(choice.text for chunk in stream for choice in chunk.choices)

    assert text == expectation.completion("a03", PROMPT)


def test_logprobs_of_chat_are_those_of_peft(
    client: openai.OpenAI, llama: World, expectation: Expectation
) -> None:
    reply = client.chat.completions.create(
        model="a14",
        messages=MESSAGES,
        temperature=0,
        max_tokens=NUM_TOKENS,
        logprobs=True,
        top_logprobs=3,
        extra_body={**IGNORE_EOS, "return_token_ids": True},
    )

    content = reply.choices[0].logprobs
    assert content is not None
    assert content.content is not None
    expected = llama.oracle.greedy("a14", expectation.chat_prompt(), NUM_TOKENS)
    assert [entry.logprob for entry in content.content] == pytest.approx(
        expected.logprobs, abs=1e-4
    )
    for entry, values in zip(content.content, expected.top, strict=True):
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(values[:3], abs=1e-4)


def test_the_models_list_has_the_base_first_and_every_adapter(
    client: openai.OpenAI, llama: World
) -> None:
    cards = list(client.models.list())

    assert [card.id for card in cards] == [BASE_NAME, *llama.adapters]
    assert {card.object for card in cards} == {"model"}
    assert client.models.retrieve("a05").id == "a05"


def test_n_answers_under_a_seed_are_different_and_come_back_the_same(
    client: openai.OpenAI,
) -> None:
    def ask(seed: int) -> list[str]:
        reply = client.completions.create(
            model="a02", prompt="the", n=4, seed=seed, temperature=1, max_tokens=NUM_TOKENS
        )
        return [choice.text for choice in reply.choices]

    first, second, other = ask(7), ask(7), ask(8)

    assert first == second
    assert first != other
    assert len(set(first)) == 4


def test_a_stop_string_ends_the_answer_before_it(
    client: openai.OpenAI, expectation: Expectation
) -> None:
    whole = expectation.completion("a00", PROMPT)
    stop = whole[4:6]

    reply = client.completions.create(
        model="a00", prompt=list(PROMPT), stop=stop, **GREEDY, extra_body=IGNORE_EOS
    )

    assert reply.choices[0].text == whole[: whole.index(stop)]
    assert reply.choices[0].finish_reason == "stop"


def test_the_header_chooses_the_adapter_and_the_reply_names_it(
    client: openai.OpenAI, expectation: Expectation
) -> None:
    raw = client.completions.with_raw_response.create(
        model="",
        prompt=list(PROMPT),
        **GREEDY,
        extra_body=IGNORE_EOS,
        extra_headers={"X-Use-LoRA": "a09"},
    )

    assert raw.headers["X-LoRA-Adapter"].startswith("a09@")
    assert raw.parse().choices[0].text == expectation.completion("a09", PROMPT)


def test_many_clients_at_once_get_the_answers_of_their_adapters(
    server: Server, llama: World, expectation: Expectation
) -> None:
    names = [*llama.adapters, BASE_NAME]

    async def ask_all() -> list[str]:
        async with openai.AsyncOpenAI(
            base_url=f"{server.url}/v1", api_key=KEY, max_retries=0
        ) as client:
            calls = (
                client.completions.create(
                    model=name, prompt=list(PROMPT), **GREEDY, extra_body=IGNORE_EOS
                )
                for name in names
            )
            return [reply.choices[0].text for reply in await asyncio.gather(*calls)]

    texts = asyncio.run(ask_all())

    choices: list[Choice] = [*llama.adapters, None]
    assert texts == [expectation.completion(choice, PROMPT) for choice in choices]


def test_an_unknown_model_raises_not_found(client: openai.OpenAI) -> None:
    with pytest.raises(openai.NotFoundError) as caught:
        client.chat.completions.create(model="nobody", messages=MESSAGES)

    assert caught.value.code == "model_not_found"
    assert caught.value.param == "model"


def test_a_prompt_longer_than_the_context_raises_bad_request(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model=BASE_NAME, prompt=[5] * 300)

    assert caught.value.code == "context_length_exceeded"


def test_a_wrong_key_raises_authentication_error(server: Server) -> None:
    with (
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="wrong", max_retries=0) as client,
        pytest.raises(openai.AuthenticationError) as caught,
    ):
        client.models.list()

    assert caught.value.code == "invalid_api_key"


def test_nothing_can_be_loaded_without_a_root(client: openai.OpenAI, llama: World) -> None:
    with pytest.raises(openai.PermissionDeniedError) as caught:
        client.post(
            "/load_lora_adapter",
            cast_to=dict[str, object],
            body={"lora_name": "late", "lora_path": str(llama.adapters["a00"])},
        )

    assert caught.value.code == "runtime_loading_disabled"
