"""Importing the package needs neither a compiler, nor a model library, nor PEFT, nor NumPy."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = (
    "triton",
    "transformers",
    "peft",
    "numpy",
    "safetensors",
    "fsspec",
    "huggingface_hub",
    "lora_kernels",
    "lora_cache",
    "lora_layers",
)

SCRIPT = f"""
import sys
from importlib.abc import MetaPathFinder


class Blocked(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {BLOCKED!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)


sys.meta_path.insert(0, Blocked())
import tempfile
import lora_weights
import lora_weights.testing

folder = lora_weights.testing.write_adapter(tempfile.mkdtemp(), {{"q_proj": (8, 4)}}, r=2)
print(lora_weights.load_adapter(folder).rank)
print([name for name in {BLOCKED!r} if name in sys.modules])
"""


def test_package_works_without_the_libraries_it_does_not_declare() -> None:
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False
    )

    assert result.stdout.split("\n")[:2] == ["2", "[]"], result.stderr
