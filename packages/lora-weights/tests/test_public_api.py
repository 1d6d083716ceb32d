"""The public surface is what `__all__` says."""

from __future__ import annotations

import types

import lora_weights


def test_all_is_sorted() -> None:
    assert list(lora_weights.__all__) == sorted(lora_weights.__all__)


def test_all_holds_every_public_name() -> None:
    public = {
        name
        for name, value in vars(lora_weights).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }

    assert public - {"annotations"} == set(lora_weights.__all__)


def test_every_public_name_is_documented() -> None:
    undocumented = [
        name for name in lora_weights.__all__ if not getattr(lora_weights, name).__doc__
    ]

    assert undocumented == []
