"""Paged attention against the model's own eager attention, one sequence at a time."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GPT2Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Qwen3Config,
)

from lora_kernels.native import why_not_native
from lora_server.model.attention import PagedAttention
from lora_server.model.attention_step import AttentionStep, DecodeGroup, PrefillChunk
from lora_server.model.kv_cache import KvCache, KvShape
from lora_server.model.native.kernels import load_layer_kernels

AUTO_MODEL: Any = AutoModelForCausalLM  # its functions have no annotations
BLOCK = 4
Models = tuple[Any, Any, PagedAttention, dict[int, KvShape]]
Row = tuple[list[int], int, list[int]]
"""Token ids, tokens computed before, block ids."""
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
}
CONFIGS: dict[str, Any] = {
    "llama": LlamaConfig(**SMALL),
    "qwen3": Qwen3Config(**SMALL),
    "mistral-window": MistralConfig(**SMALL, sliding_window=6),
    "gemma2-softcap": Gemma2Config(
        **SMALL, sliding_window=6, query_pre_attn_scalar=8, attn_logit_softcapping=5.0
    ),
    "gemma3-window": Gemma3TextConfig(
        **SMALL, sliding_window=6, layer_types=["sliding_attention", "full_attention"]
    ),
    "gpt2": GPT2Config(vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=128),
    "gpt-oss-sinks": GptOssConfig(
        **SMALL,
        sliding_window=6,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=["sliding_attention", "full_attention"],
    ),
}


@pytest.fixture(params=CONFIGS, scope="module")
def models(request: pytest.FixtureRequest) -> Models:
    return make_models(CONFIGS[request.param])


def make_models(config: Any) -> Models:
    """The same weights twice: with eager attention, and with ours over a small cache."""
    torch.manual_seed(7)
    eager = AUTO_MODEL.from_config(deepcopy(config), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in eager.parameters():
            parameter.normal_(0.0, 0.15)  # unequal, so that a wrong position changes the result
    attention = PagedAttention()
    paged = AUTO_MODEL.from_config(deepcopy(config), attn_implementation=attention.name).eval()
    paged.load_state_dict(eager.state_dict())
    with torch.inference_mode():
        one = torch.zeros((1, 1), dtype=torch.int64)
        paged(input_ids=one, position_ids=one, use_cache=False)
    shapes = dict(attention.seen)
    return eager, paged, attention, shapes


def run_step(paged: Any, attention: PagedAttention, plan: list[Row]) -> torch.Tensor:
    """Run one packed step; `plan` has (token ids, tokens computed before, block ids) rows."""
    ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    decode: list[tuple[int, int, list[int]]] = []
    prefill: list[PrefillChunk] = []
    row = 0
    for tokens, context, blocks in plan:
        pos = np.arange(context, context + len(tokens))
        ids.extend(tokens)
        positions.extend(pos)
        slots.extend(np.asarray(blocks)[pos // BLOCK] * BLOCK + pos % BLOCK)
        if len(tokens) == 1:
            decode.append((row, context, blocks))
        else:
            prefill.append(
                PrefillChunk(
                    start=row,
                    num_tokens=len(tokens),
                    context=context,
                    blocks=torch.tensor(blocks[: (context + len(tokens) - 1) // BLOCK + 1]),
                )
            )
        row += len(tokens)
    groups: tuple[DecodeGroup, ...] = ()
    if decode:
        width = max(context // BLOCK + 1 for _, context, _ in decode)
        padded = [(b + [b[0]] * width)[:width] for _, _, b in decode]
        groups = (
            DecodeGroup(
                rows=None if len(decode) == row else torch.tensor([r for r, _, _ in decode]),
                blocks=torch.tensor(padded).flatten(),
                blocks_per_sequence=width,
                positions=torch.tensor([context for _, context, _ in decode]),
            ),
        )
    attention.step = AttentionStep(
        token_slots=torch.tensor(np.array(slots)), decode=groups, prefill=tuple(prefill)
    )
    with torch.inference_mode():
        logits: torch.Tensor = paged(
            input_ids=torch.tensor([ids]),
            position_ids=torch.tensor(np.array([positions])),
            use_cache=False,
        ).logits
        return logits[0]


def expected(eager: Any, tokens: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        logits: torch.Tensor = eager(input_ids=torch.tensor([tokens]), use_cache=False).logits
        return logits[0]


def test_a_packed_step_of_chunks_and_decodes_equals_each_sequence_alone(models: Models) -> None:
    compare_steps(models)


if why_not_native() is None:

    @pytest.mark.parametrize("family", ["llama", "mistral-window", "gemma2-softcap", "gpt2"])
    def test_native_attention_equals_each_sequence_alone_too(family: str) -> None:
        config = deepcopy(CONFIGS[family])
        if family == "gpt2":
            config.n_embd = 64  # 4 heads
        else:
            config.head_dim = 16
        models = make_models(config)
        models[2].kernels = load_layer_kernels(torch.float32)
        assert models[2].kernels is not None
        compare_steps(models)


def compare_steps(models: Models) -> None:
    """Three steps of three sequences, against eager attention over each alone."""
    eager, paged, attention, shapes = models
    attention.cache = KvCache(
        shapes, num_blocks=24, block_size=BLOCK, dtype=torch.float32, device=torch.device("cpu")
    )
    rng = np.random.default_rng(3)
    long, short, other = (rng.integers(0, 96, size=n).tolist() for n in (19, 6, 11))
    b_long, b_short, b_other = [9, 2, 14, 5, 11], [3, 20], [0, 7, 22]

    first = run_step(paged, attention, [(long[:9], 0, b_long), (short[:5], 0, b_short)])
    second = run_step(
        paged,
        attention,
        [(short[5:6], 5, b_short), (long[9:18], 9, b_long), (other[:10], 0, b_other)],
    )
    third = run_step(paged, attention, [(long[18:19], 18, b_long), (other[10:11], 10, b_other)])

    whole = {name: expected(eager, t) for name, t in zip("lso", (long, short, other), strict=True)}
    torch.testing.assert_close(first[:9], whole["l"][:9], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(first[9:], whole["s"][:5], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(second[0], whole["s"][5], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(second[1:10], whole["l"][9:18], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(second[10:], whole["o"][:10], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(third[0], whole["l"][18], atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(third[1], whole["o"][10], atol=2e-5, rtol=1e-4)


def test_the_store_returns_what_was_written() -> None:
    shape = KvShape(num_kv_heads=2, head_dim=3, value_head_dim=3)
    cache = KvCache(
        {0: shape}, num_blocks=4, block_size=2, dtype=torch.float32, device=torch.device("cpu")
    )
    key, value = torch.randn(3, 2, 3), torch.randn(3, 2, 3)

    cache.write(0, torch.tensor([6, 7, 2]), key, value)

    stored = cache.read(0, torch.tensor([3, 1]))
    assert torch.equal(stored[0, 0, 0], key[0])
    assert torch.equal(stored[0, 1, 1], value[1])
    assert torch.equal(stored[1, 0], torch.stack((key[2], value[2])))
    assert not stored[1, 1].any()
    assert cache.size_bytes == 4 * 2 * shape.token_bytes(torch.float32)
