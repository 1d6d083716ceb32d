"""Importing the package needs torch and nothing else; Triton is loaded when it is asked for."""

from __future__ import annotations

import subprocess
import sys

import pytest

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


ASK_FOR_TRITON = """
import sys
{block}
import torch
from lora_kernels import Backend, BackendUnavailableError, StackedWeights, apply_lora_, route_tokens
sizes = {{"num_slots": 1, "max_rank": 4, "in_features": 8, "out_features": (8,)}}
weights = StackedWeights.allocate(**sizes, dtype=torch.float32, device="cpu")
x, routing = torch.ones(1, 8), route_tokens([0], num_slots=1)
apply_lora_(x.clone(), x, weights, routing)
print("triton" in sys.modules)
try:
    apply_lora_(x.clone(), x, weights, routing, backend=Backend.TRITON)
except BackendUnavailableError as refusal:
    print(refusal)
"""


def ask_for_triton(block: str) -> list[str]:
    script = ASK_FOR_TRITON.format(block=block)
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True
    )
    return done.stdout.splitlines()


def test_without_triton_its_backend_names_the_extra_to_install() -> None:
    _, refusal = ask_for_triton('sys.modules["triton"] = None')

    assert refusal == (
        "backend triton: the package triton is not installed, expected lora-kernels[triton]"
    )


@pytest.mark.ptx
def test_compiled_kernels_refuse_tensors_on_a_cpu() -> None:
    was_loaded, refusal = ask_for_triton("")

    assert was_loaded == "False"
    assert refusal.startswith("shrink: backend triton found tensors on cpu, expected cuda")
