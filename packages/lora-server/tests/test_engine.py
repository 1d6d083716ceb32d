"""The engine over a tiny real model: every answer against the model with merged weights."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from copy import deepcopy
from dataclasses import replace
from typing import TYPE_CHECKING, Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lora_layers import LoraModelConfig, LoraModelManager
from lora_layers.content import SlotContent
from lora_server.engine.admission import AdapterAdmission
from lora_server.engine.driver import Engine
from lora_server.engine.kv import BlockPool
from lora_server.engine.messages import FinishReason, PromptLogprobs, RequestFailed, SequenceOutput
from lora_server.engine.request import AdapterUse, GenerationRequest, SamplingParams
from lora_server.engine.scheduler import SchedulerLimits
from lora_server.engine.step import EngineCore
from lora_server.engine.usage import AdapterUsage
from lora_server.errors import NotReadyError, UnknownAdapterError
from lora_server.model.attention import PagedAttention
from lora_server.model.families import PACKED_MODULES
from lora_server.model.kv_cache import KvCache
from lora_server.model.load import LoadedModel
from lora_weights import load_adapter
from lora_weights.testing import write_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from lora_server.engine.messages import EngineOutput
    from lora_server.engine.stats import EngineStats
    from lora_weights import Adapter

Adapters = dict[str, "Adapter"]
Uses = tuple[tuple[str, float], ...]
"""(adapter name, scale) of a weighted set."""

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
    **{f"model.layers.{i}.mlp.down_proj": (48, 32) for i in range(2)},
    "lm_head": (32, VOCAB),
}


def base_model() -> Any:
    torch.manual_seed(11)
    model = AUTO_MODEL.from_config(deepcopy(CONFIG), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    return model


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> Adapters:
    """Three adapters on the disk, read."""
    found = {}
    for seed, name in enumerate("abc"):
        folder = tmp_path_factory.mktemp(name)
        write_adapter(folder, TARGETS, r=2 + seed, seed=seed, std=0.2)
        found[name] = load_adapter(folder)
    return found


class Oracle:
    """The base with adapters merged in, recomputed whole for every token."""

    def __init__(self, adapters: Adapters) -> None:
        self.adapters = adapters
        self.models: dict[Uses, Any] = {}

    def model(self, uses: Uses) -> Any:
        if uses not in self.models:
            model = base_model()
            for name, scale in uses:
                for path, part in self.adapters[name].parts.items():
                    assert part.pair is not None
                    delta = part.pair.lora_b.double() @ part.pair.lora_a.double()
                    weight = model.get_submodule(path).weight
                    weight.data = (weight.double() + scale * delta).float()
            self.models[uses] = model
        return self.models[uses]

    def logprobs(self, uses: Uses, tokens: list[int]) -> torch.Tensor:
        with torch.inference_mode():
            output = self.model(uses)(input_ids=torch.tensor([tokens]), use_cache=False)
        logits: torch.Tensor = output.logits[0]
        return logits.log_softmax(-1)

    def greedy(self, uses: Uses, prompt: list[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logprobs(uses, tokens)[-1].argmax()))
        return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def oracle(adapters: Adapters) -> Oracle:
    return Oracle(adapters)


def build_core(
    adapters: Adapters,
    *,
    blocks: int = 64,
    budget: int = 16,
    prefixes: bool = True,
    slots: int = 2,
    wait: float = 0.05,
    host: int = 32,
) -> EngineCore:
    attention = PagedAttention()
    module = base_model()
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
        dtype=torch.float32,
        device=torch.device("cpu"),
        vocab_size=VOCAB,
        context_length=256,
        end_token_ids=frozenset(),
    )
    ticks = iter(range(10**9))

    def clock() -> float:
        return next(ticks) * 1e-3

    manager = LoraModelManager(
        module,
        LoraModelConfig(
            max_loras=slots, max_lora_rank=4, max_cpu_loras=host, packed_modules=PACKED_MODULES
        ),
        is_paced=True,
        clock=clock,
    )
    model.use_cache(
        KvCache(
            model.kv_shapes,
            num_blocks=blocks,
            block_size=BLOCK,
            dtype=torch.float32,
            device=model.device,
        )
    )
    admission = AdapterAdmission(
        manager, host_capacity=host, fetch=lambda _digest, _path: None, clock=clock
    )
    for name, adapter in adapters.items():
        admission.add(adapter.digest, manager.prepare(adapter), "unused", name=name)
    return EngineCore(
        model=model,
        adapters=admission,
        limits=SchedulerLimits(
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            block_size=BLOCK,
            max_adapter_wait_s=wait,
        ),
        pool=BlockPool(blocks, keeps_prefixes=prefixes),
        max_model_len=200,
        clock=clock,
    )


def request(
    name: str, prompt: list[int], adapters: Adapters, uses: Uses = (), **sampling: Any
) -> GenerationRequest:
    options: dict[str, Any] = {"max_tokens": 6, "temperature": 0.0} | sampling
    n = options.pop("n", 1)
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**options),
        adapters=tuple(AdapterUse(digest=adapters[a].digest, scale=s) for a, s in uses),
        n=n,
    )


def run(core: EngineCore, requests: list[GenerationRequest]) -> dict[str, list[Any]]:
    """Run to the end; the outputs of each request in order."""
    for one in requests:
        core.submit(one)
    outputs: dict[str, list[Any]] = {one.request_id: [] for one in requests}
    with torch.inference_mode():
        for _ in range(2000):
            if not core.has_work:
                break
            for output in core.step()[0]:
                outputs.setdefault(output.request_id, []).append(output)
    assert not core.has_work
    return outputs


def cache_of(core: EngineCore) -> KvCache:
    cache = core.model.attention.cache
    assert cache is not None
    return cache


def leases(stats: EngineStats) -> int:
    assert stats.cache is not None
    return stats.cache.num_leases


def last(outputs: list[EngineOutput]) -> SequenceOutput:
    return sequence_output(outputs[-1])


def sequence_output(output: EngineOutput) -> SequenceOutput:
    assert isinstance(output, SequenceOutput)
    return output


def tokens_of(outputs: Sequence[EngineOutput], index: int = 0) -> list[int]:
    mine = [o for o in outputs if isinstance(o, SequenceOutput) and o.index == index]
    return [token_id for output in mine for token_id in output.token_ids]


PROMPTS = [[5, 9, 2, 40, 7, 7, 3, 1, 12], [5, 9, 2, 40, 8], [1], [60, 61, 62, 63, 64, 65, 66]]
CHOICES: list[Uses] = [(), (("a", 1.0),), (("b", 1.0),), (("c", 1.0),), (("a", 0.5), ("b", 0.25))]


@pytest.mark.parametrize(
    "setting",
    [
        {},
        {"prefixes": False},
        {"budget": 3},
        {"blocks": 9, "budget": 64},
        {"slots": 3, "budget": 64},
    ],
    ids=["default", "no-prefixes", "small-chunks", "preemption", "three-slots"],
)
def test_a_mixed_batch_equals_each_request_alone_with_merged_weights(
    setting: dict[str, Any], adapters: Adapters, oracle: Oracle
) -> None:
    core = build_core(adapters, **setting)
    wanted = [(prompt, uses) for prompt in PROMPTS for uses in CHOICES]
    requests = [
        request(f"r{i}", prompt, adapters, uses, max_tokens=5)
        for i, (prompt, uses) in enumerate(wanted)
    ]

    outputs = run(core, requests)

    for one, (prompt, uses) in zip(requests, wanted, strict=True):
        assert tokens_of(outputs[one.request_id]) == oracle.greedy(uses, prompt, 5)
    assert len({tuple(oracle.greedy(uses, PROMPTS[0], 5)) for uses in CHOICES[:4]}) == 4
    if "blocks" in setting:
        assert core.scheduler.num_preemptions > 0
    assert core.pool.num_used == 0
    assert leases(core.stats()) == 0


def test_reported_logprobs_are_the_models(adapters: Adapters, oracle: Oracle) -> None:
    core = build_core(adapters)
    prompt, uses = PROMPTS[0], (("a", 1.0),)

    outputs = run(
        core,
        [request("r", prompt, adapters, uses, logprobs=2, prompt_logprobs=1)],
    )["r"]

    assert isinstance(outputs[0], PromptLogprobs)
    tokens = tokens_of(outputs)
    reference = oracle.logprobs(uses, [*prompt, *tokens])
    for i, scored in enumerate(outputs[0].logprobs):
        assert scored.token_id == prompt[i + 1]
        assert scored.logprob == pytest.approx(float(reference[i, prompt[i + 1]]), abs=1e-4)
    for i, output in enumerate(outputs[1:]):
        scored = output.logprobs[0]
        row = reference[len(prompt) - 1 + i]
        assert scored.logprob == pytest.approx(float(row[scored.token_id]), abs=1e-4)
        assert scored.rank == 1
        assert [t for t, _ in scored.top] == row.topk(2).indices.tolist()


def test_prompt_logprobs_alone_need_no_token(adapters: Adapters) -> None:
    core = build_core(adapters)

    outputs = run(core, [request("r", PROMPTS[0], adapters, max_tokens=0, prompt_logprobs=0)])["r"]

    assert len(outputs[0].logprobs) == len(PROMPTS[0]) - 1
    assert outputs[1].finish_reason is FinishReason.LENGTH
    assert tokens_of(outputs) == []


def test_continuations_draw_for_themselves_and_repeat_with_their_seed(adapters: Adapters) -> None:
    seeded = request("r", PROMPTS[0], adapters, max_tokens=8, temperature=2.0, seed=4, n=3)

    first = run(build_core(adapters), [seeded])["r"]
    alone = build_core(adapters, budget=64)
    neighbour = request("x", PROMPTS[3], adapters, (("b", 1.0),), max_tokens=20)
    second = run(alone, [seeded, neighbour])["r"]

    texts = [tokens_of(first, i) for i in range(3)]
    assert len({tuple(t) for t in texts}) == 3
    assert texts == [tokens_of(second, i) for i in range(3)]


def test_one_requests_failure_leaves_its_neighbours_alone(
    adapters: Adapters, oracle: Oracle
) -> None:
    core = build_core(adapters, budget=64)
    bad = request("bad", PROMPTS[1], adapters, logit_bias={VOCAB + 5: 1.0})

    outputs = run(
        core,
        [
            request("good", PROMPTS[0], adapters, (("a", 1.0),)),
            bad,
            request("base", PROMPTS[3], adapters),
        ],
    )

    assert [type(o) for o in outputs["bad"]] == [RequestFailed]
    assert tokens_of(outputs["good"]) == oracle.greedy((("a", 1.0),), PROMPTS[0], 6)
    assert tokens_of(outputs["base"]) == oracle.greedy((), PROMPTS[3], 6)
    assert core.pool.num_used == 0


def test_a_scale_that_overflows_spoils_no_neighbour_and_no_later_request(
    adapters: Adapters, oracle: Oracle
) -> None:
    core = build_core(adapters, budget=64, blocks=24)
    good = request("good", PROMPTS[0], adapters, (("b", 1.0),))

    first = run(core, [request("bad", PROMPTS[0], adapters, (("a", 1e39),)), good])
    later = run(core, [request(f"l{i}", prompt, adapters) for i, prompt in enumerate(PROMPTS * 2)])

    assert [type(o) for o in first["bad"]] == [RequestFailed]
    assert tokens_of(first["good"]) == oracle.greedy((("b", 1.0),), PROMPTS[0], 6)
    for i, prompt in enumerate(PROMPTS * 2):
        assert tokens_of(later[f"l{i}"]) == oracle.greedy((), prompt, 6)
    assert all(layer.isfinite().all() for layer in cache_of(core).layers.values())


def test_a_fetched_adapter_waits_for_room_in_a_full_host_tier(
    adapters: Adapters, oracle: Oracle
) -> None:
    core = build_core({k: adapters[k] for k in "ab"}, host=2)
    admission = core.adapters
    assert admission is not None
    by_digest = {adapter.digest: adapter for adapter in adapters.values()}
    admission._path_of[adapters["c"].digest] = "some/folder"
    admission._fetch = lambda digest, _path: admission.finish_fetch(
        digest, admission.manager.prepare(by_digest[digest])
    )
    requests = [request(f"r{k}", PROMPTS[0], adapters, ((k, 1.0),), max_tokens=40) for k in "abc"]

    ended = run(core, requests)

    for k in "abc":
        assert tokens_of(ended[f"r{k}"]) == oracle.greedy(((k, 1.0),), PROMPTS[0], 40)
    assert core.scheduler.num_preemptions >= 1


def test_an_unknown_version_ends_only_its_own_request(adapters: Adapters, oracle: Oracle) -> None:
    core = build_core(adapters)
    lost = GenerationRequest(
        request_id="lost",
        prompt_token_ids=(1, 2),
        sampling=SamplingParams(max_tokens=3),
        adapters=(AdapterUse(digest="f" * 64),),
    )

    outputs = run(core, [lost, request("base", PROMPTS[3], adapters)])

    (failed,) = outputs["lost"]
    assert isinstance(failed.error, UnknownAdapterError)
    assert tokens_of(outputs["base"]) == oracle.greedy((), PROMPTS[3], 6)


def test_a_stop_token_ends_the_answer_and_is_its_last_token(
    adapters: Adapters, oracle: Oracle
) -> None:
    expected = oracle.greedy((), PROMPTS[0], 6)
    core = build_core(adapters)

    outputs = run(
        core, [request("r", PROMPTS[0], adapters, stop_token_ids=frozenset({expected[2]}))]
    )["r"]

    assert tokens_of(outputs) == expected[: expected.index(expected[2]) + 1]
    assert last(outputs).finish_reason is FinishReason.STOP
    assert outputs[-1].stop_token_id == expected[2]


def test_a_fetched_adapter_starts_the_requests_that_wait_for_it(
    adapters: Adapters, oracle: Oracle
) -> None:
    core = build_core({k: adapters[k] for k in "ab"})
    assert core.adapters is not None
    asked: list[tuple[str, str]] = []
    core.adapters._fetch = lambda digest, path: asked.append((digest, path))
    late = adapters["c"]
    core.adapters._path_of[late.digest] = "some/folder"
    core.submit(request("late", PROMPTS[0], adapters, (("c", 1.0),)))

    with torch.inference_mode():
        outputs, is_idle = core.step()
    assert (outputs, is_idle) == ([], True)
    assert asked == [(late.digest, "some/folder")]
    core.adapters.finish_fetch(late.digest, core.adapters.manager.prepare(late))

    ended = run(core, [request("base", PROMPTS[1], adapters)])
    assert tokens_of(ended["late"]) == oracle.greedy((("c", 1.0),), PROMPTS[0], 6)
    assert tokens_of(ended["base"]) == oracle.greedy((), PROMPTS[1], 6)


def test_a_failed_fetch_ends_the_requests_that_wait_for_it(adapters: Adapters) -> None:
    core = build_core({k: adapters[k] for k in "ab"})
    assert core.adapters is not None
    late = adapters["c"]
    core.adapters._path_of[late.digest] = "some/folder"
    core.submit(request("late", PROMPTS[0], adapters, (("c", 1.0),)))
    core.step()
    core.adapters.finish_fetch(late.digest, OSError("disk gone"))

    outputs, _ = core.step()

    (failed,) = outputs
    assert isinstance(failed, RequestFailed)
    assert "disk gone" in str(failed.error)
    assert not core.has_work


def test_s6_adapters_of_waiting_requests_are_fetched_while_they_wait(adapters: Adapters) -> None:
    core = build_core({"a": adapters["a"]}, slots=1)
    admission = core.adapters
    assert admission is not None
    asked: list[str] = []
    admission._fetch = lambda digest, _path: asked.append(digest)
    for name in "bc":
        admission._path_of[adapters[name].digest] = "some/folder"
    requests = [request(f"r{k}", PROMPTS[0], adapters, ((k, 1.0),)) for k in "abc"]
    for one in requests:
        core.submit(one)

    with torch.inference_mode():
        core.step()
        core.step()

    assert asked == [adapters[name].digest for name in "bc"]
    assert core.stats().num_waiting_for_load == 2
    assert core.stats().num_waiting_for_slot == 0


def test_s114_requests_that_wait_for_a_slot_are_counted_apart(adapters: Adapters) -> None:
    core = build_core(adapters, slots=1, wait=1e9)
    for k in "ab":
        core.submit(request(f"r{k}", PROMPTS[0], adapters, ((k, 1.0),), max_tokens=20))
    core.submit(request("base", PROMPTS[0], adapters, max_tokens=2))

    with torch.inference_mode():
        for _ in range(8):  # the first slot is being written meanwhile
            core.step()

    stats = core.stats()
    assert (stats.num_running, stats.num_waiting) == (1, 1)
    assert (stats.num_waiting_for_slot, stats.num_waiting_for_load) == (1, 0)


def test_a_large_adapter_is_written_between_the_steps_of_the_others(
    adapters: Adapters, oracle: Oracle
) -> None:
    """The clock of this engine ticks with every look, so that a slot takes several steps."""
    core = build_core(adapters, slots=2)
    core.submit(request("base", PROMPTS[3], adapters, max_tokens=30))
    with torch.inference_mode():
        core.step()
    core.submit(request("a", PROMPTS[0], adapters, (("a", 1.0),)))

    steps = 0
    with torch.inference_mode():
        core.step()
        while core.stats().num_waiting_for_slot:
            stats = core.stats()
            assert stats.cache is not None
            assert (stats.num_running, stats.cache.slots_placing) == (1, 1)
            core.step()
            steps += 1
    ended = run(core, [])

    assert steps >= 2
    assert tokens_of(ended["a"])[-1] == oracle.greedy((("a", 1.0),), PROMPTS[0], 6)[-1]


def test_c46_an_adapter_that_cannot_be_written_ends_its_own_request_by_name(
    adapters: Adapters, oracle: Oracle
) -> None:
    core = build_core({k: adapters[k] for k in "ab"})
    assert core.adapters is not None
    prepared = core.adapters.manager.prepare(adapters["c"])
    spoiled = SlotContent(slices=((torch.ones(1, 32), torch.ones(VOCAB + 1, 1)),))
    bad = replace(prepared, contents={**prepared.contents, "lm_head": spoiled})
    core.adapters.add(adapters["c"].digest, bad, "unused", name="spoiled")
    good = request("good", PROMPTS[0], adapters, (("a", 1.0),))

    outputs = run(core, [good, request("bad", PROMPTS[0], adapters, (("c", 1.0),))])

    (failed,) = outputs["bad"]
    assert isinstance(failed, RequestFailed)
    assert "'spoiled' could not be written into its slot" in str(failed.error)
    assert tokens_of(outputs["good"]) == oracle.greedy((("a", 1.0),), PROMPTS[0], 6)
    stats = core.stats().cache
    assert stats is not None
    assert (stats.num_leases, stats.slots_placing, stats.device.load_failures) == (0, 0, 1)


def test_c53_retiring_an_adapter_frees_its_kept_blocks_and_no_others(adapters: Adapters) -> None:
    core = build_core(adapters)
    run(core, [request("base", PROMPTS[0], adapters)])
    kept = core.stats().kv_blocks_kept
    run(core, [request("a", PROMPTS[0], adapters, (("a", 1.0),))])
    assert core.stats().kv_blocks_kept > kept

    core.retire(adapters["a"].digest)

    assert core.stats().kv_blocks_kept == kept


def test_usage_tells_who_waits_who_runs_and_who_was_found_in_a_slot(adapters: Adapters) -> None:
    core = build_core(adapters, slots=1)
    a, b = adapters["a"].digest, adapters["b"].digest
    run(core, [request("first", PROMPTS[0], adapters, (("a", 1.0),))])

    core.submit(request("two", PROMPTS[0], adapters, (("a", 1.0),), n=2))
    core.submit(request("other", PROMPTS[1], adapters, (("b", 1.0),)))
    queued = core.usage()
    with torch.inference_mode():
        core.step()
        started = core.usage()
        core.abort_all()

    assert queued == {a: AdapterUsage(waiting=2), b: AdapterUsage(waiting=1)}
    # The second answer waits for the first one's prompt, and b for a's slot.
    assert started[a] == AdapterUsage(hits=1, waiting=1, running=1)
    assert started[b] == AdapterUsage(waiting=1)
    core.retire(a)
    assert a not in core.usage()


@pytest.fixture
def engine(adapters: Adapters) -> Iterator[Engine[EngineCore]]:
    engine = Engine(build_core(adapters, budget=64))
    engine.start()
    yield engine
    engine.stop()


def test_a_reader_that_is_behind_gets_all_it_missed_in_one_output(
    engine: Engine[EngineCore], adapters: Adapters
) -> None:
    wanted = request("r", PROMPTS[0], adapters, max_tokens=6, logprobs=1)

    async def main() -> list[EngineOutput]:
        stream = engine.generate(wanted)
        outputs = [await anext(stream)]
        while engine.call(lambda core: core.is_known("r")).result():
            pass  # nothing is awaited: the event loop does not turn
        engine.stop()  # returns when the last output has been handed to the loop
        return outputs + [output async for output in stream]

    outputs = asyncio.run(main())

    alone = run(build_core(adapters), [request("r", PROMPTS[0], adapters, max_tokens=6)])["r"]
    assert len(outputs) <= 2
    assert tokens_of(outputs) == tokens_of(alone)
    reported = [
        item.token_id for output in map(sequence_output, outputs) for item in output.logprobs
    ]
    assert reported == tokens_of(alone)
    assert last(outputs).finish_reason is FinishReason.LENGTH


def test_streams_of_many_requests_come_back_over_the_event_loop(
    engine: Engine[EngineCore], adapters: Adapters, oracle: Oracle
) -> None:
    async def collect(one: GenerationRequest) -> list[EngineOutput]:
        return [output async for output in engine.generate(one)]

    async def main() -> list[list[EngineOutput]]:
        wanted = [
            request(f"r{i}", PROMPTS[i % 4], adapters, CHOICES[i % 4], max_tokens=4)
            for i in range(12)
        ]
        return await asyncio.gather(*(collect(one) for one in wanted))

    results = asyncio.run(main())

    for i, outputs in enumerate(results):
        assert tokens_of(outputs) == oracle.greedy(CHOICES[i % 4], PROMPTS[i % 4], 4)
        assert last(outputs).finish_reason is FinishReason.LENGTH


def test_closing_a_stream_early_frees_its_blocks_and_its_lease(
    engine: Engine[EngineCore], adapters: Adapters
) -> None:
    async def main() -> None:
        long = request("long", PROMPTS[0], adapters, (("a", 1.0),), max_tokens=150)
        async with aclosing(engine.generate(long)) as outputs:
            async for _ in outputs:
                break

    asyncio.run(main())

    stats = engine.snapshot()
    assert stats.num_running == stats.num_waiting == stats.kv_blocks_used == 0
    assert leases(stats) == 0


def test_shutdown_ends_running_streams_and_refuses_new_ones(
    engine: Engine[EngineCore], adapters: Adapters
) -> None:
    async def main() -> list[EngineOutput]:
        outputs: list[EngineOutput] = []
        async for output in engine.generate(request("long", PROMPTS[0], adapters, max_tokens=150)):
            outputs.append(output)
            if len(outputs) == 1:
                engine.begin_shutdown()
        with pytest.raises(NotReadyError):
            await anext(engine.generate(request("new", [1], adapters)))
        return outputs

    outputs = asyncio.run(main())

    assert last(outputs).finish_reason is FinishReason.ABORT
    assert len(outputs) < 150
