"""Writing paged keys and values, and attention of a step's rows over them.

Arguments that stay the same go as the fields of a struct, in the order of the headers.

Letters: `T` tokens, `B` sequences, `H` heads, `K` key heads, `D` head width.
"""

from __future__ import annotations

from array import array
from itertools import chain
from typing import TYPE_CHECKING

from lora_server.model.native.kernels import LANES

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from lora_server.model.attention_step import DecodeGroup, PrefillChunk
    from lora_server.model.native.kernels import LayerKernels


def can_attend(store: torch.Tensor) -> bool:
    """Whether the kernels take the head width of a layer's store, `[blocks, size, 2, K, D]`."""
    return store.shape[-1] % LANES == 0


def write_tokens(
    kernels: LayerKernels,
    store: torch.Tensor,
    slots: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
) -> None:
    """Store a step's keys and values.

    Args:
        kernels: those for the store's dtype.
        store: the layer's, `[blocks, block size, 2, K, D]`, contiguous.
        slots: `[T]` int64, `block * block_size + offset` of each token.
        key: `[T, K, D]`, heads contiguous.
        value: as `key`.
    """
    key, value = _with_whole_heads(key), _with_whole_heads(value)
    fields = _fields([*key.shape, *key.stride()[:2], *value.stride()[:2], slots.data_ptr()])
    kernels.write(_address(fields), key.data_ptr(), value.data_ptr(), store.data_ptr())


def decode_tokens(
    kernels: LayerKernels,
    query: torch.Tensor,
    out: torch.Tensor,
    store: torch.Tensor,
    group: DecodeGroup,
    *,
    scaling: float,
    window: int | None,
) -> None:
    """Attend for the group's rows: `softmax(scaling * q k^T) v` over the keys each may see.

    Args:
        kernels: those for the store's dtype.
        query: `[T, H, D]`, all rows of the step.
        out: `[T, H, D]`, of which the group's rows are written.
        store: the layer's, `[blocks, block size, 2, K, D]`, contiguous.
        group: sequences, their blocks and positions.
        scaling: factor on the logits.
        window: keys a token may look back at, itself included; None is all.
    """
    query = _with_whole_heads(query)
    block_size, _, num_kv_heads, width = store.shape[1:]
    fields = _fields(
        [
            group.num_sequences,
            query.shape[1],
            num_kv_heads,
            width,
            block_size,
            group.blocks_per_sequence,
            *query.stride()[:2],
            *out.stride()[:2],
            group.blocks.data_ptr(),
            group.positions.data_ptr(),
            0 if group.rows is None else group.rows.data_ptr(),
            window or 0,
        ]
    )
    kernels.decode(_address(fields), query.data_ptr(), out.data_ptr(), store.data_ptr(), scaling)


def prefill_chunks(
    kernels: LayerKernels,
    query: torch.Tensor,
    out: torch.Tensor,
    store: torch.Tensor,
    chunks: Sequence[PrefillChunk],
    *,
    scaling: float,
    window: int | None,
) -> None:
    """Attend for the chunks' rows, whose own keys and values have been stored before.

    A row's bits depend on its position and on what it sees, not on where chunks are cut.

    Args:
        kernels: those for the store's dtype.
        query: `[T, H, D]`, all rows of the step.
        out: `[T, H, D]`, of which the chunks' rows are written.
        store: the layer's, `[blocks, block size, 2, K, D]`, contiguous.
        chunks: their rows, contexts and blocks, the blocks of their own tokens included.
        scaling: factor on the logits, above 0.
        window: keys a token may look back at, itself included; None is all.
    """
    query = _with_whole_heads(query)
    block_size, _, num_kv_heads, width = store.shape[1:]
    shape = _fields(
        [
            query.shape[1],
            num_kv_heads,
            width,
            block_size,
            *query.stride()[:2],
            *out.stride()[:2],
            window or 0,
        ]
    )
    rows = ((c.start, c.num_tokens, c.context, c.blocks.data_ptr()) for c in chunks)
    fields = _fields(chain.from_iterable(rows))
    kernels.prefill(
        _address(shape),
        _address(fields),
        len(chunks),
        query.data_ptr(),
        out.data_ptr(),
        store.data_ptr(),
        scaling,
    )


def _with_whole_heads(rows: torch.Tensor) -> torch.Tensor:
    return rows if rows.stride(2) == 1 else rows.contiguous()


def _fields(values: Iterable[int]) -> array[int]:
    """Make a struct of 64-bit integers; the caller keeps it while the kernel runs."""
    return array("q", values)


def _address(fields: array[int]) -> int:
    return fields.buffer_info()[0]
