"""Goals of the CPU that are measured between two steps: prefill, and a request's neighbours.

The service is the one that `lora-server serve` builds; steps run on its engine's own thread.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch

from lora_server.cli.build import build_service
from lora_server.config import EffectProbe, ServerConfig
from lora_server.engine.request import AdapterUse, GenerationRequest, SamplingParams
from lora_server.lora_modules import LoraModule

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from lora_server.cli.running import RunningService
    from lora_server.engine.driver import Engine
    from lora_server.engine.step import EngineCore

PREFILL_TOKENS = 512
NUM_PROMPTS = 8
"""Prompts that share a chunk, and requests that decode together."""
NEIGHBOUR_PROMPT, NEIGHBOUR_TOKENS = 32, 24
_KV_BYTES = 2**28

Request = tuple[str | None, int, int]
"""Adapter or base, tokens of the prompt, tokens to generate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stepper:
    """Runs requests step by step on the engine's thread."""

    service: RunningService
    chance: random.Random

    def times_ms(self, requests: Sequence[Request]) -> list[float]:
        """Submit requests at once and return what each step took until all have ended.

        Prompts are drawn each time, so that none is found in the prefix cache.
        """
        state = self.service.app.state.service
        engine = cast("Engine[EngineCore]", state.engine)
        made = [
            GenerationRequest(
                request_id=f"request-{number}-{self.chance.random()}",
                prompt_token_ids=tuple(self.chance.choices(range(300, 32000), k=num_prompt)),
                sampling=SamplingParams(max_tokens=num_new, temperature=0.0, ignore_eos=True),
                adapters=()
                if name is None
                else (AdapterUse(digest=state.catalog.resolve(name).digest),),
            )
            for number, (name, num_prompt, num_new) in enumerate(requests)
        ]
        return engine.call(lambda core: _step_to_end(core, made)).result()


def _step_to_end(core: EngineCore, requests: Sequence[GenerationRequest]) -> list[float]:
    for request in requests:
        core.submit(request)
    found = []
    while core.has_work:
        start_s = time.perf_counter()
        core.step()
        found.append((time.perf_counter() - start_s) * 1e3)
    return found


@contextmanager
def stepping(base: Path, adapters: Mapping[str, Path], *, max_loras: int) -> Iterator[Stepper]:
    """Build the service with these adapters; put torch's threads back afterwards."""
    num_threads = torch.get_num_threads()
    config = ServerConfig(
        model=str(base),
        max_loras=max_loras,
        lora_modules=tuple(LoraModule(name=n, path=str(p)) for n, p in adapters.items()),
        kv_cache_memory=_KV_BYTES,
        effect_probe=EffectProbe.OFF,
    )
    service = build_service(config)
    try:
        service.warm_up()
        yield Stepper(service=service, chance=random.Random(0))
    finally:
        service.close()
        torch.set_num_threads(num_threads)


def measure_prefill(stepper: Stepper, names: Sequence[str], repeats: int) -> dict[str, float]:
    """Return milliseconds of a step of 512 prompt tokens, by how they are divided; medians."""
    part = PREFILL_TOKENS // NUM_PROMPTS
    cases: dict[str, list[Request]] = {
        "base, 1 prompt": [(None, PREFILL_TOKENS, 1)],
        "1 adapter, 1 prompt": [(names[0], PREFILL_TOKENS, 1)],
        "base, 8 prompts": [(None, part, 1)] * NUM_PROMPTS,
        "8 adapters, 8 prompts": [(name, part, 1) for name in names[:NUM_PROMPTS]],
    }
    found: dict[str, list[float]] = {name: [] for name in cases}
    for number, (name, requests) in itertools.product(range(repeats + 2), cases.items()):
        times = stepper.times_ms(requests)
        if number >= 2:  # the first rounds put adapters into slots
            assert len(times) == 1, f"{name} took {len(times)} steps, expected one"
            found[name].extend(times)
    return {name: statistics.median(times) for name, times in found.items()}


def measure_neighbours(
    stepper: Stepper, *, own: str, small: Sequence[str], large: Sequence[str], repeats: int
) -> tuple[float, float]:
    """Return milliseconds of a decode step with small and with large neighbours; medians."""
    found: tuple[list[float], list[float]] = ([], [])
    for number in range(repeats + 1):
        for times, names in zip(found, (small, large), strict=True):
            requests = [(name, NEIGHBOUR_PROMPT, NEIGHBOUR_TOKENS) for name in (own, *names)]
            steps = stepper.times_ms(list(requests))
            if number:  # the first round puts adapters into slots
                times.extend(steps[-(NEIGHBOUR_TOKENS - 1) :])
    return statistics.median(found[0]), statistics.median(found[1])
