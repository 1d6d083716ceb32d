"""Experts over HTTP: every family is served with adapters of every form in one batch."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
import torch
from parity.moe import INNER, MOE_BASES, NUM_EXPERTS, MadeAdapter, make_all
from support.checkpoints import build_tokenizer
from support.requests import PROMPT, complete, load, refusal, served
from support.server import BASE_NAME, running

from lora_weights.testing import write_adapter

if TYPE_CHECKING:
    from pathlib import Path

    from support.server import Server
    from torch import nn

NUM_TOKENS = 6
MIN_MARGIN = 1e-3
"""Distance in log-probability below which two tokens count as a tie."""


def greedy(model: nn.Module) -> tuple[list[int], list[float]]:
    """Continue the prompt without any cache; return tokens and distances to the second best."""
    token_ids, margins = list(PROMPT), []
    with torch.inference_mode():
        for _ in range(NUM_TOKENS):
            logits = model(input_ids=torch.tensor([token_ids]), use_cache=False).logits[0, -1]
            best = logits.log_softmax(dim=-1).topk(2)
            token_ids.append(int(best.indices[0]))
            margins.append(float(best.values[0] - best.values[1]))
    return token_ids[len(PROMPT) :], margins


def check(found: tuple[int, ...], model: nn.Module) -> None:
    """Compare with the model's own continuation, up to a tie."""
    expected, margins = greedy(model)
    for own, other, margin in zip(found, expected, margins, strict=True):
        if own != other:
            assert margin < MIN_MARGIN, (found, expected, margins)
            return


def ask_all(server: Server, names: list[str]) -> dict[str, tuple[int, ...]]:
    """Ask for a continuation under every name at the same time."""

    def ask(name: str) -> tuple[int, ...]:
        return complete(server.http, name, max_tokens=NUM_TOKENS)

    with ThreadPoolExecutor(len(names)) as pool:
        return dict(zip(names, pool.map(ask, names), strict=True))


@pytest.mark.parametrize("name", MOE_BASES)
def test_a_family_of_experts_is_served_with_adapters_of_every_form(
    name: str, tmp_path: Path
) -> None:
    base = MOE_BASES[name]
    adapters: dict[str, MadeAdapter] = make_all(base, tmp_path / "adapters")
    model = base.build()
    folder = tmp_path / "base"
    model.save_pretrained(folder)  # type: ignore[operator]
    build_tokenizer().save_pretrained(folder)
    modules = [f"{key}={made.folder}" for key, made in adapters.items()]
    arguments = [
        *("serve", str(folder), "--served-model-name", BASE_NAME, "--port", "0"),
        *("--dtype", "float32", "--num-threads", "1", "--max-lora-rank", "8"),
        *("--lora-modules", *modules, "--max-loras", "4", "--adapter-root", str(tmp_path)),
    ]

    with running(arguments, tmp_path / "server.log") as server:
        found = ask_all(server, [BASE_NAME, *adapters])
        wrong = {f"model.layers.1.mlp.experts.{NUM_EXPERTS}.down_proj": (INNER, 64)}
        refused = load(server.http, "wrong", write_adapter(tmp_path / "wrong", wrong, r=2))
        again = ask_all(server, [BASE_NAME, *adapters])
        names = served(server.http)

    for key, made in adapters.items():
        check(found[key], made.model)
    check(found[BASE_NAME], model)
    assert again == found
    refusal(refused, 400, "invalid_adapter")
    assert names == [BASE_NAME, *adapters]
    assert len({found[key] for key in adapters}) > len(adapters) // 2
