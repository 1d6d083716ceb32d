"""From the logits of a head to what is told of them. Knows numbers and labels alone.

`L` labels.
"""

from __future__ import annotations

import numpy as np

from lora_server.model.labels import LabelSet, ProblemType


def activate(logits: np.ndarray, labels: LabelSet) -> np.ndarray:
    """Return probabilities, float64, of logits `[..., L]`; a regression's numbers stay.

    Semantics: softmax over several labels of which one is given; a sigmoid for each of several
    independent labels, and for a single one. As transformers' pipelines and vLLM do.
    """
    values = logits.astype(np.float64)
    if labels.problem_type is ProblemType.REGRESSION:
        return values
    if labels.problem_type is ProblemType.MULTI_LABEL or len(labels) == 1:
        return sigmoid(values)
    shifted = np.exp(values - values.max(axis=-1, keepdims=True))
    return np.asarray(shifted / shifted.sum(axis=-1, keepdims=True))


def sigmoid(values: np.ndarray) -> np.ndarray:
    """Return `1 / (1 + exp(-x))`, without overflow at either end."""
    small = np.exp(-np.abs(values))
    return np.asarray(np.where(values >= 0, 1.0, small) / (1.0 + small))


def given_labels(probabilities: np.ndarray, labels: LabelSet) -> list[str]:
    """Return the names whose probability `[L]` reaches their threshold."""
    return [
        name
        for name, value, threshold in zip(
            labels.names, probabilities, labels.thresholds, strict=True
        )
        if value >= threshold
    ]
