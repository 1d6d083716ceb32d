"""Probes that ride in the steps of requests: what they measure, and that nobody notices them."""

from __future__ import annotations

from copy import deepcopy
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lora_layers import LoraModelConfig, LoraModelManager
from lora_server.effect import LogitShift, ProbeState, ShiftOf
from lora_server.engine.admission import AdapterAdmission
from lora_server.engine.driver import Engine
from lora_server.engine.kv import BlockPool
from lora_server.engine.messages import RequestFailed, SequenceOutput
from lora_server.engine.probe import GenerationProbe
from lora_server.engine.prober import EffectProber
from lora_server.engine.request import AdapterUse, GenerationRequest, SamplingParams
from lora_server.engine.riding_probe import MAX_RIDING_TOKENS
from lora_server.engine.scheduler import SchedulerLimits
from lora_server.engine.step import EngineCore
from lora_server.model.attention import PagedAttention
from lora_server.model.kv_cache import KvCache
from lora_server.model.load import LoadedModel
from lora_weights import load_adapter
from lora_weights.testing import write_adapter

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from lora_server.engine.messages import EngineOutput
    from lora_weights import Adapter

AUTO_MODEL: Any = AutoModelForCausalLM  # its functions have no annotations
VOCAB, BLOCK = 96, 4
CONFIG = LlamaConfig(
    vocab_size=VOCAB,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=256,
)
TARGETS = {
    **{f"model.layers.{i}.self_attn.q_proj": (32, 32) for i in range(2)},
    **{f"model.layers.{i}.self_attn.v_proj": (32, 16) for i in range(2)},
    "lm_head": (32, VOCAB),
}
STRENGTHS = {"a": 0.2, "b": 0.1, "weak": 1e-3, "broken": 1e25}
"""Standard deviation of both factors; the last one's updates are not finite."""
TEXT = [7, 3, 44, 90, 12, 12, 5, 61, 30, 2, 81, 17, 9, 9, 23]
"""Of the probe: an odd number of tokens, so that the last piece is shorter."""


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Adapter]:
    found = {}
    for seed, (name, std) in enumerate(STRENGTHS.items()):
        folder = tmp_path_factory.mktemp(name)
        write_adapter(folder, TARGETS, r=2, seed=seed, std=std)
        found[name] = load_adapter(folder)
    return found


def base_model() -> Any:
    torch.manual_seed(11)
    model = AUTO_MODEL.from_config(deepcopy(CONFIG), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    return model


def merged_shift(adapter: Adapter) -> LogitShift:
    """Return the shift of the model in float64, with the adapter merged into its weights."""
    rows = []
    for own in (None, adapter):
        model = base_model().double()
        for path, part in () if own is None else own.parts.items():
            assert part.pair is not None
            delta = part.pair.lora_b.double() @ part.pair.lora_a.double()
            model.get_submodule(path).weight.data += delta
        with torch.inference_mode():
            logits = model(input_ids=torch.tensor([TEXT]), use_cache=False).logits[0]
        rows.append(logits.log_softmax(-1))
    base, moved = rows
    return LogitShift(
        max=float((moved - base).abs().max()),
        mean=float((moved - base).abs().mean()),
        kl=float((base[-1].exp() * (base[-1] - moved[-1])).sum()),
        of=ShiftOf.LOG_PROBABILITIES,
    )


def assert_equal(found: LogitShift | None, expected: LogitShift | None) -> None:
    assert found is not None
    assert expected is not None
    assert found.of is expected.of
    assert (found.max, found.mean, found.kl) == pytest.approx(
        (expected.max, expected.mean, expected.kl), rel=1e-3, abs=2e-5
    )


class Rig:
    """An engine's core over a tiny real model, with adapters in host memory and a prober."""

    def __init__(
        self,
        adapters: dict[str, Adapter],
        *,
        blocks: int = 64,
        budget: int = 32,
        slots: int = 2,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        model = self._load_model(blocks, dtype)
        ticks = iter(range(10**9))

        def clock() -> float:
            return next(ticks) * 1e-3

        config = LoraModelConfig(max_loras=slots, max_lora_rank=4)
        self.manager = LoraModelManager(model.module, config, is_paced=True, clock=clock)
        self.probe = GenerationProbe(model, self.manager, TEXT)
        admission = AdapterAdmission(
            self.manager, host_capacity=32, fetch=lambda _digest, _path: None, clock=clock
        )
        self.prober = admission.prober = EffectProber(
            self.manager, self.probe, shown=lambda digest: digest, ride=self.probe.ride
        )
        self.digests = {name: adapter.digest for name, adapter in adapters.items()}
        for name, adapter in adapters.items():
            admission.add(adapter.digest, self.manager.prepare(adapter), "unused", name=name)
        self.core = EngineCore(
            model=model,
            adapters=admission,
            limits=SchedulerLimits(
                max_num_seqs=8,
                max_num_batched_tokens=budget,
                block_size=BLOCK,
                max_adapter_wait_s=0.05,
            ),
            pool=BlockPool(blocks, keeps_prefixes=True),
            max_model_len=200,
            clock=clock,
        )
        self.outputs: list[EngineOutput] = []
        self.step_sizes: list[int] = []
        """Tokens of each forward pass."""
        self.before_pass: Callable[[bool], None] = lambda _has_riders: None
        """Called before each forward pass of a step; may raise."""
        self._forward = model.forward
        watched: Any = model
        watched.forward = self._count

    @staticmethod
    def _load_model(blocks: int, dtype: torch.dtype) -> LoadedModel:
        attention = PagedAttention()
        module = base_model().to(dtype)
        module.set_attn_implementation(attention.name)
        with torch.inference_mode():
            one = torch.zeros((1, 1), dtype=torch.int64)
            module(input_ids=one, position_ids=one, use_cache=False)
        model = LoadedModel(
            module=module,
            tokenizer=cast("Any", None),  # the engine works on token ids
            text_config=module.config,
            attention=attention,
            kv_shapes=dict(attention.seen),
            dtype=dtype,
            device=torch.device("cpu"),
            vocab_size=VOCAB,
            context_length=256,
            end_token_ids=frozenset(),
        )
        cache = KvCache(
            model.kv_shapes,
            num_blocks=blocks,
            block_size=BLOCK,
            dtype=dtype,
            device=model.device,
        )
        model.use_cache(cache)
        return model

    def _count(self, input_ids: torch.Tensor, *rest: Any) -> torch.Tensor:
        self.step_sizes.append(input_ids.shape[1])
        ids = input_ids[0].tolist()
        self.before_pass(self.prober._ride is not None and len(ids) > self.num_running)
        return self._forward(input_ids, *rest)

    @property
    def num_running(self) -> int:
        return self.core.stats().num_running

    def submit(
        self, name: str, prompt: list[int], *uses: str, count: int = 30, **sampling: Any
    ) -> None:
        n = sampling.pop("n", 1)
        options: dict[str, Any] = {"temperature": 0.0} | sampling
        self.core.submit(
            GenerationRequest(
                request_id=name,
                prompt_token_ids=tuple(prompt),
                sampling=SamplingParams(max_tokens=count, **options),
                adapters=tuple(AdapterUse(digest=self.digests[use]) for use in uses),
                n=n,
            )
        )

    def step(self, count: int = 1) -> None:
        with torch.inference_mode():
            for _ in range(count):
                self.outputs += self.core.step()[0]

    def run_to_the_end(self) -> None:
        for _ in range(2000):
            if not self.core.has_work:
                return
            self.step()
        pytest.fail("the requests do not end")

    def rest(self) -> None:
        with torch.inference_mode():
            while self.core.rest():
                pass

    def load(self, name: str) -> None:
        """Ask for a probe as a load does while requests run."""
        self.prober.ask(self.digests[name], is_idle=False)

    def load_and_begin_to_ride(self, name: str) -> None:
        self.load(name)
        for _ in range(20):
            self.step()
            if self.prober._ride is not None:
                return
        pytest.fail("the probe does not ride")

    def state(self, name: str) -> ProbeState:
        return self.prober.state(self.digests[name])[0]

    def shift(self, name: str) -> LogitShift | None:
        return self.prober.state(self.digests[name])[1]

    def shift_when_idle(self, name: str) -> LogitShift | None:
        with torch.inference_mode():
            self.prober.ask(self.digests[name], is_idle=True)
        return self.shift(name)

    def tokens(self, request_id: str, index: int = 0) -> list[int]:
        return [
            token_id
            for output in self.outputs
            if isinstance(output, SequenceOutput)
            and (output.request_id, output.index) == (request_id, index)
            for token_id in output.token_ids
        ]

    def assert_nothing_is_held(self, *, slots_used: int = 0) -> None:
        stats = self.core.stats()
        assert stats.kv_blocks_used == 0
        assert stats.cache is not None
        assert stats.cache.num_leases == 0
        assert stats.cache.slots_used == slots_used
        cache = self.core.model.attention.cache
        assert cache is not None
        assert all(layer.isfinite().all() for layer in cache.layers.values())


PROMPT = [5, 9, 2, 40, 7, 7, 3]


@pytest.mark.parametrize("name", ["a", "b"])
def test_the_shift_beside_requests_is_that_of_an_idle_engine_and_of_merged_weights(
    name: str, adapters: dict[str, Adapter]
) -> None:
    idle, busy = Rig(adapters), Rig(adapters)
    busy.submit("base", PROMPT)
    busy.submit("other", PROMPT[:4], "b" if name == "a" else "a")
    busy.step(3)

    expected = idle.shift_when_idle(name)
    busy.load(name)
    busy.run_to_the_end()

    assert_equal(busy.shift(name), expected)
    assert_equal(busy.shift(name), merged_shift(adapters[name]))
    assert busy.prober._probe is busy.probe
    assert busy.probe._base is None  # nothing ran but the steps
    busy.assert_nothing_is_held(slots_used=1)


def test_beside_a_base_that_was_run_before_the_shift_is_that_of_merged_weights(
    adapters: dict[str, Adapter],
) -> None:
    rig = Rig(adapters)
    rig.prober.prepare()
    rig.submit("base", PROMPT)
    rig.step(3)

    rig.load("a")
    rig.run_to_the_end()

    assert_equal(rig.shift("a"), merged_shift(adapters["a"]))
    rig.assert_nothing_is_held(slots_used=0)


def test_an_adapter_that_a_request_uses_is_probed_in_its_slot(adapters: dict[str, Adapter]) -> None:
    rig = Rig(adapters, slots=1)
    rig.submit("own", PROMPT, "a")
    rig.step(3)

    rig.load("a")
    rig.run_to_the_end()

    assert_equal(rig.shift("a"), merged_shift(adapters["a"]))
    assert rig.probe._base is None
    rig.assert_nothing_is_held(slots_used=1)


def requests_of_every_kind(rig: Rig) -> None:
    rig.submit("greedy", PROMPT)
    rig.submit("adapter", PROMPT, "b")
    rig.submit("drawn", PROMPT[:3], temperature=1.5, seed=3, n=2)
    rig.submit("scored", [*PROMPT, *PROMPT], "b", prompt_logprobs=1, logprobs=2, count=12)


def test_requests_get_the_tokens_they_get_without_a_probe(adapters: dict[str, Adapter]) -> None:
    alone, beside = Rig(adapters), Rig(adapters)
    for rig in (alone, beside):
        requests_of_every_kind(rig)
        rig.step(2)
    beside.load("a")
    for rig in (alone, beside):
        rig.step(6)
        rig.submit("late", PROMPT[::-1], count=9)
        rig.run_to_the_end()

    assert beside.state("a") is ProbeState.DONE
    for request_id in ("greedy", "adapter", "drawn", "scored", "late"):
        for index in (0, 1):
            assert beside.tokens(request_id, index) == alone.tokens(request_id, index)
    kinds = [[(type(o), o.request_id) for o in rig.outputs] for rig in (alone, beside)]
    assert kinds[0] == kinds[1]
    assert (beside.core.stats().prompt_tokens, beside.core.stats().generated_tokens) == (
        alone.core.stats().prompt_tokens,
        alone.core.stats().generated_tokens,
    )


@pytest.mark.parametrize(
    ("dtype", "is_prepared", "num_riders"),
    # Only float32 lets pieces be compared with what was computed in one pass before.
    [(torch.float32, False, 2), (torch.float32, True, 1), (torch.bfloat16, True, 2)],
)
def test_a_step_grows_by_a_few_rows_and_no_step_is_added(
    dtype: torch.dtype, is_prepared: bool, num_riders: int, adapters: dict[str, Adapter]
) -> None:
    alone, beside = Rig(adapters, dtype=dtype), Rig(adapters, dtype=dtype)
    for rig in (alone, beside):
        if is_prepared:
            rig.prober.prepare()
        requests_of_every_kind(rig)
        rig.step(2)
    beside.load("a")
    for rig in (alone, beside):
        rig.run_to_the_end()

    grown = [
        own - base
        for own, base in zip(beside.step_sizes, alone.step_sizes, strict=True)
        if own > base
    ]
    assert sum(grown) == num_riders * len(TEXT)
    assert max(grown) == num_riders * MAX_RIDING_TOKENS


def test_steps_that_only_decode_go_on_before_and_after_a_ride(adapters: dict[str, Adapter]) -> None:
    alone, beside = Rig(adapters), Rig(adapters)
    for rig in (alone, beside):
        rig.submit("one", [4], count=120)
        rig.submit("two", PROMPT, count=120)
        rig.step(10)
    for name in ("a", "b", "weak"):
        beside.load(name)
        beside.step(25)
    for rig in (alone, beside):
        rig.run_to_the_end()

    assert [beside.state(name) for name in ("a", "b", "weak")] == [ProbeState.DONE] * 3
    assert [beside.tokens(r) for r in ("one", "two")] == [alone.tokens(r) for r in ("one", "two")]


@pytest.mark.parametrize(
    ("dtype", "largest"),
    # In bfloat16 the base alone, in pieces, is 2e-3 away from the base in one pass.
    [(torch.float32, 1e-4), (torch.bfloat16, 5e-4)],
)
def test_a_weak_adapter_does_not_look_strong_while_it_rides(
    dtype: torch.dtype, largest: float, adapters: dict[str, Adapter]
) -> None:
    rig = Rig(adapters, dtype=dtype)
    requests_of_every_kind(rig)
    rig.step()

    rig.load("weak")
    rig.run_to_the_end()

    shift = rig.shift("weak")
    assert shift is not None
    assert shift.max < largest
    assert shift.is_weak
    assert rig.probe._base is None  # it rode


def test_numbers_that_are_not_finite_fail_the_probe_and_nothing_else(
    adapters: dict[str, Adapter],
) -> None:
    alone, beside = Rig(adapters, blocks=40), Rig(adapters, blocks=40)
    for rig in (alone, beside):
        requests_of_every_kind(rig)
        rig.step()
    beside.load("broken")
    for rig in (alone, beside):
        rig.run_to_the_end()

    assert beside.state("broken") is ProbeState.FAILED
    for request_id in ("greedy", "adapter", "drawn", "scored"):
        assert beside.tokens(request_id) == alone.tokens(request_id)
    beside.assert_nothing_is_held(slots_used=1)


def test_a_step_that_fails_for_the_probe_is_run_again_without_it(
    adapters: dict[str, Adapter], caplog: pytest.LogCaptureFixture
) -> None:
    alone, beside = Rig(adapters), Rig(adapters)

    def fail(has_riders: bool) -> None:
        if has_riders:
            raise RuntimeError("told to fail")

    for rig in (alone, beside):
        rig.submit("greedy", PROMPT)
        rig.submit("drawn", PROMPT, temperature=1.5, seed=3)
        rig.step(3)
    beside.before_pass = fail
    beside.load("a")
    for rig in (alone, beside):
        rig.run_to_the_end()

    assert beside.state("a") is ProbeState.FAILED
    assert "the probe of an adapter failed" in caplog.messages
    assert [beside.tokens(r) for r in ("greedy", "drawn")] == [
        alone.tokens(r) for r in ("greedy", "drawn")
    ]
    assert not any(isinstance(output, RequestFailed) for output in beside.outputs)
    beside.assert_nothing_is_held()


def test_a_request_at_fault_ends_alone_and_the_ride_goes_on(adapters: dict[str, Adapter]) -> None:
    rig = Rig(adapters)
    rig.submit("good", PROMPT)
    rig.load_and_begin_to_ride("a")

    rig.submit("bad", PROMPT, logit_bias={VOCAB + 5: 1.0})
    rig.run_to_the_end()

    failed = [o.request_id for o in rig.outputs if isinstance(o, RequestFailed)]
    assert failed == ["bad"]
    assert_equal(rig.shift("a"), merged_shift(adapters["a"]))
    rig.assert_nothing_is_held()


@pytest.mark.parametrize("own", [False, True])
def test_an_adapter_that_goes_away_mid_ride_leaves_nothing_behind(
    own: bool,
    adapters: dict[str, Adapter],
) -> None:
    rig = Rig(adapters, slots=1 if own else 2)
    rig.submit("base", PROMPT)
    if own:
        rig.submit("own", PROMPT, "a", count=3)
        rig.step()
    rig.load_and_begin_to_ride("a")

    rig.core.retire(rig.digests["a"])
    rig.run_to_the_end()
    rig.rest()

    assert rig.state("a") is ProbeState.WAITING
    assert not rig.prober._waiting
    rig.assert_nothing_is_held()


def test_when_all_requests_are_aborted_mid_ride_the_probe_is_run_to_its_end(
    adapters: dict[str, Adapter],
) -> None:
    rig = Rig(adapters)
    rig.submit("base", PROMPT)
    rig.load_and_begin_to_ride("a")

    rig.core.abort_all()
    rig.core.reset_statistics()
    rig.rest()

    assert_equal(rig.shift("a"), merged_shift(adapters["a"]))
    rig.assert_nothing_is_held()


def test_when_the_last_request_ends_mid_ride_all_probes_are_run(
    adapters: dict[str, Adapter],
) -> None:
    rig = Rig(adapters)
    rig.submit("base", PROMPT)
    rig.load_and_begin_to_ride("a")
    rig.load("b")
    rig.core.abort("base")

    rig.rest()

    for name in ("a", "b"):
        assert_equal(rig.shift(name), merged_shift(adapters[name]))
    rig.assert_nothing_is_held()


def test_a_load_into_an_engine_that_has_become_idle_is_probed_at_once(
    adapters: dict[str, Adapter],
) -> None:
    rig = Rig(adapters)
    rig.submit("base", PROMPT)
    rig.load_and_begin_to_ride("a")
    rig.core.abort("base")

    assert_equal(rig.shift_when_idle("b"), merged_shift(adapters["b"]))
    assert rig.state("a") is ProbeState.DONE
    rig.assert_nothing_is_held()


def test_requests_that_cannot_run_yet_do_not_hold_up_a_probe(adapters: dict[str, Adapter]) -> None:
    rig = Rig({name: adapters[name] for name in ("a",)})
    assert rig.core.adapters is not None
    rig.digests["b"] = adapters["b"].digest
    rig.core.adapters._path_of[adapters["b"].digest] = "being/read"
    rig.submit("late", PROMPT, "b")

    rig.load("a")
    rig.step(2)

    assert_equal(rig.shift("a"), merged_shift(adapters["a"]))


def test_where_the_pool_is_full_the_probe_waits_and_nobody_starts_over(
    adapters: dict[str, Adapter],
) -> None:
    rig = Rig(adapters, blocks=13)  # 8 for both sequences of the probe
    rig.submit("long", PROMPT, count=12)
    rig.submit("longer", PROMPT[:5], count=32)
    rig.step(3)

    rig.load("a")
    held = []
    while rig.core.is_known("long"):
        rig.step()
        held.append(rig.prober._ride)
    rig.run_to_the_end()

    assert not any(held)
    assert rig.core.stats().preemptions == 0
    assert rig.state("a") is ProbeState.WAITING
    rig.rest()
    assert_equal(rig.shift("a"), merged_shift(adapters["a"]))
    rig.assert_nothing_is_held()


def test_a_probe_does_not_take_the_blocks_that_running_requests_need_next(
    adapters: dict[str, Adapter],
) -> None:
    rig = Rig(adapters, blocks=17, slots=1)
    rig.submit("own", PROMPT, "a", count=60)  # all 17 in the end
    rig.step(3)
    while rig.core.pool.num_available > 8:
        rig.step()

    rig.load("a")  # 8 for its sequences
    rig.run_to_the_end()
    rig.rest()

    assert rig.core.stats().preemptions == 0
    assert_equal(rig.shift("a"), merged_shift(adapters["a"]))
    rig.assert_nothing_is_held(slots_used=1)


def test_a_probe_that_had_to_wait_for_blocks_rides_once_there_are_some(
    adapters: dict[str, Adapter],
) -> None:
    rig = Rig(adapters, blocks=24)
    rig.submit("wide", list(range(50)), count=8)
    rig.submit("narrow", [4, 5], count=40)
    rig.step(4)

    rig.load("a")
    rig.step(3)
    held_then = rig.prober._ride
    rig.run_to_the_end()

    assert held_then is None
    assert_equal(rig.shift("a"), merged_shift(adapters["a"]))
    assert rig.probe._base is None  # it rode
    assert rig.core.stats().preemptions == 0


def test_where_requests_fill_the_budget_the_probe_waits(adapters: dict[str, Adapter]) -> None:
    rig = Rig(adapters, budget=4, blocks=128)
    rig.submit("first", [4], count=60)
    rig.step()
    rig.submit("prompt", list(range(60)), count=4)
    rig.step()
    rig.load("a")

    while rig.core._requests["prompt"][0].is_prefilling:
        rig.step()
        assert rig.prober._ride is None
    rig.run_to_the_end()

    assert max(rig.step_sizes) == 4
    assert_equal(rig.shift("a"), merged_shift(adapters["a"]))
    assert rig.probe._base is None


def test_no_step_has_more_tokens_than_the_limit(adapters: dict[str, Adapter]) -> None:
    rig = Rig(adapters, budget=7, blocks=128)
    for i in range(4):
        rig.submit(f"r{i}", PROMPT, count=60)

    rig.load("a")
    rig.run_to_the_end()

    assert rig.state("a") is ProbeState.DONE
    assert rig.probe._base is None
    assert max(rig.step_sizes) == 7  # of prompts
    # of four that decode, and two riders
    assert rig.step_sizes[5:].count(4 + 2) == len(TEXT)


def test_a_ride_holds_its_slot_against_requests(adapters: dict[str, Adapter]) -> None:
    rig = Rig(adapters, slots=1)
    rig.submit("base", PROMPT, count=60)
    rig.load_and_begin_to_ride("a")

    rig.submit("other", PROMPT, "b", count=5)
    rig.run_to_the_end()

    assert_equal(rig.shift("a"), merged_shift(adapters["a"]))
    assert len(rig.tokens("other")) == 5
    assert rig.core.stats().preemptions == 0


def test_the_bases_run_is_made_once_and_ahead(adapters: dict[str, Adapter]) -> None:
    rig = Rig(adapters)

    with torch.inference_mode():
        rig.prober.prepare()
        rig.prober.prepare()
    passes_ahead = len(rig.step_sizes)
    for name in ("a", "b"):
        rig.shift_when_idle(name)

    assert passes_ahead == 1
    assert len(rig.step_sizes) == 3


def test_a_resting_engine_runs_every_probe_that_waits(adapters: dict[str, Adapter]) -> None:
    rig = Rig(adapters)
    names = ("a", "b", "weak")
    engine = Engine(rig.core)

    def ask(_core: EngineCore) -> list[Future[None] | None]:
        return [rig.prober.ask(rig.digests[name], is_idle=False) for name in names]

    engine.start()
    try:
        for future in engine.call(ask).result():
            assert future is not None
            future.result(timeout=60)
        states = engine.call(lambda _core: [rig.state(name) for name in names]).result()
    finally:
        engine.stop()

    assert states == [ProbeState.DONE] * 3
