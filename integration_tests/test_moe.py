"""Experts of five families under adapters of every form, eight at a time beside the base.

Within 1e-4 of PEFT in float32, or of the base with merged weights where PEFT has no such form.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest
import torch
from parity.formats import TOKENS, run
from parity.moe import (
    HIDDEN,
    INNER,
    MOE_BASES,
    NUM_EXPERTS,
    MadeAdapter,
    clone,
    make_all,
)

from lora_layers import AdapterMismatchError, LoraModelConfig, LoraModelManager, RowRun
from lora_server.model.families import PACKED_MODULES
from lora_weights import load_adapter
from lora_weights.testing import write_adapter

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from torch import Tensor, nn

TOLERANCE = 1e-4


@dataclass(frozen=True, kw_only=True)
class Family:
    """A base and its adapters."""

    base: nn.Module
    logits: Tensor
    """Of the base."""
    adapters: dict[str, MadeAdapter]


@pytest.fixture(scope="module", params=MOE_BASES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    """Make each family once."""
    base = MOE_BASES[request.param]
    adapters = make_all(base, tmp_path_factory.mktemp("moe"))
    model = base.build()
    return Family(base=model, logits=run(model), adapters=adapters)


def wrap(model: nn.Module, *, max_loras: int, shared_outer: bool = False) -> LoraModelManager:
    """Wrap a copy of a base."""
    config = LoraModelConfig(
        max_loras=max_loras,
        max_lora_rank=8,
        packed_modules=PACKED_MODULES,
        moe_shared_loras=shared_outer,
    )
    return LoraModelManager(clone(model), config)


def answer(manager: LoraModelManager, names: Sequence[str | None]) -> list[Tensor]:
    """Run the input once for each name in one batch; None is the base."""
    rows = [
        RowRun(num_rows=TOKENS.numel(), adapters=() if name is None else ((name, 1.0),))
        for name in names
    ]
    with manager.acquire({name for name in names if name is not None}), torch.inference_mode():
        manager.set_routing(rows, rows)
        logits: Tensor = manager.model(input_ids=TOKENS.repeat(len(names), 1)).logits
    return list(torch.split(logits.flatten(0, 1), TOKENS.numel()))


def test_a_batch_of_all_forms_equals_each_alone_under_peft_or_merged_weights(
    family: Family,
) -> None:
    names = list(family.adapters)[-8:]
    manager = wrap(family.base, max_loras=len(names))
    for name in names:
        manager.register(name, manager.prepare(load_adapter(family.adapters[name].folder)))

    found = answer(manager, [None, *names, None])

    for name, logits in zip(names, found[1:-1], strict=True):
        expected = family.adapters[name].logits
        assert float((logits - expected).abs().max()) < TOLERANCE, name
        assert float((expected - family.logits).abs().max()) > 100 * TOLERANCE, name
    for logits in (found[0], found[-1]):
        assert float((logits - family.logits).abs().max()) < TOLERANCE


def test_an_adapter_of_attention_alone_leaves_the_experts_to_the_base(family: Family) -> None:
    manager = wrap(family.base, max_loras=1)
    prepared = manager.prepare(load_adapter(family.adapters["attention"].folder))
    manager.register("attention", prepared)

    (found,) = answer(manager, ["attention"])

    assert not any(path.endswith("experts") for path in prepared.contents)
    assert float((found - family.adapters["attention"].logits).abs().max()) < TOLERANCE


def test_slots_for_shared_outer_factors_give_the_same_and_refuse_the_others(
    family: Family,
) -> None:
    manager = wrap(family.base, max_loras=2, shared_outer=True)
    adapter = load_adapter(family.adapters["shared-outer"].folder)
    manager.register("shared", manager.prepare(adapter))

    base, found = answer(manager, [None, "shared"])

    assert float((found - family.adapters["shared-outer"].logits).abs().max()) < TOLERANCE
    assert float((base - family.logits).abs().max()) < TOLERANCE
    assert manager.slot_bytes < wrap(family.base, max_loras=1).slot_bytes
    with pytest.raises(AdapterMismatchError, match="moe_shared_loras"):
        manager.prepare(load_adapter(family.adapters["per-expert"].folder))


def test_c29_experts_of_another_number_or_size_are_refused_and_nothing_remains(
    family: Family, tmp_path: Path
) -> None:
    manager = wrap(family.base, max_loras=1)
    path = next(path for path in manager.shapes if path.endswith("experts"))
    sizes = {
        "too-many": {f"{path}.{NUM_EXPERTS}.down_proj": (INNER, HIDDEN)},
        "too-wide": {f"{path}.0.down_proj": (INNER + 1, HIDDEN)},
    }
    for name, modules in sizes.items():
        adapter = load_adapter(write_adapter(tmp_path / name, modules, r=2))

        with pytest.raises(AdapterMismatchError, match=re.escape(path)):
            manager.prepare(adapter)
    assert manager.keys() == ()
