"""The real base model in bfloat16: a mixed batch answers as each adapter does alone.

Two answers agree when they are equal, or equal up to a tie: a place where the two tokens' logits
are the same number but for the last place of bfloat16. After that they are different texts.
"""

from __future__ import annotations

import asyncio
import math
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from support.server import Server, running
from transformers import AutoModelForCausalLM

from lora_server.model.demo import prepare_base

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

BASE = "base-model"
ADAPTERS = tuple(f"r{number}" for number in range(8))
STRENGTH = 0.15
"""What an adapter adds to each projection, relative to its output: the text stays text."""

NUM_TOKENS = 64
NUM_AGREEING = 30
"""Of 32."""

TIE = 0.125
"""One unit in the last place of bfloat16 between 16 and 32, where this model's logits lie."""

NOISE = 0.35
"""Log-probabilities of the same text differ by up to 0.25 between batches: with 30 layers rounded
to bfloat16, the order of one sum changes every logit a little. transformers' own two ways, the
whole text at once and token by token, choose the same token in 98 of 100 positions."""

NUM_NOTICED = 16
"""Of 32 answers by the base, which the same measure must tell from the adapters' answers. It is not
all of them: some texts part at a tie before the adapter shows."""

SUBJECTS = ("the sea", "a long winter", "bread", "the moon", "an old bridge", "trains", "a garden")
FORMS = (
    "Write a short story about {}.",
    "Explain {} to a child.",
    "List five facts about {}.",
    "Why do people like {}?",
    "Describe {} in one paragraph.",
)
PROMPTS = tuple(form.format(subject) for form in FORMS for subject in SUBJECTS)[:32]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("real")
    base = prepare_base()
    save_adapters(base, folder / "adapters")
    flags = ["--served-model-name", BASE, "--lora-dir", str(folder / "adapters"), "--port", "0"]
    with running(["serve", str(base), *flags], folder / "server.log") as real:
        yield real
        assert real.stop() == 0, real.log.read_text()


def save_adapters(base: Path, folder: Path) -> None:
    """Let PEFT make and save eight random rank-16 adapters on all seven projections."""
    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", task_type="CAUSAL_LM")
    with warnings.catch_warnings():
        # PEFT comments on the tied head, which no adapter here changes.
        warnings.simplefilter("ignore")
        model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config, ADAPTERS[0])
        for name in ADAPTERS[1:]:
            model.add_adapter(name, config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for module in model.modules():
            if isinstance(module, LoraLayer):
                fill(module, generator)
    model.save_pretrained(str(folder))


def fill(layer: LoraLayer, generator: torch.Generator) -> None:
    base_layer: Any = layer.get_base_layer()
    for name in ADAPTERS:
        a: Any = layer.lora_A[name]
        b: Any = layer.lora_B[name]
        rank, width = a.weight.shape
        std = STRENGTH * float(base_layer.weight.float().std()) * math.sqrt(width)
        std /= layer.scaling[name] * math.sqrt(rank)
        a.weight.copy_(torch.randn(a.weight.shape, generator=generator) / math.sqrt(width))
        b.weight.copy_(torch.randn(b.weight.shape, generator=generator) * std)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spoken:
    """A greedy answer."""

    token_ids: list[int]
    logprobs: list[float]
    gaps: list[float]
    """Distance to the second best token at each position."""


def ask(server: Server, questions: Sequence[tuple[str, str]]) -> list[Spoken]:
    """Ask all (model, prompt) at the same time."""

    async def ask_one(client: httpx.AsyncClient, model: str, prompt: str) -> Spoken:
        content = {"model": model, "messages": [{"role": "user", "content": prompt}]}
        greedy = {"temperature": 0, "max_tokens": NUM_TOKENS, "return_token_ids": True}
        scores = {"logprobs": True, "top_logprobs": 2}
        reply = await client.post("/v1/chat/completions", json={**content, **greedy, **scores})
        choice = reply.raise_for_status().json()["choices"][0]
        entries = choice["logprobs"]["content"]
        tops = [[top["logprob"] for top in entry["top_logprobs"]] for entry in entries]
        return Spoken(
            token_ids=choice["token_ids"],
            logprobs=[entry["logprob"] for entry in entries],
            gaps=[best - second for best, second in tops],
        )

    async def ask_all() -> list[Spoken]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            return await asyncio.gather(*(ask_one(client, *question) for question in questions))

    return asyncio.run(ask_all())


def verdict(one: Spoken, other: Spoken) -> str:
    """Say whether two answers are equal, part at a tie, or differ."""
    pairs = enumerate(zip(one.token_ids, other.token_ids, strict=False))
    end = next((i for i, (x, y) in pairs if x != y), NUM_TOKENS)
    logprobs = zip(one.logprobs[:end], other.logprobs[:end], strict=False)
    if any(abs(x - y) > NOISE for x, y in logprobs):
        return "different"
    if one.token_ids == other.token_ids:
        return "equal"
    is_inside = end < min(len(one.token_ids), len(other.token_ids))
    return "tie" if is_inside and min(one.gaps[end], other.gaps[end]) <= TIE else "different"


def test_a_mixed_batch_answers_as_each_adapter_alone(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    questions = [(ADAPTERS[i % len(ADAPTERS)], prompt) for i, prompt in enumerate(PROMPTS)]

    mixed = ask(server, questions)
    alone: dict[tuple[str, str], Spoken] = {}
    for adapter in ADAPTERS:  # one after the other: nothing but this adapter runs meanwhile
        own = [question for question in questions if question[0] == adapter]
        alone |= zip(own, ask(server, own), strict=True)
    plain = ask(server, [(BASE, prompt) for _, prompt in questions])

    verdicts = Counter(verdict(one, alone[q]) for one, q in zip(mixed, questions, strict=True))
    others = Counter(verdict(one, other) for one, other in zip(mixed, plain, strict=True))
    with capsys.disabled():
        sys.stdout.write(
            f"\nbfloat16, {len(PROMPTS)} prompts, mixed and alone: {verdicts['equal']} equal, "
            f"{verdicts['tie']} equal up to a tie, {verdicts['different']} different\n"
        )
    assert "running each alone" not in server.log.read_text()
    assert verdicts["equal"] + verdicts["tie"] >= NUM_AGREEING
    assert others["different"] >= NUM_NOTICED, others
