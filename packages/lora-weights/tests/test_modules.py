"""Sizes of pairs, parts and adapters."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from lora_weights import Adapter, AdapterConfig, FullModule, LoraPair, ModulePart

PAIR = LoraPair(lora_a=torch.ones(3, 8), lora_b=torch.ones(5, 3))


def test_a_pair_knows_its_sizes() -> None:
    assert (PAIR.rank, PAIR.in_features, PAIR.out_features) == (3, 8, 5)
    assert PAIR.nbytes == 4 * (24 + 15)


def test_a_part_counts_everything_it_has() -> None:
    full = FullModule(weight=torch.ones(2, 3), bias=torch.ones(2))
    part = ModulePart(pair=PAIR, bias=torch.ones(5), magnitude=torch.ones(5))

    assert full.nbytes == 4 * 8
    assert part.nbytes == PAIR.nbytes + 4 * 10
    assert ModulePart(full=full).nbytes == full.nbytes
    assert ModulePart().nbytes == 0


def test_an_adapter_adds_up_its_parts() -> None:
    parts = {"a": ModulePart(pair=PAIR), "b": ModulePart(bias=torch.ones(5))}

    adapter = Adapter(
        config=AdapterConfig(r=3, lora_alpha=3.0), parts=parts, digest="d", source="s"
    )

    assert (adapter.rank, adapter.nbytes) == (3, PAIR.nbytes + 20)


@pytest.mark.parametrize("value", [PAIR, ModulePart(), FullModule(weight=torch.ones(1))])
def test_values_are_frozen(value: LoraPair | ModulePart | FullModule) -> None:
    name = dataclasses.fields(value)[0].name

    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(value, name, None)
