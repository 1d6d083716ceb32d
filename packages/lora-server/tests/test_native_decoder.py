"""Whole decoder layers as one kernel: against merged weights in float64, alone and in company."""

from __future__ import annotations

import json
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import (
    AutoModelForCausalLM,
    GemmaConfig,
    GraniteConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)
from transformers.modeling_outputs import CausalLMOutput

from lora_kernels import Backend
from lora_kernels.native import PackedProduct, why_not_native
from lora_layers import LoraModelConfig, LoraModelManager, RowRun
from lora_server.model.attention import PagedAttention
from lora_server.model.attention_step import AttentionStep, DecodeGroup, PrefillChunk
from lora_server.model.families import PACKED_MODULES
from lora_server.model.kv_cache import KvCache
from lora_server.model.native.decoder import DecoderLayer, DecoderStack
from lora_server.model.native.forward import NativeForward
from lora_server.model.native.fuse import fuse_layers
from lora_server.model.native.kernels import load_layer_kernels
from lora_server.model.native.layers import use_native_layers
from lora_weights import load_adapter
from lora_weights.testing import llama_modules, write_adapter

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from lora_server.model.greedy import Largest

AUTO_MODEL: Any = AutoModelForCausalLM  # its functions have no annotations
BLOCK, BLOCKS_EACH, LAYERS = 16, 4, 2
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 128,
    "intermediate_size": 160,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "tie_word_embeddings": False,
}
FUSED: dict[str, Any] = {
    "llama": LlamaConfig(**SIZES),
    "mistral-window": MistralConfig(**SIZES, sliding_window=7),
    "qwen2-biases": Qwen2Config(**SIZES),
    "qwen3-head-norms": Qwen3Config(**SIZES),
}
NOT_FUSED: dict[str, Any] = {
    # Norms that add one to their weight; residuals with a factor.
    "gemma": GemmaConfig(**SIZES),
    "granite": GraniteConfig(**SIZES, residual_multiplier=0.5),
}
MODULES = llama_modules(num_layers=LAYERS, hidden=128, inter=160, kv=64)
RANKS = {"a": 16, "b": 5}


def has_tiles() -> bool:
    if why_not_native() is not None:
        return False
    try:
        PackedProduct(torch.zeros(16, 32, dtype=torch.bfloat16))
    except RuntimeError:
        return False
    return True


@dataclass(kw_only=True)
class Row:
    """Tokens of one sequence in a step: its number, its adapters, tokens before, tokens."""

    sequence: int
    adapters: tuple[tuple[str, float], ...]
    context: int
    tokens: list[int]


class Swollen(LlamaForCausalLM):  # type: ignore[no-untyped-call]
    """A model that multiplies what passes from layer to layer."""

    def forward(self, input_ids: Any, position_ids: Any = None, **_options: Any) -> Any:
        if position_ids is None:
            position_ids = torch.arange(input_ids.shape[1]).unsqueeze(0)
        states = self.model.embed_tokens(input_ids)
        angles = self.model.rotary_emb(states, position_ids=position_ids)
        for layer in self.model.layers:
            states = layer(states, position_embeddings=angles, position_ids=position_ids) * 1.5
        return CausalLMOutput(logits=self.lm_head(self.model.norm(states)))


class Served:
    """A bfloat16 model with LoRA over paged keys and values, and the same weights in float64."""

    def __init__(
        self, config: Any, folder: Path, *, max_loras: int = 2, kind: Any = AUTO_MODEL
    ) -> None:
        torch.manual_seed(3)
        make = kind._from_config if kind is not AUTO_MODEL else kind.from_config
        self.exact = make(deepcopy(config), attn_implementation="sdpa").eval()
        for parameter in self.exact.parameters():
            nn.init.normal_(parameter, std=0.09)
            parameter.data = parameter.data.bfloat16().double()
        self.attention = PagedAttention()
        name = self.attention.name
        self.model = make(deepcopy(config), attn_implementation=name)
        self.model = self.model.bfloat16().eval().requires_grad_(requires_grad=False)
        self.model.load_state_dict(self.exact.state_dict())
        with torch.inference_mode():
            ids = torch.zeros((1, 1), dtype=torch.int64)
            self.model(input_ids=ids, position_ids=ids, use_cache=False)
        kernels = load_layer_kernels(torch.bfloat16)
        assert kernels is not None
        use_native_layers(self.model, kernels)
        self.attention.kernels = kernels
        self.manager = LoraModelManager(
            self.model,
            LoraModelConfig(
                max_loras=max_loras,
                max_lora_rank=16,
                packed_modules=PACKED_MODULES,
                backend=Backend.NATIVE,
                prepack_linear=True,
            ),
        )
        self.num_fused = fuse_layers(self.model, self.attention, torch.bfloat16)
        self.attention.cache = KvCache(
            self.attention.seen,
            num_blocks=8 * BLOCKS_EACH,
            block_size=BLOCK,
            dtype=torch.bfloat16,
            device=torch.device("cpu"),
        )
        self.paths: dict[str, Path] = {}
        for seed, (key, rank) in enumerate(RANKS.items()):
            self.add(key, write_adapter(folder / key, MODULES, r=rank, seed=seed, std=0.08))

    @property
    def stack(self) -> DecoderStack:
        forward = self.model.model.layers[0].forward
        assert isinstance(forward, DecoderLayer)
        return forward.stack

    def add(self, key: str, path: Path) -> None:
        self.paths[key] = path
        adapter = load_adapter(path, dtype=torch.bfloat16, max_rank=16)
        self.manager.register(key, self.manager.prepare(adapter))

    @contextmanager
    def _ready(
        self, rows: Sequence[Row], kept: torch.Tensor | None = None
    ) -> Iterator[dict[str, torch.Tensor]]:
        """Set a step's adapters and places; yield its input."""
        keys = {key for row in rows for key, _ in row.adapters}
        with torch.inference_mode(), self.manager.acquire(keys):
            runs = [RowRun(num_rows=len(r.tokens), adapters=r.adapters) for r in rows]
            heads = runs  # which rows of logits are whose
            if kept is not None:
                heads = [RowRun(num_rows=len(kept), adapters=rows[0].adapters)]
            self.manager.set_routing(runs, heads)
            self.attention.step = lay_out(rows)
            places = [row.context + i for row in rows for i in range(len(row.tokens))]
            yield {
                "input_ids": torch.tensor([[token for row in rows for token in row.tokens]]),
                "position_ids": torch.tensor([places]),
            }

    def step(self, rows: Sequence[Row], kept: torch.Tensor | None = None) -> list[torch.Tensor]:
        """Run one step; return the logits of each sequence's tokens, or of the kept rows."""
        wanted = 0 if kept is None else kept
        with self._ready(rows, kept) as inputs:
            logits = self.model(**inputs, use_cache=False, logits_to_keep=wanted).logits[0]
        return (
            [logits] if kept is not None else list(logits.split([len(row.tokens) for row in rows]))
        )

    def largest(self, rows: Sequence[Row]) -> Largest | None:
        """Run one step; return the largest logits of all its tokens, if the kernels find them."""
        assert isinstance(self.model.forward, NativeForward)
        with self._ready(rows) as inputs:
            kept = torch.arange(inputs["input_ids"].shape[1])
            return self.model.forward.largest(**inputs, kept=kept)

    @torch.inference_mode()
    def expected(self, adapters: tuple[tuple[str, float], ...], tokens: list[int]) -> torch.Tensor:
        """Return the logits of merged weights."""
        merged = deepcopy(self.exact)
        for key, scale in adapters:
            config = json.loads((self.paths[key] / "adapter_config.json").read_text())
            factors = load_file(self.paths[key] / "adapter_model.safetensors")
            scaling = scale * config["lora_alpha"] / config["r"]
            embedding = "base_model.model.model.embed_tokens.lora_embedding_{}"
            if embedding.format("A") in factors:
                a, b = (factors[embedding.format(letter)].bfloat16().double() for letter in "AB")
                merged.model.embed_tokens.weight += scaling * (b @ a).T
            for path in MODULES:
                name = f"base_model.model.{path}.lora_{{}}.weight"
                a, b = (factors[name.format(letter)].bfloat16().double() for letter in "AB")
                module = merged.get_submodule(path)
                module.weight += scaling * (b @ a)
                bias = factors.get(f"base_model.model.{path}.lora_B.bias")
                if bias is not None:
                    module.bias = nn.Parameter(scaling * bias.bfloat16().double())
        logits: torch.Tensor = merged(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
        return logits


def write_with_bias(folder: Path, path: str) -> Path:
    """Write an adapter with `lora_bias`, large in one module and zero in the others."""
    write_adapter(folder, MODULES, r=4, seed=9, std=0.08, lora_bias=True)
    weights = folder / "adapter_model.safetensors"
    factors = load_file(weights)
    for module, (_, out) in MODULES.items():
        bias = torch.full((out,), 0.5 if module == path else 0.0)
        factors[f"base_model.model.{module}.lora_B.bias"] = bias
    save_file(factors, weights)
    return folder


def blocks_of(sequence: int) -> list[int]:
    return [sequence * BLOCKS_EACH + (i * 3 + 1) % BLOCKS_EACH for i in range(BLOCKS_EACH)]


def lay_out(rows: Sequence[Row]) -> AttentionStep:
    slots: list[int] = []
    singles: list[tuple[int, Row]] = []
    chunks: list[PrefillChunk] = []
    for row in rows:
        blocks, start = blocks_of(row.sequence), len(slots)
        places = range(row.context, row.context + len(row.tokens))
        slots += [blocks[place // BLOCK] * BLOCK + place % BLOCK for place in places]
        if len(row.tokens) == 1:
            singles.append((start, row))
        else:
            chunk = PrefillChunk(
                start=start,
                num_tokens=len(row.tokens),
                context=row.context,
                blocks=torch.tensor(blocks),
            )
            chunks.append(chunk)
    decode = DecodeGroup(
        rows=torch.tensor([start for start, _ in singles]),
        blocks=torch.tensor([blocks_of(row.sequence) for _, row in singles]).flatten(),
        blocks_per_sequence=BLOCKS_EACH,
        positions=torch.tensor([row.context for _, row in singles]),
    )
    return AttentionStep(
        token_slots=torch.tensor(slots), decode=(decode,) * bool(singles), prefill=tuple(chunks)
    )


def tokens(count: int, seed: int) -> list[int]:
    """Return token ids, never the last one of the vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 95, (count,), generator=generator).tolist()


def check(found: torch.Tensor, exact: torch.Tensor) -> None:
    """Compare with room for some forty roundings to eight bits on the way."""
    assert (found.double() - exact).abs().max() <= 0.05 * exact.abs().max()


if has_tiles():

    @pytest.fixture(params=FUSED, scope="module")
    def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Served:
        return Served(FUSED[request.param], tmp_path_factory.mktemp("adapters"))

    USES = [(("a", 1.0),), (), (("b", 0.5),)]

    def test_prompts_and_single_tokens_of_a_mixed_batch_are_those_of_merged_weights(
        served: Served,
    ) -> None:
        assert served.num_fused == LAYERS
        assert isinstance(served.model.forward, NativeForward)
        prompts = [tokens(count, seed) for seed, count in enumerate((19, 30, 3))]
        exact = [served.expected(use, prompt) for use, prompt in zip(USES, prompts, strict=True)]
        before = served.stack.num_calls
        rows = [
            Row(sequence=i, adapters=use, context=0, tokens=prompt[:-2])
            for i, (use, prompt) in enumerate(zip(USES, prompts, strict=True))
        ]
        for logits, wanted in zip(served.step(rows), exact, strict=True):
            check(logits, wanted[: len(logits)])
        for at in (-2, -1):  # two steps of one token each
            rows = [
                Row(
                    sequence=i,
                    adapters=use,
                    context=len(prompt) + at,
                    tokens=[prompt[at]],
                )
                for i, (use, prompt) in enumerate(zip(USES, prompts, strict=True))
            ]
            for logits, wanted in zip(served.step(rows), exact, strict=True):
                check(logits[0], wanted[at])
        assert served.stack.num_calls == before + 3

    def test_a_row_has_the_same_bits_alone_and_in_company(served: Served) -> None:
        prompts = [tokens(count, seed) for seed, count in enumerate((21, 40, 33, 18), start=7)]
        uses = [*USES, (("a", 1.0),)]
        alone = []
        for i, (use, prompt) in enumerate(zip(uses, prompts, strict=True)):
            first = Row(sequence=i, adapters=use, context=0, tokens=prompt[:-1])
            last = Row(sequence=i, adapters=use, context=len(prompt) - 1, tokens=prompt[-1:])
            alone.append(torch.cat([served.step([first])[0], served.step([last])[0]]))
        # In company, cut elsewhere, and one a step behind the others.
        found: list[list[torch.Tensor]] = [[] for _ in prompts]
        for begin, end in ((0, 5), (5, 16), (16, 17), (17, 39), (39, 40)):
            rows = [
                Row(sequence=i, adapters=use, context=begin, tokens=part)
                for i, (use, prompt) in enumerate(zip(uses, prompts, strict=True))
                if (part := prompt[begin:end])
            ]
            for row, logits in zip(rows, served.step(rows), strict=True):
                found[row.sequence].append(logits)
        for wanted, parts in zip(alone, found, strict=True):
            assert torch.equal(torch.cat(parts)[0], wanted[0])
            check(torch.cat(parts), wanted.double())

    def test_a_step_of_so_many_rows_that_threads_keep_to_their_own_has_the_bits_of_small_ones(
        served: Served,
    ) -> None:
        uses = [USES[i % 3] for i in (0, 1, 2, 2, 0, 1, 1, 0)]
        counts = (60, 57, 64, 33, 61, 64, 50, 62)
        rows = [
            Row(sequence=i, adapters=use, context=0, tokens=tokens(count, i))
            for i, (use, count) in enumerate(zip(uses, counts, strict=True))
        ]
        alone = [served.step([row])[0] for row in rows]
        before = served.stack.num_calls
        for found, wanted in zip(served.step(rows), alone, strict=True):
            assert torch.equal(found, wanted)
        assert served.stack.num_calls == before + 1

    def test_weighted_sets_go_through_the_layers_own_forward(served: Served) -> None:
        use, prompt = (("a", 0.5), ("b", 1.5)), tokens(20, 5)
        before = served.stack.num_calls
        (logits,) = served.step([Row(sequence=0, adapters=use, context=0, tokens=prompt)])
        check(logits, served.expected(use, prompt))
        assert served.stack.num_calls == before

    def test_an_adapter_in_anothers_former_slot_answers_for_itself(tmp_path: Path) -> None:
        served = Served(FUSED["llama"], tmp_path, max_loras=1)
        prompt = tokens(9, 1)
        before = served.stack.num_calls
        for key in ("a", "b", "a", "b"):
            row = Row(sequence=0, adapters=((key, 1.0),), context=0, tokens=prompt)
            check(served.step([row])[0], served.expected(row.adapters, prompt))
        assert served.stack.num_calls == before + 4

    def test_steps_of_adapters_that_come_again_answer_as_before(served: Served) -> None:
        uses = [USES[0], (), USES[2], (("a", 1.0),), (("a", 0.5), ("b", 1.5))]
        rows = [
            Row(sequence=i, adapters=use, context=0, tokens=tokens(count, i))
            for i, (use, count) in enumerate(zip(uses, (9, 17, 9, 4, 9), strict=True))
        ]
        exact = [served.expected(row.adapters, row.tokens) for row in rows]
        for group in ([0], [1], [2], [3], [4], [0, 1], [3, 1], [2], [0], [4], [1], [0, 2], [2, 3]):
            for logits, number in zip(
                served.step([rows[number] for number in group]), group, strict=True
            ):
                check(logits, exact[number])

    def test_an_adapter_with_a_bias_takes_only_its_own_steps_out_of_the_kernel(
        tmp_path: Path,
    ) -> None:
        served = Served(FUSED["llama"], tmp_path, max_loras=3)
        served.add("c", write_with_bias(tmp_path / "c", "model.layers.0.self_attn.q_proj"))
        prompt = tokens(9, 1)
        plain, biased = (
            Row(sequence=i, adapters=((key, 1.0),), context=0, tokens=prompt)
            for i, key in enumerate("ac")
        )
        before = served.stack.num_calls
        for logits, row in zip(served.step([plain, biased]), (plain, biased), strict=True):
            check(logits, served.expected(row.adapters, prompt))
        assert served.stack.num_calls == before
        check(served.step([plain])[0], served.expected(plain.adapters, prompt))
        assert served.stack.num_calls == before + 1

    def test_an_adapter_that_changes_embeddings_takes_them_from_the_module(tmp_path: Path) -> None:
        served = Served(FUSED["llama"], tmp_path, max_loras=3)
        tables = {"model.embed_tokens": (96, 128)}
        served.add(
            "e", write_adapter(tmp_path / "e", MODULES, r=6, seed=5, std=0.08, embeddings=tables)
        )
        rows = [
            Row(sequence=i, adapters=use, context=0, tokens=tokens(19, i))
            for i, use in enumerate(((("e", 1.0),), (), (("a", 1.0),)))
        ]
        before = served.stack.num_calls
        for logits, row in zip(served.step(rows), rows, strict=True):
            check(logits, served.expected(row.adapters, row.tokens))
        assert served.stack.num_calls == before + 1

    def test_only_the_rows_that_are_wanted_reach_the_logits(served: Served) -> None:
        row = Row(sequence=0, adapters=(("a", 1.0),), context=0, tokens=tokens(21, 3))
        (every,) = served.step([row])
        kept = torch.tensor([20, 3, 7])
        before = served.stack.num_calls
        (some,) = served.step([row], kept)
        assert torch.equal(some, every[kept])
        assert served.stack.num_calls == before + 1

    def test_the_largest_logits_are_those_of_merged_weights(served: Served) -> None:
        rows = [
            Row(sequence=i, adapters=use, context=0, tokens=tokens(count, i))
            for i, (use, count) in enumerate(zip(USES, (19, 1, 30), strict=True))
        ]
        found = served.largest(rows)
        assert found is not None
        assert found.is_finite
        logits = torch.cat(served.step(rows))
        assert found.token_ids == [int((row == row.max()).nonzero()[0]) for row in logits]
        exact = torch.cat([served.expected(row.adapters, row.tokens) for row in rows])
        chosen = exact[torch.arange(len(exact)), torch.tensor(found.token_ids)]
        assert (exact.amax(1) - chosen).max() <= 0.05 * exact.abs().max()

    def test_logits_that_an_adapter_changes_are_left_to_the_head(tmp_path: Path) -> None:
        served = Served(FUSED["llama"], tmp_path, max_loras=3)
        modules = {**MODULES, "lm_head": (128, 96)}
        served.add("h", write_adapter(tmp_path / "h", modules, r=4, seed=3, std=0.08))
        own, base = (
            Row(sequence=i, adapters=use, context=0, tokens=tokens(5, 1))
            for i, use in enumerate(((("h", 1.0),), ()))
        )
        assert served.largest([own, base]) is None
        assert served.largest([base]) is not None

    def test_a_token_that_is_none_of_the_vocabulary_is_refused(served: Served) -> None:
        row = Row(sequence=0, adapters=(), context=0, tokens=[*tokens(8, 3), 96])
        with pytest.raises(IndexError):
            served.step([row])

    def test_a_row_that_is_not_finite_reaches_no_other_sequence(tmp_path: Path) -> None:
        served = Served(FUSED["llama"], tmp_path)
        rows = [
            Row(sequence=i, adapters=use, context=0, tokens=tokens(18, i))
            for i, use in enumerate(USES)
        ]
        clean = served.step(rows)
        served.model.model.embed_tokens.weight.data[95] = torch.nan
        rows[1].tokens[4] = 95
        dirty = served.step(rows)
        assert dirty[1][4:].isnan().all()
        for i in (0, 2):
            assert torch.equal(clean[i], dirty[i])

    @pytest.mark.parametrize("family", NOT_FUSED)
    def test_layers_that_compute_something_else_keep_their_forward(
        family: str, tmp_path: Path
    ) -> None:
        served = Served(NOT_FUSED[family], tmp_path)
        assert served.num_fused == 0
        prompt = tokens(12, 2)
        row = Row(sequence=0, adapters=(("a", 1.0),), context=0, tokens=prompt)
        check(served.step([row])[0], served.expected(row.adapters, prompt))

    def test_a_model_that_does_something_between_layers_runs_them_one_by_one(
        tmp_path: Path,
    ) -> None:
        served = Served(FUSED["llama"], tmp_path, kind=Swollen)
        assert served.num_fused == LAYERS
        assert not isinstance(served.model.forward, NativeForward)
        before = served.stack.num_calls
        prompt = tokens(12, 2)
        row = Row(sequence=0, adapters=(("a", 1.0),), context=0, tokens=prompt)
        check(served.step([row])[0], served.expected(row.adapters, prompt))
        assert served.stack.num_calls == before + LAYERS
