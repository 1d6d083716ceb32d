"""What LoRA on experts costs over the base's expert layer, by the number of adapters in a step.

`python integration_tests/bench_experts.py [--output FILE]` runs Mixtral's fused
experts (8 experts, 2 a token, hidden 512, intermediate 1024) over 16 tokens that 1, 2, 4 or 8
adapters of rank 8 share, each on all experts, and beside it transformers' own forward. All cases
take turns. A measurement, not a test.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralExperts

from lora_kernels import Backend, build_routing
from lora_layers.content import ExpertContent
from lora_layers.step import RoutingCell
from lora_layers.wrappers.base_experts import read_expert_shape
from lora_layers.wrappers.experts import ExpertStack, LoraExperts

sys.path.insert(0, str(Path(__file__).parent))

from support.machine import machine

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

HIDDEN, INNER, EXPERTS, CHOICES, TOKENS, RANK = 512, 1024, 8, 2, 16, 8
COUNTS = (0, 1, 2, 4, 8)
LIMIT = 1.6
NUM_ADAPTERS = max(COUNTS)

Pair = tuple["Tensor", "Tensor"]


def make_pair(num_in: int, num_out: int, dtype: torch.dtype) -> Pair:
    """Return random factors for every expert."""
    a = torch.randn(EXPERTS, RANK, num_in) * 0.02
    b = torch.randn(EXPERTS, num_out, RANK) * 0.02
    return a.to(dtype), b.to(dtype)


def make_layer(dtype: torch.dtype) -> tuple[MixtralExperts, LoraExperts]:
    """Return transformers' layer, and the same one with eight adapters in its slots."""
    config = MixtralConfig(
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_local_experts=EXPERTS,
        num_experts_per_tok=CHOICES,
    )
    base = MixtralExperts(config)
    for parameter in base.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    base = base.to(dtype).requires_grad_(requires_grad=False)
    shape = read_expert_shape(base)
    assert shape is not None, "the form of transformers' experts is not known any more"
    stack = ExpertStack(
        path="experts",
        shape=shape,
        num_slots=NUM_ADAPTERS,
        max_rank=RANK,
        dtype=dtype,
        device=torch.device("cpu"),
        shares_outer=False,
        cell=RoutingCell(),
        backend=Backend.ATEN,
    )
    for slot in range(NUM_ADAPTERS):
        w13 = tuple(make_pair(HIDDEN, INNER, dtype) for _ in range(2))
        stack.write(slot, ExpertContent(w13=w13, w2=make_pair(INNER, HIDDEN, dtype)))
    return base, LoraExperts(base, stack)


def make_cases(dtype: torch.dtype) -> tuple[dict[str, Callable[[], Tensor]], dict[str, int]]:
    """Return what to time, and the bytes of weights each has to read at least."""
    base, wrapped = make_layer(dtype)
    hidden = torch.randn(TOKENS, HIDDEN).to(dtype)
    scores, chosen = torch.rand(TOKENS, EXPERTS).topk(CHOICES, dim=-1)
    weights = (scores / scores.sum(-1, keepdim=True)).to(dtype)
    num_used = len(set(chosen.flatten().tolist()))
    base_bytes = num_used * 3 * HIDDEN * INNER * dtype.itemsize

    def run(count: int) -> Tensor:
        wrapped.stack.cell.active = routings[count]
        out: Tensor = wrapped(hidden, chosen, weights)
        return out

    routings = {}
    floors = {"transformers": base_bytes}
    for count in COUNTS:
        slots = [token * count // TOKENS for token in range(TOKENS)] if count else []
        routing = build_routing(
            token_idx=range(len(slots)), slots=slots, num_tokens=TOKENS, num_slots=NUM_ADAPTERS
        )
        routings[count] = routing if slots else None
        pairs = {
            (slot, int(expert))
            for slot, experts in zip(slots, chosen, strict=False)
            for expert in experts
        }
        factors = len(pairs) * 3 * RANK * (HIDDEN + INNER) * dtype.itemsize
        floors[f"{count} adapters"] = base_bytes + factors
    cases: dict[str, Callable[[], Tensor]] = {
        "transformers": lambda: base(hidden, chosen, weights),
        **{f"{count} adapters": partial(run, count) for count in COUNTS},
    }
    return cases, floors


def measure(cases: dict[str, Callable[[], Tensor]], rounds: int) -> dict[str, float]:
    """Return the median microseconds of each case; one call each, in turn."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + rounds // 10):
        for name, call in cases.items():
            start_s = time.perf_counter()
            call()
            if number >= rounds // 10:  # the first calls warm up
                times[name].append((time.perf_counter() - start_s) * 1e6)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> int:
    """Measure, print JSON, and say whether the limit holds."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--output", type=Path, help="write the report here as well")
    parser.add_argument("--rounds", type=int, default=500, help="calls of each case")
    options = parser.parse_args()
    torch.manual_seed(0)
    report: dict[str, Any] = {"tokens": TOKENS, "rank": RANK, "experts": EXPERTS}
    worst = 0.0
    for dtype in (torch.float32, torch.bfloat16):
        with torch.inference_mode():
            cases, floors = make_cases(dtype)
            found = measure(cases, options.rounds)
        ratio = found[f"{NUM_ADAPTERS} adapters"] / found["0 adapters"]
        worst = max(worst, ratio)
        report[str(dtype).removeprefix("torch.")] = {
            "us": {name: round(value) for name, value in found.items()},
            "least_bytes": floors,
            "ratio": round(ratio, 2),
        }
    report["machine"] = machine()
    text = json.dumps(report, indent=1)
    sys.stdout.write(text + "\n")
    if options.output is not None:
        options.output.write_text(text + "\n", encoding="utf-8")
    return 0 if worst <= LIMIT else 1


if __name__ == "__main__":
    sys.exit(main())
