"""The rows of the table: every format, how PEFT makes an adapter of it, and what it must answer.

Adapters are made, saved and run by PEFT itself, all trained tensors drawn at random. Where PEFT
has no such adapter (names of one model's projections on another's), the expected logits come from
the base with the deltas merged into its weights.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import peft
import torch
from safetensors.torch import save_file

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

    from torch import Tensor, nn

    from parity.bases import Base

RANK = 4
TOKENS = torch.tensor([[5, 17, 3, 44, 2, 90, 8, 61], [9, 9, 33, 1, 70, 12, 25, 4]])
"""Input of every measurement, `[B, S]`."""


class NotApplicableError(Exception):
    """The base has nothing this format could be about, or PEFT makes no such adapter for it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """One way an adapter can come."""

    name: str
    make: Callable[[Base, Path], Tensor | None]
    """Writes the adapter's folder and returns the expected logits; None where PEFT's own answer is
    not asked for, because the format is refused."""


def run(model: nn.Module) -> Tensor:
    """Return the logits of the input, one row a token or a sequence, in a fixed order."""
    with torch.inference_mode():
        logits: Tensor = model(input_ids=TOKENS).logits
    return logits.reshape(-1, logits.shape[-1])


def randomise(model: nn.Module, *, seed: int = 3) -> None:
    """Draw every trained tensor; whole copies and magnitudes move around their present values."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        noise = torch.randn(parameter.shape, generator=generator) * 0.1
        is_around = any(
            part in name for part in ("magnitude", "modules_to_save", "ia3_l", "trainable_tokens")
        )
        is_bias = name.endswith(".bias") and "lora_B" not in name
        parameter.data = (parameter.data + noise) if is_around or is_bias else 2 * noise


def peft_made(
    configure: Callable[[Base], peft.PeftConfig],
    *,
    edit: Mapping[str, object] | None = None,
    runs: bool = True,
) -> Callable[[Base, Path], Tensor | None]:
    """Return a maker that lets PEFT build, save and run the adapter.

    Args:
        configure: the configuration for a base.
        edit: fields to write over in the saved configuration.
        runs: whether PEFT's answer is asked for; not after an edit.
    """

    def make(base: Base, folder: Path) -> Tensor | None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT comments on tied heads, which are meant here
            try:
                model = peft.get_peft_model(base.build(), configure(base)).eval()
            except (TypeError, ValueError, RuntimeError) as error:
                raise NotApplicableError(f"PEFT makes none: {error}") from error
            randomise(model)
            model.save_pretrained(str(folder))
        if edit is None:
            return run(model) if runs else None
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | dict(edit)))
        return None

    return make


def refused(
    configure: Callable[[Base], peft.PeftConfig],
) -> Callable[[Base, Path], Tensor | None]:
    """Return a maker for a format whose answer nobody asks for."""
    return peft_made(configure, runs=False)


def lora(
    targets: Callable[[Base], Any] | None = None, **fields: Any
) -> Callable[[Base], peft.PeftConfig]:
    """Return a configuration of LoRA; callables among the fields are given the base."""

    def configure(base: Base) -> peft.PeftConfig:
        given = {name: value(base) if callable(value) else value for name, value in fields.items()}
        return peft.LoraConfig(
            **{
                "r": RANK,
                "lora_alpha": 2 * RANK,
                "target_modules": list(base.linears) if targets is None else targets(base),
                "task_type": base.task,
                # PEFT adds the head of a classifier by itself, so every format has it there.
                "fan_in_fan_out": base.name == "GPT-2",
                **given,
            }
        )

    return configure


def decoder_only(configure: Callable[[Base], Any]) -> Callable[[Base], Any]:
    """Return a configuration that a classifier has no place for."""

    def configured(base: Base) -> Any:
        if base.is_classifier:
            raise NotApplicableError
        return configure(base)

    return configured


def with_experts(configure: Callable[[Base], Any]) -> Callable[[Base], Any]:
    """Return a configuration that only a base with experts has a place for."""

    def configured(base: Base) -> Any:
        if not base.experts:
            raise NotApplicableError
        return configure(base)

    return configured


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherNames:
    """An adapter that names projections in another way than the base stores them.

    The deltas are merged into the base's weights for the expected answer.
    """

    is_split: bool
    """The adapter names the parts (q, k, v); otherwise the whole."""
    seeds: Mapping[str, int] = field(default_factory=dict)

    def __call__(self, base: Base, folder: Path) -> Tensor:
        """Write the adapter and return the logits of the merged base."""
        groups = (
            {name: dict(parts) for name, parts in base.fused_modules.items()}
            if self.is_split
            else {name: dict.fromkeys(parts, 0) for name, parts in base.packed_modules.items()}
        )
        if not groups or base.is_classifier:
            raise NotApplicableError
        model = base.build()
        tensors: dict[str, Tensor] = {}
        generator = torch.Generator().manual_seed(7)
        for path, _ in list(model.named_modules()):
            parent, _, last = path.rpartition(".")
            for whole, parts in groups.items():
                first = next(iter(parts))
                if last == (whole if self.is_split else first):
                    self._adapt(model, parent, whole, parts, tensors, generator)
        folder.mkdir(parents=True)
        save_file(tensors, folder / "adapter_model.safetensors")
        names = {key.split(".")[-3] for key in tensors}
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK}
        (folder / "adapter_config.json").write_text(
            json.dumps(config | {"target_modules": sorted(names)})
        )
        return run(model)

    def _adapt(  # noqa: PLR0917 - one group of one model
        self,
        model: nn.Module,
        parent: str,
        whole: str,
        parts: Mapping[str, int],
        tensors: dict[str, Tensor],
        generator: torch.Generator,
    ) -> None:
        """Add one group's tensors, and their product to the weights behind them."""
        owner: Any = model.get_submodule(parent)
        if self.is_split:
            weights = getattr(owner, whole).weight.data.split(list(parts.values()))
        else:
            weights = [getattr(owner, name).weight.data for name in parts]
        in_features = weights[0].shape[1]
        shared_a = torch.randn(RANK, in_features, generator=generator) * 0.1
        factors = []
        for name, weight in zip(parts, weights, strict=True):
            lora_a = shared_a
            if self.is_split:
                lora_a = torch.randn(RANK, in_features, generator=generator) * 0.1
            lora_b = torch.randn(weight.shape[0], RANK, generator=generator) * 0.2
            weight.add_(lora_b @ lora_a)
            factors.append(lora_b)
            if self.is_split:
                _put(tensors, f"{parent}.{name}", lora_a, lora_b)
        if not self.is_split:
            _put(tensors, f"{parent}.{whole}", shared_a, torch.cat(factors))


def _put(tensors: dict[str, Tensor], path: str, lora_a: Tensor, lora_b: Tensor) -> None:
    tensors[f"base_model.model.{path}.lora_A.weight"] = lora_a.clone()
    tensors[f"base_model.model.{path}.lora_B.weight"] = lora_b.clone()
