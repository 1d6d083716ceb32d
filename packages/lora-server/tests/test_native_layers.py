"""Native parts of decoder layers: against float64, and against transformers' own modules."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import nn

from lora_kernels.native import why_not_native
from lora_server.model.attention_step import DecodeGroup
from lora_server.model.native.attention import decode_tokens, write_tokens
from lora_server.model.native.kernels import LayerKernels, load_layer_kernels
from lora_server.model.native.layers import use_native_layers

FAMILIES = {
    "llama": ("LlamaConfig", {"norms": 5, "gated MLPs": 2, "rotary embeddings": 2}),
    "mistral": ("MistralConfig", {"norms": 5, "gated MLPs": 2, "rotary embeddings": 2}),
    "qwen3": ("Qwen3Config", {"norms": 9, "gated MLPs": 2, "rotary embeddings": 2}),
    # Its norms add one to their weight, and its MLP has another activation.
    "gemma": ("GemmaConfig", {"norms": 0, "gated MLPs": 0, "rotary embeddings": 2}),
    "gpt2": ("GPT2Config", {"norms": 0, "gated MLPs": 0, "rotary embeddings": 0}),
}
DTYPES = [torch.float32, torch.bfloat16]


def load(dtype: torch.dtype) -> LayerKernels:
    kernels = load_layer_kernels(dtype)
    assert kernels is not None
    return kernels


def tiny(config: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    sizes = {
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
    }
    made = getattr(transformers, config)(**sizes)
    model = transformers.AutoModelForCausalLM.from_config(made)  # type: ignore[no-untyped-call]
    model = model.to(dtype).eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    return model


def test_kernels_exist_for_two_dtypes_only() -> None:
    assert load_layer_kernels(torch.float16) is None


if why_not_native() is None:

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("family", FAMILIES)
    def test_a_model_with_fast_forms_computes_what_it_did(family: str, dtype: torch.dtype) -> None:
        config, counts = FAMILIES[family]
        model = tiny(config, dtype)
        ids = torch.randint(0, 64, (1, 9))
        with torch.inference_mode():
            before = model(input_ids=ids, use_cache=False).logits.float()
            assert use_native_layers(model, load(dtype)) == counts
            after = model(input_ids=ids, use_cache=False).logits.float()
        tolerance = 1e-5 if dtype == torch.float32 else 0.03
        assert (before - after).abs().max() <= tolerance * before.abs().max()

    def test_other_models_of_the_process_keep_their_own_functions() -> None:
        first, second = tiny("LlamaConfig", torch.float32), tiny("LlamaConfig", torch.float32)
        module = transformers.models.llama.modeling_llama
        function = module.apply_rotary_pos_emb
        use_native_layers(first, load(torch.float32))
        assert module.apply_rotary_pos_emb is function
        assert all("forward" not in vars(part) for part in second.modules())

    def test_a_module_that_only_looks_like_a_norm_keeps_its_forward() -> None:
        class Halved(transformers.models.llama.modeling_llama.LlamaRMSNorm):
            def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
                return super().forward(hidden_states) / 2

        norm = Halved(64)
        counts = use_native_layers(norm, load(torch.float32))
        assert counts["norms"] == 0
        assert "forward" not in vars(norm)

    def test_modules_of_another_dtype_are_left_alone() -> None:
        model = tiny("LlamaConfig", torch.float16)
        assert set(use_native_layers(model, load(torch.float32)).values()) == {0}

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize(
        ("num_heads", "num_kv_heads", "width"),
        [(9, 3, 64), (4, 4, 16), (8, 1, 48), (32, 4, 128), (6, 2, 256), (10, 2, 80)],
    )
    @pytest.mark.parametrize("window", [None, 7])
    @pytest.mark.parametrize("has_rows", [False, True])
    def test_decoding_attends_to_what_each_token_may_see(
        dtype: torch.dtype,
        num_heads: int,
        num_kv_heads: int,
        width: int,
        window: int | None,
        *,
        has_rows: bool,
    ) -> None:
        torch.manual_seed(num_heads * width)
        size, block_size, longest = 5, 16, 50
        per_sequence = -(-longest // block_size)
        store = torch.randn(24, block_size, 2, num_kv_heads, width).to(dtype)
        blocks = torch.randperm(24)[: size * per_sequence]
        positions = torch.tensor([0, 15, 16, 30, longest - 1])
        rows = torch.randperm(size + 3)[:size] if has_rows else None
        query = torch.randn(size + 3, num_heads, width).to(dtype)
        out = torch.zeros_like(query)
        group = DecodeGroup(
            rows=rows, blocks=blocks, blocks_per_sequence=per_sequence, positions=positions
        )

        decode_tokens(load(dtype), query, out, store, group, scaling=0.2, window=window)

        tables = blocks.view(size, per_sequence)
        used = list(range(size)) if rows is None else rows.tolist()
        for index, row in enumerate(used):
            stored = store[tables[index]].flatten(0, 1)[: int(positions[index]) + 1].double()
            stored = stored if window is None else stored[-window:]
            key, value = stored.repeat_interleave(num_heads // num_kv_heads, dim=2).unbind(1)
            logits = torch.einsum("lhd,hd->hl", key, query[row].double()) * 0.2
            exact = torch.einsum("hl,lhd->hd", logits.softmax(-1), value)
            tolerance = 3e-6 if dtype == torch.float32 else 0.01
            torch.testing.assert_close(out[row].double(), exact, atol=tolerance, rtol=tolerance)
        untouched = [row for row in range(size + 3) if row not in used]
        assert not out[untouched].any()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_keys_and_values_go_to_their_places_and_nowhere_else(dtype: torch.dtype) -> None:
        store = torch.zeros(4, 8, 2, 3, 16, dtype=dtype)
        # As transformers hands them over: heads first, rows strided.
        key, value = (torch.randn(1, 3, 5, 16).to(dtype)[0].transpose(0, 1) for _ in range(2))
        slots = torch.tensor([31, 0, 9, 8, 17])
        write_tokens(load(dtype), store, slots, key, value)
        flat = store.view(32, 2, 3, 16)
        assert torch.equal(flat[slots, 0], key)
        assert torch.equal(flat[slots, 1], value)
        others = [i for i in range(32) if i not in slots.tolist()]
        assert not flat[others].any()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_a_number_that_is_not_finite_stays_in_its_row(dtype: torch.dtype) -> None:
        norm = transformers.models.llama.modeling_llama.LlamaRMSNorm(64).to(dtype)
        mlp = tiny("LlamaConfig", dtype).model.layers[0].mlp
        for module in (norm, mlp):
            x = torch.randn(1, 6, 64).to(dtype)
            with torch.inference_mode():
                counts = use_native_layers(module, load(dtype))
                clean = module(x)
                x[0, 2, 5] = torch.nan
                dirty = module(x)
            assert sum(counts.values()) == 1
            assert dirty[0, 2].isnan().any()
            others = [0, 1, 3, 4, 5]
            assert torch.equal(clean[0, others], dirty[0, others])
