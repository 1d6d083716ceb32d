"""The real base model in bfloat16: a mixed batch answers as each adapter does alone."""

from __future__ import annotations

import asyncio
import math
import sys
import warnings
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
STRENGTH = 0.05
"""What an adapter adds to each projection, relative to its output: the text stays text."""

NUM_TOKENS = 64
NUM_EQUAL = 30
"""Of 32: in bfloat16 two logits are often equal, and the sums behind them depend on the batch."""

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


def ask(server: Server, questions: Sequence[tuple[str, str]]) -> list[list[int]]:
    """Ask all (model, prompt) at the same time and return the answers' tokens."""

    async def ask_one(client: httpx.AsyncClient, model: str, prompt: str) -> list[int]:
        content = {"model": model, "messages": [{"role": "user", "content": prompt}]}
        greedy = {"temperature": 0, "max_tokens": NUM_TOKENS, "return_token_ids": True}
        reply = await client.post("/v1/chat/completions", json={**content, **greedy})
        token_ids: list[int] = reply.raise_for_status().json()["choices"][0]["token_ids"]
        return token_ids

    async def ask_all() -> list[list[int]]:
        async with httpx.AsyncClient(base_url=server.url, timeout=300) as client:
            return await asyncio.gather(*(ask_one(client, *question) for question in questions))

    return asyncio.run(ask_all())


def test_a_mixed_batch_answers_as_each_adapter_alone(
    server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    models = [BASE, *ADAPTERS]
    questions = [(models[i % len(models)], prompt) for i, prompt in enumerate(PROMPTS)]

    mixed = dict(zip(questions, ask(server, questions), strict=True))
    alone: dict[tuple[str, str], list[int]] = {}
    for model in models:  # one after the other: nothing but this adapter runs meanwhile
        own = [question for question in questions if question[0] == model]
        alone |= zip(own, ask(server, own), strict=True)
    plain = ask(server, [(BASE, prompt) for prompt in PROMPTS])

    num_equal = sum(mixed[question] == alone[question] for question in questions)
    num_shown = sum(mixed[q] != base for q, base in zip(questions, plain, strict=True))
    with capsys.disabled():
        sys.stdout.write(f"\nbfloat16: {num_equal} of {len(PROMPTS)} mixed answers equal alone\n")
    assert "running each alone" not in server.log.read_text()
    assert num_equal >= NUM_EQUAL
    # of the 28 questions that are not for the base
    assert num_shown >= 24
