"""load_adapter: the numbers against float64 arithmetic, and what an adapter holds."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import pytest
import torch

from lora_weights import (
    UnsafeFormatError,
    load_adapter,
    save_adapter,
)
from lora_weights.save import RawAdapter
from lora_weights.testing import build_raw_adapter, llama_modules, pair_of, write_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from pathlib import Path

    from lora_weights import Adapter

MODULES = llama_modules()
Q = "model.layers.0.self_attn.q_proj"
A = f"base_model.model.{Q}.lora_A.weight"
B = f"base_model.model.{Q}.lora_B.weight"


def changed(
    raw: RawAdapter,
    *,
    drop: Collection[str] = (),
    add: dict[str, torch.Tensor] | None = None,
    **config: object,
) -> RawAdapter:
    tensors = {key: tensor for key, tensor in raw.tensors.items() if key not in drop}
    return RawAdapter(config={**raw.config, **config}, tensors={**tensors, **(add or {})})


def assert_product(
    adapter: Adapter, raw: RawAdapter, scaling: Callable[[str], float], tolerance: float = 1e-6
) -> None:
    for path in adapter.parts:
        pair = pair_of(adapter.parts, path)
        stored_a = raw.tensors[f"base_model.model.{path}.lora_A.weight"].double()
        stored_b = raw.tensors[f"base_model.model.{path}.lora_B.weight"].double()
        exact = scaling(path) * stored_b @ stored_a
        found = pair.lora_b.double() @ pair.lora_a.double()
        assert torch.allclose(
            found, exact, rtol=tolerance, atol=tolerance * exact.abs().max().item()
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_the_product_is_that_of_float64_arithmetic(tmp_path: Path, dtype: torch.dtype) -> None:
    raw = build_raw_adapter(MODULES, r=6, alpha=7.0, dtype=dtype)

    adapter = load_adapter(save_adapter(raw, tmp_path))

    assert set(adapter.parts) == set(MODULES)
    assert all(pair_of(adapter.parts, path).lora_b.dtype == dtype for path in MODULES)
    assert_product(adapter, raw, lambda _: 7 / 6, tolerance=2 * torch.finfo(dtype).eps)


def test_rslora_and_patterns_enter_the_product(tmp_path: Path) -> None:
    raw = build_raw_adapter(
        MODULES,
        r=4,
        alpha=3.0,
        use_rslora=True,
        rank_pattern={"q_proj": 9, r"model\.layers\.1\..*": 2},
        alpha_pattern={Q: 5.0, "up_proj": 1.0},
    )

    adapter = load_adapter(save_adapter(raw, tmp_path))

    def scaling(path: str) -> float:
        rank = 9 if path.endswith("q_proj") else 2 if ".1." in path else 4
        alpha = 5.0 if path == Q else 1.0 if path.endswith("up_proj") else 3.0
        return alpha / math.sqrt(rank)

    assert adapter.rank == 9
    assert pair_of(adapter.parts, Q).rank == 9
    assert_product(adapter, raw, scaling)


def test_rslora_equals_its_twin_with_a_larger_alpha(tmp_path: Path) -> None:
    rslora = write_adapter(tmp_path / "a", MODULES, r=16, alpha=16, use_rslora=True)
    twin = write_adapter(tmp_path / "b", MODULES, r=16, alpha=64)

    first, second = load_adapter(rslora), load_adapter(twin)

    for path in MODULES:
        assert torch.equal(pair_of(first.parts, path).lora_b, pair_of(second.parts, path).lora_b)
    assert first.digest != second.digest


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16])
def test_scaling_is_folded_in_float32_before_the_cast(tmp_path: Path, stored: torch.dtype) -> None:
    raw = build_raw_adapter({"q_proj": (64, 64)}, r=8, alpha=10, dtype=stored)

    adapter = load_adapter(save_adapter(raw, tmp_path), dtype=torch.bfloat16)
    pair = pair_of(adapter.parts, "q_proj")

    exact = raw.tensors["base_model.model.q_proj.lora_B.weight"].double() * 1.25
    # One rounding to bfloat16 (7 stored bits): half a unit in the last place.
    bound = exact.abs() * (2.0**-8 + 1e-6)
    assert pair.lora_b.dtype == pair.lora_a.dtype == torch.bfloat16
    assert torch.all((pair.lora_b.double() - exact).abs() <= bound)


def test_float64_is_held_in_float32(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, {"q_proj": (8, 8)}, dtype=torch.float64)

    assert pair_of(load_adapter(folder).parts, "q_proj").lora_a.dtype == torch.float32


def test_embedding_pairs_keep_pefts_form(tmp_path: Path) -> None:
    raw = build_raw_adapter({"lm_head": (64, 128)}, r=4, alpha=4, embeddings={"embed": (128, 64)})

    adapter = load_adapter(save_adapter(raw, tmp_path))

    pair = pair_of(adapter.parts, "embed")
    assert pair.is_embedding
    assert (tuple(pair.lora_a.shape), tuple(pair.lora_b.shape)) == ((4, 128), (64, 4))
    assert not pair_of(adapter.parts, "lm_head").is_embedding


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: key.removeprefix("base_model.model."),
        lambda key: f"module.{key}",
        lambda key: key.replace(".weight", ".default.weight"),
        lambda key: key.replace(".weight", ".lora.weight"),
        lambda key: key.replace("model.layers", "model._orig_mod.layers"),
    ],
    ids=["bare", "module", "default", "lora", "compiled"],
)
def test_spellings_of_the_keys_change_neither_parts_nor_digest(
    tmp_path: Path, rename: Callable[[str], str]
) -> None:
    raw = build_raw_adapter(MODULES)
    renamed = RawAdapter(
        config=raw.config, tensors={rename(key): tensor for key, tensor in raw.tensors.items()}
    )

    first = load_adapter(save_adapter(raw, tmp_path / "a"))
    second = load_adapter(save_adapter(renamed, tmp_path / "b"))

    assert first.parts.keys() == second.parts.keys()
    assert first.digest == second.digest


def test_memory_holds_the_tensors_once(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES, r=4)

    adapter = load_adapter(folder)

    pairs = [pair_of(adapter.parts, path) for path in adapter.parts]
    tensors = [tensor for pair in pairs for tensor in (pair.lora_a, pair.lora_b)]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    assert adapter.nbytes == sum(t.nbytes for t in tensors)
    assert sum(storages.values()) == adapter.nbytes


def test_a_copy_of_the_base_weight_is_kept_apart(tmp_path: Path) -> None:
    raw = build_raw_adapter({"lm_head": (8, 16)}, r=2)
    copy = torch.randn(16, 8)
    raw = changed(raw, add={"base_model.model.lm_head.base_layer.weight": copy})

    adapter = load_adapter(save_adapter(raw, tmp_path))

    assert list(adapter.parts) == ["lm_head"]
    (held,) = adapter.base_copies["lm_head"].weights.values()
    assert torch.equal(held, copy)


def test_tensors_outside_target_modules_are_applied(tmp_path: Path) -> None:
    folder = write_adapter(tmp_path, MODULES, target_modules=["nothing"], layers_to_transform=[7])

    assert set(load_adapter(folder).parts) == set(MODULES)


def test_pickle_needs_permission_and_then_gives_the_same_adapter(tmp_path: Path) -> None:
    raw = build_raw_adapter(MODULES)
    folder = save_adapter(raw, tmp_path / "a")
    pickled = save_adapter(raw, tmp_path / "b")
    (pickled / "adapter_model.safetensors").unlink()
    torch.save(dict(raw.tensors), pickled / "adapter_model.bin")

    with pytest.raises(UnsafeFormatError, match=r"adapter_model\.bin"):
        load_adapter(pickled)

    assert load_adapter(pickled, allow_pickle=True).digest == load_adapter(folder).digest
