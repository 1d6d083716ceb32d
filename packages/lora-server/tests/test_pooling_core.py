"""The pooling engine over tiny real models; the oracle is transformers with merged weights."""

from __future__ import annotations

import asyncio
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    MPNetConfig,
    MPNetForSequenceClassification,
)

from lora_layers import LoraModelConfig, LoraModelManager
from lora_server.config import Task
from lora_server.engine.admission import AdapterAdmission
from lora_server.engine.messages import RequestFailed
from lora_server.engine.pooling_core import PoolingCore
from lora_server.engine.pooling_driver import PoolingEngine
from lora_server.engine.pooling_request import PoolingKind, PoolingOutput, PoolingRequest
from lora_server.engine.pooling_scheduler import PoolingLimits
from lora_server.engine.request import AdapterUse
from lora_server.errors import (
    EngineError,
    InvalidRequestError,
    NotReadyError,
    UnknownAdapterError,
)
from lora_server.model.pooling_load import load_pooler
from lora_weights import RawAdapter, load_adapter, save_adapter

if TYPE_CHECKING:
    from pathlib import Path

    from transformers import PreTrainedTokenizerFast

    from lora_server.model.pooling_model import LoadedPooler

HIDDEN = 16
SIZES: dict[str, Any] = {
    "vocab_size": 320,
    "hidden_size": HIDDEN,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "max_position_embeddings": 60,
    "num_labels": 3,
}
LABELS = {"a": 2, "b": 5}
TEXTS = [(5, 6, 7), (8, 9, 10, 11, 12, 13, 14), (15, 16, 17, 18), (9, 8, 7)]
PREFIX = "base_model.model."


def normal(*shape: int, seed: int) -> torch.Tensor:
    """Return random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) * 0.3


class World:
    """A model, two adapters with heads, and merged copies of the model."""

    def __init__(self, kind: Any, config: Any, folder: Path, tokenizer: Any) -> None:
        torch.manual_seed(0)
        model = kind(config)
        model.save_pretrained(folder / "base")
        tokenizer.save_pretrained(folder / "base")
        self.model = load_pooler(str(folder / "base"), Task.CLASSIFY, dtype="float32")
        self.merged: dict[str | None, Any] = {None: model.eval()}
        self.prefix, self.is_bert = model.base_model_prefix, kind is BertForSequenceClassification
        self.admission = AdapterAdmission(
            LoraModelManager(
                self.model.module,
                LoraModelConfig(max_loras=2, max_labels=5, logits_modules=self.model.head_paths),
            ),
            host_capacity=4,
            fetch=lambda _digest, _path: None,
        )
        self.digests: dict[str, str] = {}
        for seed, name in enumerate(LABELS, start=1):
            self._add(name, folder / name, seed * 100)

    def core(self, **limits: int) -> PoolingCore:
        """Return an engine over the model."""
        values = {"max_num_seqs": 8, "max_num_batched_tokens": 100} | limits
        return PoolingCore(
            model=self.model,
            adapters=self.admission,
            limits=PoolingLimits(**values),
            clock=lambda: 1.0,
        )

    def request(
        self,
        text: tuple[int, ...],
        adapter: str | None = None,
        *,
        kind: PoolingKind = PoolingKind.LOGITS,
        name: str = "",
        scale: float = 1.0,
    ) -> PoolingRequest:
        """Return a request."""
        digest = self.digests.get(adapter, adapter) if adapter else ""
        uses = (AdapterUse(digest=digest, scale=scale),) if adapter else ()
        return PoolingRequest(
            request_id=name or f"{adapter}-{text}-{kind}",
            token_ids=text,
            type_ids=(0,) * len(text),
            kind=kind,
            adapters=uses,
        )

    def expected(self, text: tuple[int, ...], adapter: str | None, kind: PoolingKind) -> Any:
        """Return transformers' answer for one text alone."""
        ids = torch.tensor([text])
        with torch.inference_mode():
            if kind is PoolingKind.LOGITS:
                return self.merged[adapter](input_ids=ids).logits[0].numpy()
            body = self.merged[adapter].base_model
            pooled = body(input_ids=ids).last_hidden_state[0].mean(dim=0)
            return (pooled / pooled.norm()).numpy()

    def _add(self, name: str, folder: Path, seed: int) -> None:
        """Write an adapter, register it, and merge it into a copy of the base."""
        part = "attention.self.query" if self.is_bert else "attention.attn.q"
        paths = [f"{self.prefix}.encoder.layer.{i}.{part}" for i in range(2)]
        label = "classifier" if self.is_bert else "classifier.out_proj"
        tensors = {}
        merged = deepcopy(self.merged[None])
        for i, path in enumerate(paths):
            a, b = normal(2, HIDDEN, seed=seed + i), normal(HIDDEN, 2, seed=seed + 10 + i)
            tensors[f"{PREFIX}{path}.lora_A.weight"] = a
            tensors[f"{PREFIX}{path}.lora_B.weight"] = b
            merged.get_submodule(path).weight.data += 2.0 * b @ a
        weight, bias = normal(LABELS[name], HIDDEN, seed=seed + 20), normal(LABELS[name], seed=seed)
        tensors |= {f"{PREFIX}{label}.weight": weight, f"{PREFIX}{label}.bias": bias}
        layer = merged.get_submodule(label)
        layer.weight, layer.bias = torch.nn.Parameter(weight), torch.nn.Parameter(bias)
        if not self.is_bert:
            dense = merged.get_submodule("classifier.dense")
            tensors[f"{PREFIX}classifier.dense.weight"] = dense.weight.detach().clone()
            tensors[f"{PREFIX}classifier.dense.bias"] = dense.bias.detach().clone()
        config = {
            "peft_type": "LORA",
            "task_type": "SEQ_CLS",
            "r": 2,
            "lora_alpha": 4,
            "target_modules": [part.rpartition(".")[2]],
            "modules_to_save": ["classifier"],
        }
        adapter = load_adapter(save_adapter(RawAdapter(config=config, tensors=tensors), folder))
        prepared = self.admission.manager.prepare(adapter)
        self.admission.add(adapter.digest, prepared, str(folder), name=name)
        self.digests[name] = adapter.digest
        self.merged[name] = merged


@pytest.fixture
def bert(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> World:
    """Return a BERT, whose batches are packed."""
    return World(BertForSequenceClassification, BertConfig(**SIZES), tmp_path, tokenizer)


@pytest.fixture
def mpnet(tmp_path: Path, tokenizer: PreTrainedTokenizerFast) -> World:
    """Return an MPNet, whose batches are padded."""
    return World(MPNetForSequenceClassification, MPNetConfig(**SIZES), tmp_path, tokenizer)


@pytest.fixture(params=["bert", "mpnet"])
def world(request: pytest.FixtureRequest) -> World:
    """Return either."""
    made: World = request.getfixturevalue(request.param)
    return made


@torch.inference_mode()
def finish(core: PoolingCore) -> list[PoolingOutput | RequestFailed]:
    """Step until nothing waits."""
    outputs: list[PoolingOutput | RequestFailed] = []
    for _ in range(50):
        if not core.has_work:
            return outputs
        outputs += core.step()[0]
    raise AssertionError("the engine does not end")


def test_logits_and_embeddings_of_all_adapters_share_a_step_and_equal_merged_weights(
    world: World,
) -> None:
    core = world.core()
    plan = [
        (text, adapter, kind)
        for text, adapter in zip(TEXTS, ("a", "b", None, "a"), strict=True)
        for kind in PoolingKind
    ]
    for text, adapter, kind in plan:
        core.submit(world.request(text, adapter, kind=kind))

    outputs = {output.request_id: output for output in finish(core)}

    assert len(outputs) == len(plan)
    for text, adapter, kind in plan:
        output = outputs[f"{adapter}-{text}-{kind}"]
        assert isinstance(output, PoolingOutput)
        found = output.values[0] if kind is PoolingKind.LOGITS else output.values
        np.testing.assert_allclose(found, world.expected(text, adapter, kind), atol=1e-5)
    assert not core.is_known("a")


def test_a_row_that_is_not_finite_ends_its_own_request(bert: World) -> None:
    core = bert.core()
    table = bert.model.module.get_submodule("bert.embeddings.word_embeddings").weight
    assert isinstance(table, torch.Tensor)
    table[TEXTS[1][0]] = float("nan")
    for name, text in (("good", TEXTS[0]), ("bad", TEXTS[1])):
        core.submit(bert.request(text, "a", name=name))

    outputs = {output.request_id: output for output in finish(core)}

    failed = outputs["bad"]
    assert isinstance(failed, RequestFailed)
    assert "not a finite number" in str(failed.error)
    assert isinstance(outputs["good"], PoolingOutput)
    assert bert.admission.manager.can_admit(list(bert.digests.values()))


def test_a_step_that_fails_is_run_again_text_by_text(bert: World) -> None:
    core = bert.core()
    core.submit(bert.request(TEXTS[0], "a", name="good"))
    core.submit(bert.request((400,), name="bad"))  # no such token: the embedding refuses it

    outputs = {output.request_id: output for output in finish(core)}

    failed = outputs["bad"]
    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, EngineError)
    good = outputs["good"]
    assert isinstance(good, PoolingOutput)
    expected = bert.expected(TEXTS[0], "a", PoolingKind.LOGITS)
    np.testing.assert_allclose(good.values[0], expected, atol=1e-5)


def test_a_head_at_another_scale_is_the_callers_mistake(bert: World) -> None:
    core = bert.core()
    core.submit(bert.request(TEXTS[0], "a", scale=0.5))

    (failed,) = finish(core)

    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, InvalidRequestError)


def test_an_adapter_that_is_gone_ends_the_request(bert: World) -> None:
    core = bert.core()
    core.submit(bert.request(TEXTS[0], "nobody"))

    (failed,) = finish(core)

    assert isinstance(failed, RequestFailed)
    assert isinstance(failed.error, UnknownAdapterError)


def test_aborting_gives_everything_back(bert: World) -> None:
    core = bert.core()
    core.submit(bert.request(TEXTS[0], "a", name="one"))
    core.submit(bert.request(TEXTS[1], "b", name="two"))

    assert core.stats().waiting_adapters == tuple(sorted(bert.digests.values()))
    assert len(core.abort("one")) == 1
    assert core.abort("one") == []
    assert [output.request_id for output in core.abort_all()] == ["two"]

    stats = core.stats()
    assert (stats.num_waiting, stats.num_running, stats.kv_blocks_total) == (0, 0, 0)
    assert stats.prompt_tokens == len(TEXTS[0]) + len(TEXTS[1])
    core.reset_statistics()
    assert core.stats().prompt_tokens == 0


def test_a_claimed_slot_is_had_between_two_steps(bert: World) -> None:
    core = bert.core()
    done: list[str] = []

    outcome = core.claim_slot(bert.digests["a"], lambda: done.append("a"))
    finish(core)

    assert outcome.result(timeout=1) is None
    assert done == ["a"]
    core.retire(bert.digests["a"])
    core.rest()
    assert bert.digests["a"] not in bert.admission.manager


def test_without_adapters_the_whole_width_is_the_bases(bert: World) -> None:
    model: LoadedPooler = bert.model
    bert.admission.manager.set_routing((), ())
    core = PoolingCore(
        model=model,
        adapters=None,
        limits=PoolingLimits(max_num_seqs=4, max_num_batched_tokens=50),
        clock=lambda: 0.0,
    )
    core.submit(bert.request(TEXTS[0]))

    (output,) = finish(core)

    assert isinstance(output, PoolingOutput)
    assert output.values.shape == (1, 3)
    assert core.stats().cache is None


def test_the_engines_thread_answers_fails_and_ends(bert: World) -> None:
    engine = PoolingEngine(bert.core())
    engine.start()

    async def main() -> list[Any]:
        requests = [bert.request(text, "b", name=str(i)) for i, text in enumerate(TEXTS)]
        answers: list[Any] = await asyncio.gather(*(engine.pool(r) for r in requests))
        with pytest.raises(UnknownAdapterError):
            await engine.pool(bert.request(TEXTS[0], "nobody"))
        engine.begin_shutdown()
        with pytest.raises(NotReadyError):
            await engine.pool(bert.request(TEXTS[0]))
        return answers

    try:
        answers = asyncio.run(main())
    finally:
        engine.stop()

    for text, answer in zip(TEXTS, answers, strict=True):
        expected = bert.expected(text, "b", PoolingKind.LOGITS)
        np.testing.assert_allclose(answer.values[0], expected, atol=1e-5)
