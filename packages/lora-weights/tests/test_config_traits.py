"""Every trait that real configurations have, and what must become of an adapter with it."""

from __future__ import annotations

import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from lora_weights import load_adapter

if TYPE_CHECKING:
    from types import ModuleType


def _load() -> ModuleType:
    """Import the table, which lies beside this file and is a program too."""
    path = Path(__file__).with_name("config_traits.py")
    spec = spec_from_file_location("config_traits", path)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


config_traits = _load()


@pytest.mark.parametrize("trait", config_traits.TRAITS, ids=lambda trait: trait.name)
def test_an_adapter_with_the_trait_loads_or_is_refused_by_name(trait: Any, tmp_path: Path) -> None:
    folder = config_traits.write_trait(trait, tmp_path / "adapter")

    changed, problems = config_traits.outcome(folder, trait.base)

    text = "; ".join(problems)
    if trait.refusal:
        assert problems
        assert all(part in text for part in trait.refusal), text
        return
    assert not problems, text
    base = config_traits.BASES[trait.base]
    with_pair = [p for p in base if p.rpartition(".")[2] in trait.modules and p not in trait.wholes]
    expected = len(with_pair) + len(trait.wholes) if trait.loads is None else trait.loads
    assert changed == expected


@pytest.mark.parametrize(
    "trait",
    [trait for trait in config_traits.TRAITS if trait.scaling is not None],
    ids=lambda trait: trait.name,
)
def test_the_scaling_is_the_one_the_configuration_asks_for(trait: Any, tmp_path: Path) -> None:
    folder = config_traits.write_trait(trait, tmp_path / "adapter")
    plain = {**trait.config, "lora_alpha": trait.config.get("r", 8), "use_rslora": False}
    unscaled = config_traits.write_trait(
        type(trait)(**{**_fields(trait), "config": plain}), tmp_path / "unscaled"
    )

    scaled, one = load_adapter(folder), load_adapter(unscaled)

    for path, part in scaled.parts.items():
        other = one.parts[path]
        assert part.pair is not None
        assert other.pair is not None
        assert (part.pair.lora_b / other.pair.lora_b - trait.scaling).abs().amax() < 1e-6


def _fields(trait: Any) -> dict[str, Any]:
    return {name: getattr(trait, name) for name in type(trait).__dataclass_fields__}


def test_the_table_covers_every_line_of_outcomes() -> None:
    assert len({trait.name for trait in config_traits.TRAITS}) == len(config_traits.TRAITS)
    assert sum(bool(trait.refusal) for trait in config_traits.TRAITS) >= 20
