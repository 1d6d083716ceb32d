"""The public surface is what `__all__` says."""

from __future__ import annotations

import subprocess
import sys
import types

import lora_layers


def test_all_is_sorted_and_equals_the_public_names() -> None:
    public = {
        name
        for name, value in vars(lora_layers).items()
        if not name.startswith("_") and not isinstance(value, types.ModuleType)
    }

    assert lora_layers.__all__ == sorted(lora_layers.__all__)
    assert set(lora_layers.__all__) == public - {"annotations"}


def test_imports_without_transformers_triton_and_a_web_framework() -> None:
    blocked = "import sys; sys.modules.update(dict.fromkeys(['transformers', 'triton', 'fastapi']))"

    done = subprocess.run(
        [sys.executable, "-c", f"{blocked}; import lora_layers"], check=False, capture_output=True
    )

    assert done.returncode == 0, done.stderr.decode()
