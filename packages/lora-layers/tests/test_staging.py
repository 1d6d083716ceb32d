"""Values on their way to the device: every tensor once, nothing else changed, no copy on a CPU."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from lora_layers.staging import Stager, map_tensors


@dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A value with tensors at several depths."""

    name: str
    pairs: tuple[tuple[Tensor, Tensor] | None, ...]
    extra: Tensor | None = None


def test_every_tensor_is_replaced_once_wherever_it_is() -> None:
    shared, other = torch.ones(2), torch.zeros(3)
    value = MappingProxyType(
        {"x": Part(name="x", pairs=((shared, other), None)), "y": [shared, 7, "text"]}
    )
    seen: list[Tensor] = []

    def double(tensor: Tensor) -> Tensor:
        seen.append(tensor)
        return tensor * 2

    mapped = map_tensors(value, double)

    assert [id(tensor) for tensor in seen] == [id(shared), id(other)]
    part, listed = mapped["x"], mapped["y"]
    assert isinstance(part, Part)
    assert isinstance(listed, list)
    assert (part.name, part.extra, part.pairs[1]) == ("x", None, None)
    assert part.pairs[0] is not None
    assert part.pairs[0][0] is listed[0]
    assert listed[0].tolist() == [2.0, 2.0]
    assert listed[1:] == [7, "text"]
    assert shared.tolist() == [1.0, 1.0]


def test_on_a_cpu_nothing_is_copied_and_everything_is_there_at_once() -> None:
    stager = Stager(torch.device("cpu"))
    value = Part(name="x", pairs=((torch.ones(2), torch.ones(2)),))

    upload = stager.start(value)
    upload.wait()

    assert stager.pin(value) is value
    assert upload.value is value
    assert upload.is_done()
