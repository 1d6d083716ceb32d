"""Importing the package needs torch and nothing else."""

from __future__ import annotations

import subprocess
import sys

BLOCKED = ("triton", "transformers", "safetensors", "numpy", "peft")

SCRIPT = f"""
import sys
for name in {BLOCKED!r}:
    sys.modules[name] = None
import lora_kernels, lora_kernels.testing
print(sorted(name for name in sys.modules if name.startswith("lora_")
             and not name.startswith("lora_kernels")))
"""


def test_the_package_imports_without_triton_transformers_and_the_other_packages() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], check=False, capture_output=True, text=True
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
