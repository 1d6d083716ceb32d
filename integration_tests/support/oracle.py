"""What the answer must be: transformers and PEFT, one sequence, one adapter, nothing of ours.

Adapters are applied unmerged, in float32, and every token is computed from the whole sequence
without any cache.
"""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from transformers import AutoModelForCausalLM

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from torch import Tensor, nn

NUM_TOP = 5

Choice = str | None | tuple[tuple[str, float], ...]
"""What answers: an adapter's name, None for the base, or a weighted set of (name, scale)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """Greedy continuation of a prompt."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """Of the tokens, natural logarithm."""
    top: tuple[tuple[float, ...], ...]
    """The `NUM_TOP` largest log-probabilities at each position, descending."""
    margin: float
    """Smallest distance between the best and the second best at any position."""


class PeftOracle:
    """Answers for one base model and its adapters; every answer is computed once."""

    def __init__(self, base: Path, adapters: Mapping[str, Path]) -> None:
        self._adapters = dict(adapters)
        base_model: nn.Module = AutoModelForCausalLM.from_pretrained(
            base, dtype=torch.float32, attn_implementation="eager"
        )
        self._models: dict[Choice, nn.Module] = {None: base_model}
        self._answers: dict[tuple[Choice, tuple[int, ...], int], Answer] = {}

    def greedy(self, adapter: Choice, prompt_token_ids: tuple[int, ...], num_tokens: int) -> Answer:
        """Continue a prompt by exactly `num_tokens`, end tokens or not.

        Args:
            adapter: what answers.
            prompt_token_ids: at least one token.
            num_tokens: length of the answer.
        """
        key = (adapter, prompt_token_ids, num_tokens)
        if key not in self._answers:
            self._answers[key] = self._compute(*key)
        return self._answers[key]

    def prompt_logprobs(
        self, adapter: Choice, prompt_token_ids: tuple[int, ...]
    ) -> tuple[float, ...]:
        """Return the log-probability of each prompt token from the second on."""
        logprobs_TV = self._logits(adapter, prompt_token_ids).log_softmax(dim=-1)
        rows = zip(logprobs_TV, prompt_token_ids[1:], strict=False)
        return tuple(float(row_V[token_id]) for row_V, token_id in rows)

    def _compute(self, adapter: Choice, prompt: tuple[int, ...], num_tokens: int) -> Answer:
        token_ids = list(prompt)
        best: list[tuple[float, ...]] = []
        for _ in range(num_tokens):
            logprobs_V = self._logits(adapter, token_ids)[-1].log_softmax(dim=-1)
            values, ids = logprobs_V.topk(NUM_TOP)
            token_ids.append(int(ids[0]))
            best.append(tuple(values.tolist()))
        return Answer(
            token_ids=tuple(token_ids[len(prompt) :]),
            logprobs=tuple(values[0] for values in best),
            top=tuple(best),
            margin=min(values[0] - values[1] for values in best),
        )

    @torch.inference_mode()
    def _logits(self, adapter: Choice, token_ids: list[int] | tuple[int, ...]) -> Tensor:
        """Run one sequence alone, `[T, V]`."""
        output = self._model(adapter)(input_ids=torch.tensor([list(token_ids)]), use_cache=False)
        logits: Tensor = output.logits[0]
        return logits

    def _model(self, adapter: Choice) -> nn.Module:
        if adapter not in self._models:
            assert adapter is not None
            pairs = ((adapter, 1.0),) if isinstance(adapter, str) else adapter
            self._models[adapter] = self._load(pairs)
        return self._models[adapter]

    def _load(self, pairs: tuple[tuple[str, float], ...]) -> nn.Module:
        """Let PEFT add up the named adapters, each with its scale, on a copy of the base."""
        (first, _), *others = pairs
        base_model = copy.deepcopy(self._models[None])
        with warnings.catch_warnings():
            # PEFT comments on heads tied to the embedding, which are meant here.
            warnings.simplefilter("ignore")
            model = PeftModel.from_pretrained(
                base_model, str(self._adapters[first]), adapter_name=first
            )
            for name, _ in others:
                model.load_adapter(str(self._adapters[name]), adapter_name=name)
        tuner: Any = model.base_model
        tuner.set_adapter([name for name, _ in pairs])
        for module in model.modules():
            if isinstance(module, LoraLayer):
                for name, scale in pairs:
                    module.set_scale(name, scale)
        return model
