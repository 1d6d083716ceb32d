"""`python -m lora_kernels.bench`: what the operators cost on this machine."""

from __future__ import annotations
