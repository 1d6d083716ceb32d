"""Backend: the choice for a device."""

from __future__ import annotations

import pytest
import torch

from lora_kernels import Backend, backend


@pytest.mark.parametrize(
    ("device", "installed", "expected"),
    [
        ("cpu", True, Backend.ATEN),
        ("cpu", False, Backend.ATEN),
        ("cuda:1", True, Backend.TRITON),
        ("cuda", False, Backend.ATEN),
    ],
)
def test_kernels_are_chosen_where_they_run_and_are_installed(
    monkeypatch: pytest.MonkeyPatch, device: str, installed: bool, expected: Backend
) -> None:
    def find_spec(name: str) -> object | None:
        return name if installed else None

    monkeypatch.setattr(backend, "find_spec", find_spec)

    assert Backend.for_device(torch.device(device)) is expected
