"""One cell of the table: an adapter on a wrapped base in a mixed batch, beside base and neighbour.

Letters: `B` sequences, `S` tokens a sequence.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lora_layers import AdapterMismatchError, LoraModelConfig, LoraModelManager, RowRun
from lora_weights import AdapterError, load_adapter
from parity.formats import TOKENS, NotApplicableError, lora, peft_made, run

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from parity.bases import Base
    from parity.formats import Format

MAX_RANK = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one format does on one base."""

    difference: float | None = None
    """Largest absolute difference of any logit to what is expected."""
    effect: float | None = None
    """Largest absolute difference to the base's logits, so that a difference can be judged."""
    refusal: tuple[str, ...] = ()
    """The problems, when the adapter is refused."""

    @property
    def is_applicable(self) -> bool:
        """Whether the base has anything the format could be about."""
        return self.difference is not None or bool(self.refusal)


class MixedBatch:
    """A wrapped base, and a plain adapter whose rows surround those of the one to be measured."""

    def __init__(self, base: Base, folder: Path) -> None:
        """Build and wrap the base, and let PEFT make the neighbour in `folder`."""
        self._base = base
        model = base.build()
        self._base_logits = run(model)
        config = LoraModelConfig(
            max_loras=2,
            max_lora_rank=MAX_RANK,
            packed_modules=base.packed_modules,
            fused_modules=base.fused_modules,
            logits_modules=base.logits_modules,
        )
        self._manager = LoraModelManager(copy.deepcopy(model), config)
        expected = peft_made(lora())(base, folder)
        assert expected is not None
        self._neighbour_logits = expected
        self._manager.register("neighbour", self._manager.prepare(load_adapter(folder)))

    def measure(self, adapter_format: Format, folder: Path) -> Cell:
        """Make an adapter of a format and run it between neighbour and base."""
        try:
            expected = adapter_format.make(self._base, folder)
        except NotApplicableError:
            return Cell()
        try:
            prepared = self._manager.prepare(load_adapter(folder, max_rank=MAX_RANK))
        except (AdapterError, AdapterMismatchError) as error:
            problems = getattr(error, "problems", None)
            return Cell(refusal=tuple(map(str, problems)) if problems else (str(error),))
        assert expected is not None, f"{adapter_format.name} loads, and was meant to be refused"
        self._manager.register("adapter", prepared)
        with self._manager.acquire(["adapter", "neighbour"]):
            found = self._run()
        self._manager.remove("adapter")
        rows = expected.shape[0]
        for logits, other in (
            (found[:rows], self._neighbour_logits),
            (found[2 * rows :], self._base_logits),
        ):
            torch.testing.assert_close(logits, other, rtol=0, atol=2e-5)
        return Cell(
            difference=float((found[rows : 2 * rows] - expected).abs().max()),
            effect=float((expected - self._base_logits).abs().max()),
        )

    def _run(self) -> Tensor:
        """Run the input three times in one batch: neighbour, adapter, base."""
        num_tokens, num_sequences = TOKENS.numel(), TOKENS.shape[0]
        keys = (("neighbour",), ("adapter",), ())

        def runs(rows: int) -> list[RowRun]:
            sets = [tuple((key, 1.0) for key in names) for names in keys]
            return [RowRun(num_rows=rows, adapters=adapters) for adapters in sets]

        per_token = runs(num_tokens)
        logits = runs(num_sequences) if self._base.is_classifier else per_token
        with torch.inference_mode():
            self._manager.set_routing(per_token, logits)
            output: Tensor = self._manager.model(input_ids=TOKENS.repeat(3, 1)).logits
        return output.reshape(-1, output.shape[-1])
