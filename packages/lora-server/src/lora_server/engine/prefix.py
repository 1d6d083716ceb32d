"""Keys of KV blocks: equal keys mean equal contents.

A block's key is a hash over everything that shapes its keys and values: the adapters by digest and
scale, all tokens before it, and its own tokens. Two adapters, or two versions of one, therefore
never share a block, and neither do an adapter and the base.
"""

from __future__ import annotations

import hashlib
import struct
from array import array
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .request import AdapterUse

BlockKey = bytes

_DIGEST_SIZE = 16


def root_key(adapters: Sequence[AdapterUse]) -> BlockKey:
    """Start of the chain for a weighted set; order of the set does not matter.

    The adapters are tagged and length-prefixed, so that no token content can imitate them.
    """
    state = hashlib.blake2b(digest_size=_DIGEST_SIZE, person=b"lora-kv-root")
    for use in sorted(adapters, key=lambda use: (use.digest, use.scale)):
        name = use.digest.encode()
        state.update(struct.pack("<Qd", len(name), use.scale))
        state.update(name)
    return state.digest()


def child_key(parent: BlockKey, token_ids: Sequence[int]) -> BlockKey:
    """Key of the block that follows `parent` and holds `token_ids`."""
    state = hashlib.blake2b(parent, digest_size=_DIGEST_SIZE, person=b"lora-kv-block")
    state.update(array("q", token_ids).tobytes())
    return state.digest()
