"""Adapters on the experts of a mixture: what a file holds, and the one form the layers take.

Shapes: `X` experts, `r` rank, `H` hidden size, `F` intermediate size, `I` in, `O` out.
"""

from __future__ import annotations

from lora_weights.experts.parts import ExpertPair, ExpertPart, ExpertShape

__all__ = ["ExpertPair", "ExpertPart", "ExpertShape"]
