"""`python -m lora_kernels.bench`: what the operators cost on this machine, beside baselines."""

from __future__ import annotations
