"""Benchmarks of this package: ``python -m lora_weights.bench``. Nothing else imports it."""

from __future__ import annotations
