"""Embeddings with slots: equal merged tables in float64, scaled embeddings as PEFT has them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn

from lora_layers import LoraModelConfig, LoraModelManager, RoutingNotSetError
from lora_layers.testing import TinyDecoder, build_adapter, runs
from lora_layers.wrappers.embedding import find_embed_scale

if TYPE_CHECKING:
    from pathlib import Path


class Scaled(nn.Embedding):
    """Multiplies its output by `embed_scale`, as Gemma's embedding does."""

    embed_scale: Tensor

    def __init__(self, num: int, dim: int, embed_scale: float) -> None:
        super().__init__(num, dim)
        self.register_buffer("embed_scale", torch.tensor(embed_scale), persistent=False)

    def forward(self, ids: Tensor) -> Tensor:
        """Look up and scale."""
        return super().forward(ids) * self.embed_scale


@pytest.mark.parametrize("shape", [(6,), (1, 6), (2, 3)])
def test_a_mixed_batch_equals_merged_tables(shape: tuple[int, ...], tmp_path: Path) -> None:
    model = TinyDecoder()
    table = model.embed_tokens.weight.double()
    built = build_adapter(tmp_path / "a", ["embed_tokens"], r=3, seed=3)
    manager = LoraModelManager(model, LoraModelConfig(max_lora_rank=4))
    manager.register("a", manager.prepare(built.adapter))
    manager.activate("a")
    manager.set_routing(runs((2, "a"), (3, None), (1, "a")), ())
    ids = torch.tensor([5, 31, 5, 0, 7, 5]).view(shape)

    y = model.embed_tokens(ids).view(6, -1)

    merged = table + built.deltas["embed_tokens"]
    rows = ids.reshape(-1)
    torch.testing.assert_close(y[[0, 1, 5]].double(), merged[rows[[0, 1, 5]]])
    assert torch.equal(y[2:5].double(), table[rows[2:5]])


def test_the_scale_of_a_scaled_embedding_multiplies_the_delta_too(tmp_path: Path) -> None:
    model = TinyDecoder()
    scaled = Scaled(32, 16, 4.5)
    scaled.weight.copy_(model.embed_tokens.weight)
    model.embed_tokens = scaled
    table = scaled.weight.double()
    built = build_adapter(tmp_path / "a", ["embed_tokens"], r=3, seed=3)
    manager = LoraModelManager(model, LoraModelConfig(max_lora_rank=4))
    manager.register("a", manager.prepare(built.adapter))
    manager.activate("a")
    manager.set_routing(runs((3, "a")), ())
    ids = torch.tensor([4, 9, 30])

    y = model.embed_tokens(ids)

    expected = 4.5 * (table + built.deltas["embed_tokens"])[ids]
    torch.testing.assert_close(y.double(), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("scale", "found"),
    [(None, 1.0), (3, 3.0), (0.5, 0.5), (torch.tensor([2.5]), 2.5), (torch.ones(2), 1.0)],
)
def test_the_scale_is_a_number_or_a_tensor_of_one_element(scale: object, found: float) -> None:
    module = nn.Embedding(4, 2)
    if scale is not None:
        object.__setattr__(module, "embed_scale", scale)

    assert find_embed_scale(module) == found


def test_a_plain_number_is_rounded_to_the_dtype_of_the_table() -> None:
    module = nn.Embedding(4, 2).bfloat16()
    object.__setattr__(module, "embed_scale", 55.4256)

    assert find_embed_scale(module) == 55.5


def test_an_embedding_that_no_adapter_touches_may_be_called_with_any_rows(tmp_path: Path) -> None:
    model = TinyDecoder()
    model.positions = nn.Embedding(64, 16)
    built = build_adapter(tmp_path / "a", ["embed_tokens"], r=3)
    manager = LoraModelManager(model, LoraModelConfig(max_lora_rank=4))
    manager.register("a", manager.prepare(built.adapter))
    manager.activate("a")
    manager.set_routing(runs((8, "a")), ())

    assert model.positions(torch.arange(4)).shape == (4, 16)
    with pytest.raises(RoutingNotSetError, match="embed_tokens is called with 4 rows"):
        model.embed_tokens(torch.arange(4))
