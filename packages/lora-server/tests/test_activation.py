"""Probabilities against torch in float64, and labels that reach their thresholds."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from lora_server.http.activation import activate, given_labels, sigmoid
from lora_server.model.labels import LabelSet, ProblemType

LOGITS = np.array([[2.0, -1.0, 0.5], [80.0, -80.0, 0.0]], dtype=np.float32)


def labels(count: int, kind: ProblemType) -> LabelSet:
    """Return labels of one kind."""
    return LabelSet(
        names=tuple("abc"[:count]), problem_type=kind, thresholds=(0.5, 0.2, 0.9)[:count]
    )


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (ProblemType.SINGLE_LABEL, torch.from_numpy(LOGITS).double().softmax(dim=-1)),
        (ProblemType.MULTI_LABEL, torch.from_numpy(LOGITS).double().sigmoid()),
        (ProblemType.REGRESSION, torch.from_numpy(LOGITS).double()),
    ],
)
def test_each_kind_of_problem_has_its_activation(kind: ProblemType, expected: torch.Tensor) -> None:
    found = activate(LOGITS, labels(3, kind))

    np.testing.assert_allclose(found, expected.numpy(), rtol=1e-12)


def test_a_single_label_is_a_sigmoid_without_overflow() -> None:
    column = np.array([[-1000.0], [0.0], [1000.0]], dtype=np.float32)

    found = activate(column, labels(1, ProblemType.SINGLE_LABEL))

    assert found[:, 0].tolist() == [0.0, 0.5, 1.0]
    assert sigmoid(np.array([2.0]))[0] == pytest.approx(1 / (1 + np.exp(-2.0)))


def test_labels_are_given_from_their_own_threshold_on() -> None:
    probabilities = np.array([0.4, 0.2, 0.95])

    assert given_labels(probabilities, labels(3, ProblemType.MULTI_LABEL)) == ["b", "c"]
