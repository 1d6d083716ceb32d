"""Tensors sorted by module: placed, or named."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lora_weights import AdapterConfig
from lora_weights.inventory import take_inventory
from lora_weights.tensor_format import TensorEntry

CONFIG = AdapterConfig(r=2, lora_alpha=2.0)


def entry(key: str) -> TensorEntry:
    return TensorEntry(key, "F32", (2, 2), 0, 16)


def test_pairs_come_sorted_by_module_whatever_the_order_of_the_keys() -> None:
    keys = [f"{name}.lora_{part}.weight" for name in ("b", "a.c", "a.b") for part in "BA"]

    inventory = take_inventory(map(entry, keys), CONFIG)

    assert [pair.module for pair in inventory.pairs] == ["a.b", "a.c", "b"]
    assert inventory.problems == ()


def test_pairs_on_expert_parameters_are_kept_apart_by_their_nesting() -> None:
    paths = ("mlp.experts", "mlp.experts.base_layer", "mlp.experts.0.up_proj", "q_proj")
    keys = [f"{path}.lora_{part}.weight" for path in paths for part in "AB"]

    inventory = take_inventory(map(entry, keys), CONFIG)

    assert inventory.problems == ()
    assert {path: sorted(pairs) for path, pairs in inventory.experts.items()} == {
        "mlp.experts": ["", "base_layer"]
    }
    assert [pair.module for pair in inventory.pairs] == ["mlp.experts.0.up_proj", "q_proj"]


def test_embedding_and_linear_factors_do_not_mix() -> None:
    inventory = take_inventory([entry("e.lora_A.weight"), entry("e.lora_embedding_B")], CONFIG)

    assert inventory.pairs == ()
    assert "a mixed pair" in inventory.problems[0].found


PIECES = st.sampled_from(
    [
        "q",
        "experts",
        "base_layer",
        "lora_A",
        "lora_B",
        "lora_embedding_A",
        "weight",
        "bias",
        "alpha",
    ]
)


@given(st.sets(st.lists(PIECES, min_size=1, max_size=5).map(".".join), max_size=8))
def test_every_tensor_is_in_a_pair_or_a_copy_or_named(keys: set[str]) -> None:
    inventory = take_inventory(map(entry, sorted(keys)), CONFIG)

    placed = {e.key for pair in inventory.pairs for e in (pair.lora_a, pair.lora_b)}
    placed |= {e.key for entries in inventory.modules for e in entries.parts.values()}
    placed |= {e.key for copies in inventory.base_copies.values() for e in copies.values()}
    placed |= {
        e.key
        for pairs in inventory.experts.values()
        for p in pairs.values()
        for e in (p.lora_a, p.lora_b)
    }
    placed |= {e.key for pair in inventory.duplicates for e in pair}
    text = "\n".join(f"{p} {p.module}" for p in inventory.problems)
    for key in keys - placed:
        assert key in text or key.rpartition(".lora_")[0] in text
