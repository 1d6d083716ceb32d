"""Copies of an adapter on their way to the device: page-locked on the host, then beside the steps.

Knows tensors wherever they are in a value; nothing of slots or adapters. On a CPU nothing is
copied: host memory is where the slots are.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.cuda import Event

T = TypeVar("T")


class Upload(Generic[T]):
    """A value on its way to the device."""

    __slots__ = ("_event", "_source", "value")

    def __init__(self, value: T, *, source: T, event: Event | None) -> None:
        """Hold `source` until the copies out of its memory are done."""
        self.value = value
        """What arrives; its tensors may be read by kernels once `is_done`."""
        self._source: T | None = source
        self._event = event

    def is_done(self) -> bool:
        """Whether everything has arrived; does not wait."""
        if self._event is not None and self._event.query():  # type: ignore[no-untyped-call]
            self._event = self._source = None
        return self._event is None

    def wait(self) -> None:
        """Block until everything has arrived."""
        if self._event is not None:
            self._event.synchronize()


class Stager:
    """Brings values to one device on a stream of its own."""

    def __init__(self, device: torch.device) -> None:
        """Copy to `device`; only CUDA devices have memory apart from the host's."""
        self._device = device
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def pin(self, value: T) -> T:
        """Return a value with its host tensors in page-locked memory, each tensor once.

        The last step of a preparation: copies out of such memory need no CPU and block nobody.
        Any thread may call it. On a CPU the value comes back as it is.
        """
        if self._stream is None:
            return value
        return map_tensors(value, _pinned)

    def start(self, value: T) -> Upload[T]:
        """Start copying a value to the device, beside what the current stream computes."""
        stream = self._stream
        if stream is None:
            return Upload(value, source=value, event=None)
        current = torch.cuda.current_stream(self._device)

        def copy(tensor: Tensor) -> Tensor:
            arrived = tensor.to(self._device, non_blocking=True)
            # Made on one stream and read on the other: its memory must outlive both.
            arrived.record_stream(current)
            return arrived

        with torch.cuda.stream(stream):
            arriving = map_tensors(value, copy)
            event = stream.record_event()
        return Upload(arriving, source=value, event=event)


def map_tensors(value: T, function: Callable[[Tensor], Tensor]) -> T:
    """Return a copy of a value with every tensor in it replaced, each tensor once.

    Args:
        value: a tensor, or dataclasses, mappings, lists and tuples around tensors; anything else
            is kept.
        function: what becomes of a tensor. One that occurs twice stays one.
    """
    mapped: T = _map(value, function, {})
    return mapped


def _map(value: Any, function: Callable[[Tensor], Tensor], done: dict[int, Tensor]) -> Any:
    if isinstance(value, Tensor):
        if id(value) not in done:
            done[id(value)] = function(value)
        return done[id(value)]
    if isinstance(value, Mapping):
        return {key: _map(item, function, done) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return type(value)(_map(item, function, done) for item in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = [field.name for field in dataclasses.fields(value) if field.init]
        items = {name: _map(getattr(value, name), function, done) for name in fields}
        return dataclasses.replace(value, **items)
    return value


def _pinned(tensor: Tensor) -> Tensor:
    return tensor.pin_memory() if tensor.device.type == "cpu" else tensor
