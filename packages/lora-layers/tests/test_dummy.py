"""Adapters of zeros: a part for every module, one set of tensors for all of them."""

from __future__ import annotations

import torch

from lora_layers import LoraModelConfig, LoraModelManager
from lora_layers.testing import PACKED_MODULES, TinyDecoder, content_of, stack_of


def test_dummies_are_named_in_order_and_share_their_tensors(manager: LoraModelManager) -> None:
    dummies = manager.create_dummy_adapters(3)

    assert list(dummies) == ["warmup_1", "warmup_2", "warmup_3"]
    assert len({id(dummy) for dummy in dummies.values()}) == 1


def test_a_dummy_has_a_zero_pair_for_every_slice_of_every_module(
    manager: LoraModelManager,
) -> None:
    dummy = manager.create_dummy_adapters(1)["warmup_1"]

    stacks = manager._injection.stacks
    assert set(dummy.contents) == set(stacks)
    for path in dummy.contents:
        content = content_of(dummy, path)
        assert len(content.slices) == len(stack_of(manager, path).weights.out_features)
        for pair in content.slices:
            assert pair is not None
            assert not torch.cat([pair[0].flatten(), pair[1].flatten()]).any()


def test_the_rank_is_8_or_what_the_slots_allow() -> None:
    ranks = [
        LoraModelManager(
            TinyDecoder(), LoraModelConfig(max_lora_rank=limit, packed_modules=PACKED_MODULES)
        )
        .create_dummy_adapters(1)["warmup_1"]
        .rank
        for limit in (3, 8, 64)
    ]

    assert ranks == [3, 8, 8]
