"""The public names are the ones in `__all__`."""

from __future__ import annotations

import types

import lora_cache


def test_all_is_sorted_and_equals_the_public_names() -> None:
    public = {
        name
        for name, value in vars(lora_cache).items()
        if not name.startswith("_")
        and not isinstance(value, types.ModuleType)
        and name != "annotations"
    }

    assert sorted(lora_cache.__all__) == lora_cache.__all__
    assert set(lora_cache.__all__) == public


def test_every_public_name_says_what_it_is() -> None:
    silent = [
        name
        for name in lora_cache.__all__
        if name != "Clock" and not (getattr(lora_cache, name).__doc__ or "").strip()
    ]

    assert silent == []
