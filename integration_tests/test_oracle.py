"""A mixed batch over HTTP equals each adapter alone under PEFT.

Every greedy token is PEFT's and every log-probability within 1e-4, whatever arrives at the same
time, however prompts are cut, whether keys and values are reused, lost, or moved between slots.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
from support.checkpoints import FAMILIES
from support.traffic import differences, plan_traffic, run_traffic

if TYPE_CHECKING:
    from support.fixture_types import MakeWorld, StartServer
    from support.server import Server
    from support.worlds import World

SMALL_KV_BYTES = 12 * 16 * 2 * 2 * 2 * 16 * 4
"""12 blocks of 16 tokens: 2 layers, keys and values, 2 heads of 16 float32 numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """How a server is started."""

    prefix: bool
    """Whether it reuses keys and values of equal beginnings."""
    chunk: int
    """`--max-num-batched-tokens`."""
    slots: int
    """`--max-loras`; there are 16 adapters."""
    small_kv: bool
    """Whether so few sequences fit that running ones are preempted."""

    def __str__(self) -> str:
        """Return the setting as a test id."""
        prefix = "prefix" if self.prefix else "no-prefix"
        memory = "small-kv" if self.small_kv else "large-kv"
        return f"{prefix}-chunk{self.chunk}-slots{self.slots}-{memory}"

    def flags(self, small_kv_bytes: int) -> list[str]:
        """Return the command line."""
        switch = "--enable-prefix-caching" if self.prefix else "--no-enable-prefix-caching"
        flags = [switch, "--max-num-batched-tokens", str(self.chunk), "--max-loras"]
        flags += [str(self.slots), "--max-num-seqs", "32"]
        return [*flags, "--kv-cache-memory", str(small_kv_bytes)] if self.small_kv else flags


ALL_PAIRS = [
    Setting(prefix=True, chunk=512, slots=16, small_kv=False),
    Setting(prefix=True, chunk=8, slots=4, small_kv=True),
    Setting(prefix=False, chunk=8, slots=16, small_kv=False),
    Setting(prefix=False, chunk=512, slots=4, small_kv=False),
    Setting(prefix=True, chunk=512, slots=16, small_kv=True),
    Setting(prefix=False, chunk=8, slots=16, small_kv=True),
]
"""Any two choices meet in one of these."""

TWO = [
    Setting(prefix=True, chunk=8, slots=4, small_kv=True),
    Setting(prefix=False, chunk=512, slots=16, small_kv=False),
]

CASES = [("llama", setting) for setting in ALL_PAIRS] + [
    (family, setting) for family in FAMILIES if family != "llama" for setting in TWO
]


@pytest.mark.parametrize(("family", "setting"), CASES, ids=str)
def test_mixed_traffic_equals_peft_for_each_adapter_alone(
    family: str,
    setting: Setting,
    make_world: MakeWorld,
    start_server: StartServer,
) -> None:
    world = make_world(family)
    first, second = (plan_traffic(world, seed=seed) for seed in (1, 2))
    flags = setting.flags(small_kv_bytes(family))

    with start_server(world, *world.lora_modules(), *flags) as server:
        replies = [run_traffic(server.url, plan) for plan in (first, second)]
        preemptions = server.metric("vllm:num_preemptions_total")
        hits = server.metric("vllm:prefix_cache_hits_total")

    assert_no_step_failed(server)
    assert differences(world, first, replies[0]) == []
    assert differences(world, second, replies[1]) == []
    assert (preemptions > 0) == setting.small_kv
    # Where few blocks fit, what was kept may be gone before anybody asks for it.
    assert setting.prefix or hits == 0
    assert hits > 0 or not setting.prefix or setting.small_kv


def assert_no_step_failed(server: Server) -> None:
    """The engine repeats a failed step request by request, which would hide mixed batches."""
    log = server.log.read_text()
    assert "running each alone" not in log, log


def small_kv_bytes(family: str) -> int:
    """GPT-2 keeps keys and values of all four heads, the others of two."""
    return SMALL_KV_BYTES * (2 if family == "gpt2" else 1)


def test_an_adapter_under_another_name_would_be_noticed(
    llama: World, start_server: StartServer
) -> None:
    planned = plan_traffic(llama, seed=3)
    swapped = {"a09": "a10", "a10": "a09"}
    modules = [f"{name}={llama.adapters[swapped.get(name, name)]}" for name in llama.adapters]

    with start_server(llama, "--lora-modules", *modules) as server:
        problems = differences(llama, planned, run_traffic(server.url, planned))

    wrong = [number for number, request in enumerate(planned) if request.adapter in swapped]
    assert wrong
    assert [int(problem.split()[1]) for problem in problems] == wrong


@pytest.mark.parametrize("family", FAMILIES)
def test_every_adapter_shows_within_three_tokens(family: str, make_world: MakeWorld) -> None:
    world = make_world(family)
    prompt = tuple(range(20, 60, 3))

    base = world.oracle.greedy(None, prompt, 3)
    answers = {name: world.oracle.greedy(name, prompt, 3).token_ids for name in world.adapters}

    assert [name for name, token_ids in answers.items() if token_ids == base.token_ids] == []
    assert len(set(answers.values())) == len(answers)
