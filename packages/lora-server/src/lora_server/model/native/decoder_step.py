"""StepTable: a step as decoder.cpp reads it, filled once and shared by all layers.

Letters: `T` rows, `W` head width.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from lora_server.model.attention_step import AttentionStep


class _Group(ctypes.Structure):
    _fields_ = (
        ("num_sequences", ctypes.c_int64),
        ("blocks_per_sequence", ctypes.c_int64),
        ("blocks", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("rows", ctypes.c_void_p),
    )


class _Chunk(ctypes.Structure):
    """`attention::Prefill`."""

    _fields_ = (
        ("start", ctypes.c_int64),
        ("num_tokens", ctypes.c_int64),
        ("context", ctypes.c_int64),
        ("blocks", ctypes.c_void_p),
    )


class _Step(ctypes.Structure):
    """`Step` of decoder_layer.h."""

    _fields_ = (
        ("num_rows", ctypes.c_int64),
        ("cosine", ctypes.c_void_p),
        ("sine", ctypes.c_void_p),
        ("token_slots", ctypes.c_void_p),
        ("groups", ctypes.c_void_p),
        ("num_groups", ctypes.c_int64),
        ("chunks", ctypes.c_void_p),
        ("num_chunks", ctypes.c_int64),
        ("routing", ctypes.c_void_p),
    )


class StepTable:
    """The last step's table; whatever it points to is held as long."""

    def __init__(self) -> None:
        self._fields = _Step()
        self._address = ctypes.addressof(self._fields)
        self._step: AttentionStep | None = None
        self._cosine: torch.Tensor | None = None
        self._is_possible = False
        self._held: list[object] = []

    def address(
        self,
        step: AttentionStep,
        num_rows: int,
        angles: tuple[torch.Tensor, torch.Tensor] | None,
        *,
        width: int,
        routing: int,
    ) -> int | None:
        """Return where the table is, valid until the next call with another step.

        Args:
            step: which row belongs to which sequence.
            num_rows: `T`.
            angles: cosines and sines, `[1, T, W]` bfloat16 each; None leaves them out.
            width: `W`.
            routing: address of `lora::Step`; 0 where no adapter adds anything.

        Returns:
            None where the rotary embedding is none that the kernel takes.
        """
        cosine = None if angles is None else angles[0]
        if step is not self._step or cosine is not self._cosine:
            self._is_possible = angles is None or _are_plain(angles, num_rows, width)
            if self._is_possible:
                self._fill(step, num_rows, angles)
            self._step, self._cosine = step, cosine
        if not self._is_possible:
            return None
        self._fields.routing = routing or None
        return self._address

    def _fill(
        self, step: AttentionStep, num_rows: int, angles: tuple[torch.Tensor, torch.Tensor] | None
    ) -> None:
        groups = (_Group * len(step.decode))()
        for group, decode in zip(groups, step.decode, strict=True):
            group.num_sequences = decode.num_sequences
            group.blocks_per_sequence = decode.blocks_per_sequence
            group.blocks = decode.blocks.data_ptr()
            group.positions = decode.positions.data_ptr()
            group.rows = None if decode.rows is None else decode.rows.data_ptr()
        chunks = (_Chunk * len(step.prefill))()
        for chunk, prefill in zip(chunks, step.prefill, strict=True):
            chunk.start = prefill.start
            chunk.num_tokens = prefill.num_tokens
            chunk.context = prefill.context
            chunk.blocks = prefill.blocks.data_ptr()
        fields = self._fields
        fields.num_rows = num_rows
        self._held = [groups, chunks, step]
        if angles is not None:
            cosine, sine = (part.contiguous() for part in angles)
            fields.cosine, fields.sine = cosine.data_ptr(), sine.data_ptr()
            self._held += [cosine, sine]
        fields.token_slots = step.token_slots.data_ptr()
        fields.groups, fields.num_groups = ctypes.addressof(groups), len(groups)
        fields.chunks, fields.num_chunks = ctypes.addressof(chunks), len(chunks)


def _are_plain(angles: tuple[torch.Tensor, torch.Tensor], num_rows: int, width: int) -> bool:
    return all(
        part.shape == (1, num_rows, width) and part.dtype is torch.bfloat16 and part.is_cpu
        for part in angles
    )
