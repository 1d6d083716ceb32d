"""The engine over a tiny real model: every answer against the model with merged weights."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from copy import deepcopy

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig

from lora_layers import LoraModelConfig, LoraModelManager
from lora_server.engine.admission import AdapterAdmission
from lora_server.engine.driver import Engine
from lora_server.engine.kv import BlockPool
from lora_server.engine.messages import FinishReason, PromptLogprobs, RequestFailed
from lora_server.engine.request import AdapterUse, GenerationRequest, SamplingParams
from lora_server.engine.scheduler import SchedulerLimits
from lora_server.engine.step import EngineCore
from lora_server.errors import NotReadyError, UnknownAdapterError
from lora_server.model.attention import PagedAttention
from lora_server.model.families import PACKED_MODULES
from lora_server.model.kv_cache import KvCache
from lora_server.model.load import LoadedModel
from lora_weights import load_adapter
from lora_weights.testing import write_adapter

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


def base_model():
    torch.manual_seed(11)
    model = AutoModelForCausalLM.from_config(deepcopy(CONFIG), attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.2)
    return model


@pytest.fixture(scope="module")
def adapters(tmp_path_factory):
    """Three adapters on the disk, read."""
    found = {}
    for seed, name in enumerate("abc"):
        folder = tmp_path_factory.mktemp(name)
        write_adapter(folder, TARGETS, r=2 + seed, seed=seed, std=0.2)
        found[name] = load_adapter(folder)
    return found


class Oracle:
    """The base with adapters merged in, recomputed whole for every token."""

    def __init__(self, adapters):
        self.adapters = adapters
        self.models = {}

    def model(self, uses):
        if uses not in self.models:
            model = base_model()
            for name, scale in uses:
                for path, part in self.adapters[name].parts.items():
                    delta = part.pair.lora_b.double() @ part.pair.lora_a.double()
                    weight = model.get_submodule(path).weight
                    weight.data = (weight.double() + scale * delta).float()
            self.models[uses] = model
        return self.models[uses]

    def logprobs(self, uses, tokens):
        with torch.inference_mode():
            logits = self.model(uses)(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return logits.log_softmax(-1)

    def greedy(self, uses, prompt, count):
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.logprobs(uses, tokens)[-1].argmax()))
        return tokens[len(prompt) :]


@pytest.fixture(scope="module")
def oracle(adapters):
    return Oracle(adapters)


def build_core(adapters, *, blocks=64, budget=16, prefixes=True, slots=2, wait=0.05):
    attention = PagedAttention()
    module = base_model()
    module.set_attn_implementation(attention.name)
    with torch.inference_mode():
        one = torch.zeros((1, 1), dtype=torch.int64)
        module(input_ids=one, position_ids=one, use_cache=False)
    model = LoadedModel(
        module=module,
        tokenizer=None,
        attention=attention,
        kv_shapes=tuple(attention.seen[i] for i in range(2)),
        dtype=torch.float32,
        device=torch.device("cpu"),
        vocab_size=VOCAB,
        context_length=256,
        end_token_ids=frozenset(),
    )
    manager = LoraModelManager(
        module,
        LoraModelConfig(max_loras=slots, max_lora_rank=4, packed_modules=PACKED_MODULES),
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
    admission = AdapterAdmission(manager, host_capacity=32, fetch=lambda _digest, _path: None)
    for adapter in adapters.values():
        admission.add(adapter.digest, manager.prepare(adapter), "unused")
    ticks = iter(range(10**9))
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
        clock=lambda: next(ticks) * 1e-3,
    )


def request(name, prompt, adapters, uses=(), **sampling):
    options = {"max_tokens": 6, "temperature": 0.0} | sampling
    n = options.pop("n", 1)
    return GenerationRequest(
        request_id=name,
        prompt_token_ids=tuple(prompt),
        sampling=SamplingParams(**options),
        adapters=tuple(AdapterUse(digest=adapters[a].digest, scale=s) for a, s in uses),
        n=n,
    )


def run(core, requests):
    """Run to the end; the outputs of each request in order."""
    for one in requests:
        core.submit(one)
    outputs = {one.request_id: [] for one in requests}
    with torch.inference_mode():
        for _ in range(2000):
            if not core.has_work:
                break
            for output in core.step()[0]:
                outputs.setdefault(output.request_id, []).append(output)
    assert not core.has_work
    return outputs


def tokens_of(outputs, index=0):
    return [t for o in outputs if getattr(o, "index", None) == index for t in o.token_ids]


PROMPTS = [[5, 9, 2, 40, 7, 7, 3, 1, 12], [5, 9, 2, 40, 8], [1], [60, 61, 62, 63, 64, 65, 66]]
CHOICES = [(), (("a", 1.0),), (("b", 1.0),), (("c", 1.0),), (("a", 0.5), ("b", 0.25))]


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
def test_a_mixed_batch_equals_each_request_alone_with_merged_weights(setting, adapters, oracle):
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
    assert core.stats().cache.num_leases == 0


def test_reported_logprobs_are_the_models(adapters, oracle):
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


def test_prompt_logprobs_alone_need_no_token(adapters):
    core = build_core(adapters)

    outputs = run(core, [request("r", PROMPTS[0], adapters, max_tokens=0, prompt_logprobs=0)])["r"]

    assert len(outputs[0].logprobs) == len(PROMPTS[0]) - 1
    assert outputs[1].finish_reason is FinishReason.LENGTH
    assert tokens_of(outputs) == []


def test_continuations_draw_for_themselves_and_repeat_with_their_seed(adapters):
    make = lambda: request(  # noqa: E731
        "r", PROMPTS[0], adapters, max_tokens=8, temperature=2.0, seed=4, n=3
    )

    first = run(build_core(adapters), [make()])["r"]
    alone = build_core(adapters, budget=64)
    neighbour = request("x", PROMPTS[3], adapters, (("b", 1.0),), max_tokens=20)
    second = run(alone, [make(), neighbour])["r"]

    texts = [tokens_of(first, i) for i in range(3)]
    assert len({tuple(t) for t in texts}) == 3
    assert texts == [tokens_of(second, i) for i in range(3)]


def test_one_requests_failure_leaves_its_neighbours_alone(adapters, oracle):
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


def test_an_unknown_version_ends_only_its_own_request(adapters, oracle):
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


def test_a_stop_token_ends_the_answer_and_is_its_last_token(adapters, oracle):
    expected = oracle.greedy((), PROMPTS[0], 6)
    core = build_core(adapters)

    outputs = run(
        core, [request("r", PROMPTS[0], adapters, stop_token_ids=frozenset({expected[2]}))]
    )["r"]

    assert tokens_of(outputs) == expected[: expected.index(expected[2]) + 1]
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].stop_token_id == expected[2]


def test_a_fetched_adapter_starts_the_requests_that_wait_for_it(adapters, oracle):
    core = build_core({k: adapters[k] for k in "ab"})
    asked = []
    core.adapters._fetch = lambda digest, path: asked.append((digest, path))
    late = adapters["c"]
    core.adapters._path_of[late.digest] = "some/folder"
    core.submit(request("late", PROMPTS[0], adapters, (("c", 1.0),)))

    with torch.inference_mode():
        outputs, is_idle = core.step()
    assert (outputs, is_idle) == ([], True)
    assert asked == [(late.digest, "some/folder")]
    core.adapters.finish_fetch(late.digest, core.adapters.manager.prepare(late))

    outputs = run(core, [request("base", PROMPTS[1], adapters)])
    assert tokens_of(outputs["late"]) == oracle.greedy((("c", 1.0),), PROMPTS[0], 6)
    assert tokens_of(outputs["base"]) == oracle.greedy((), PROMPTS[1], 6)


def test_a_failed_fetch_ends_the_requests_that_wait_for_it(adapters):
    core = build_core({k: adapters[k] for k in "ab"})
    late = adapters["c"]
    core.adapters._path_of[late.digest] = "some/folder"
    core.submit(request("late", PROMPTS[0], adapters, (("c", 1.0),)))
    core.step()
    core.adapters.finish_fetch(late.digest, OSError("disk gone"))

    outputs, _ = core.step()

    assert [type(o) for o in outputs] == [RequestFailed]
    assert "disk gone" in str(outputs[0].error)
    assert not core.has_work


@pytest.fixture
def engine(adapters):
    engine = Engine(build_core(adapters, budget=64))
    engine.start()
    yield engine
    engine.stop()


def test_streams_of_many_requests_come_back_over_the_event_loop(engine, adapters, oracle):
    async def collect(one):
        return [output async for output in engine.generate(one)]

    async def main():
        wanted = [
            request(f"r{i}", PROMPTS[i % 4], adapters, CHOICES[i % 4], max_tokens=4)
            for i in range(12)
        ]
        return wanted, await asyncio.gather(*(collect(one) for one in wanted))

    _, results = asyncio.run(main())

    for i, outputs in enumerate(results):
        assert tokens_of(outputs) == oracle.greedy(CHOICES[i % 4], PROMPTS[i % 4], 4)
        assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_closing_a_stream_early_frees_its_blocks_and_its_lease(engine, adapters):
    async def main():
        long = request("long", PROMPTS[0], adapters, (("a", 1.0),), max_tokens=150)
        async with aclosing(engine.generate(long)) as outputs:
            async for _ in outputs:
                break

    asyncio.run(main())

    stats = engine.snapshot()
    assert stats.num_running == stats.num_waiting == stats.kv_blocks_used == 0
    assert stats.cache.num_leases == 0


def test_shutdown_ends_running_streams_and_refuses_new_ones(engine, adapters):
    async def main():
        outputs = []
        async for output in engine.generate(request("long", PROMPTS[0], adapters, max_tokens=150)):
            outputs.append(output)
            if len(outputs) == 1:
                engine.begin_shutdown()
        with pytest.raises(NotReadyError):
            await anext(engine.generate(request("new", [1], adapters)))
        return outputs

    outputs = asyncio.run(main())

    assert outputs[-1].finish_reason is FinishReason.ABORT
    assert len(outputs) < 150
