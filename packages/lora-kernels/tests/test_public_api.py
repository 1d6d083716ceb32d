"""What the package offers is what `__all__` says."""

from __future__ import annotations

import inspect

import lora_kernels


def test_all_is_sorted_and_names_every_public_object() -> None:
    public = {
        name
        for name, value in vars(lora_kernels).items()
        if not name.startswith("_") and name != "annotations" and not inspect.ismodule(value)
    }

    assert lora_kernels.__all__ == sorted(lora_kernels.__all__)
    assert set(lora_kernels.__all__) == public


def test_every_public_object_has_a_docstring() -> None:
    missing = [name for name in lora_kernels.__all__ if not getattr(lora_kernels, name).__doc__]

    assert missing == []
