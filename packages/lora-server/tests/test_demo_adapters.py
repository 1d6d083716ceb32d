"""The bundled adapters: small, complete, and of the model they name."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file

from lora_server.model.demo import BASE_NAME, bundled_adapters
from lora_weights import load_adapter

NAMES = ("contract", "sql", "support")


def test_three_adapters_come_with_the_package() -> None:
    adapters = bundled_adapters()

    assert tuple(adapters) == NAMES


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_is_a_config_weights_and_a_card(name: str) -> None:
    folder = bundled_adapters()[name]
    names = sorted(path.name for path in folder.iterdir())

    assert names == ["README.md", "adapter_config.json", "adapter_model.safetensors"]
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 1_000_000


@pytest.mark.parametrize("name", NAMES)
def test_every_tensor_is_bfloat16_finite_and_not_zero(name: str) -> None:
    tensors = load_file(bundled_adapters()[name] / "adapter_model.safetensors")

    assert {tensor.dtype for tensor in tensors.values()} == {torch.bfloat16}
    assert all(bool(torch.isfinite(tensor).all()) for tensor in tensors.values())
    assert all(bool(tensor.any()) for tensor in tensors.values())


@pytest.mark.parametrize("name", NAMES)
def test_the_config_names_the_model_and_no_path_of_the_machine_that_trained(name: str) -> None:
    folder = bundled_adapters()[name]
    text = (folder / "adapter_config.json").read_text()

    assert json.loads(text)["base_model_name_or_path"] == BASE_NAME
    assert json.loads(text)["peft_type"] == "LORA"
    assert '"/' not in text
    assert "](/" not in (folder / "README.md").read_text()


@pytest.mark.parametrize("name", NAMES)
def test_an_adapter_loads_with_both_factors_in_all_thirty_layers(name: str) -> None:
    adapter = load_adapter(bundled_adapters()[name])
    layers = {path.split(".")[2] for path, part in adapter.parts.items() if part.pair is not None}

    assert layers == {str(layer) for layer in range(30)}


def test_the_adapters_differ_in_rank_and_in_the_modules_they_touch() -> None:
    adapters = [load_adapter(folder) for folder in bundled_adapters().values()]
    touched = {
        tuple(sorted({path.rsplit(".", 1)[1] for path in adapter.parts})) for adapter in adapters
    }

    assert len({adapter.digest for adapter in adapters}) == len(NAMES)
    assert len({adapter.rank for adapter in adapters}) > 1
    assert len(touched) == len(NAMES)
