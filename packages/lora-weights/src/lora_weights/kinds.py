"""The kinds of parts that a report names."""

from __future__ import annotations

from enum import StrEnum


class PartKind(StrEnum):
    """What an adapter does to a module."""

    PAIR = "pair"
    """Adds a low-rank product."""
    DORA = "dora"
    """Sets the norm of each row of the weight (weight-decomposed)."""
    LORA_BIAS = "lora bias"
    """Adds a bias beside the pair."""
    BIAS = "bias"
    """Replaces the base's bias."""
    GAIN = "gain"
    """Multiplies the output (IA3)."""
    FULL = "full"
    """Replaces the whole module."""
    TOKEN_ROWS = "token rows"  # noqa: S105
    """Replaces single rows of an embedding."""
    EXPERTS = "experts"
    """Adds low-rank products to the experts of a layer."""
    VERA = "vera"
    """Adds a product of shared matrices."""
    LOHA = "loha"
    """Adds a Hadamard product of low-rank products."""
    LOKR = "lokr"
    """Adds a Kronecker product."""
