"""How the hidden states of a text become its embedding: which rows, and whether it is normalised.

A checkpoint made with sentence-transformers says so in `modules.json` and its pooling folder. Knows
files and tensors; nothing of adapters. `S` tokens of a text, `H` hidden width.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any, Final

from torch.nn import functional as F  # noqa: N812 - torch's own convention

from lora_server.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    import torch

_MODULES_FILE: Final = "modules.json"
_SIZES_FILE: Final = "sentence_bert_config.json"
_SWITCHES: Final = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""The older form of the pooling folder's configuration: one switch a mode."""


class PoolingMode(StrEnum):
    """Which rows make an embedding; the values are sentence-transformers'."""

    CLS = "cls"
    """The first token's."""
    MEAN = "mean"
    """The mean of all."""
    MAX = "max"
    """The largest of each column."""
    LAST = "lasttoken"
    """The last token's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbeddingRecipe:
    """From hidden states to an embedding."""

    mode: PoolingMode
    is_normalised: bool = True
    """Whether embeddings have length 1."""

    def apply(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the embedding `[H]`, float32, of the hidden states `[S, H]` of one text."""
        rows = hidden.float()
        match self.mode:
            case PoolingMode.CLS:
                pooled = rows[0]
            case PoolingMode.MEAN:
                pooled = rows.mean(dim=0)
            case PoolingMode.MAX:
                pooled = rows.amax(dim=0)
            case _:
                pooled = rows[-1]
        return F.normalize(pooled, dim=0) if self.is_normalised else pooled


def read_recipe(folder: Path, *, is_causal: bool) -> EmbeddingRecipe:
    """Read a checkpoint's recipe.

    Args:
        folder: the checkpoint.
        is_causal: whether a token sees only what comes before it, which decides where the files say
            nothing: then the last token has seen the whole text, else the mean is taken. Both are
            normalised.

    Raises:
        StartupError: the files name a step that is not known here.
    """
    steps = _read_json(folder / _MODULES_FILE)
    if not isinstance(steps, list):
        return EmbeddingRecipe(mode=PoolingMode.LAST if is_causal else PoolingMode.MEAN)
    kinds = [str(step.get("type", "")).rpartition(".")[2] for step in steps]
    unknown = [kind for kind in kinds if kind not in {"Transformer", "Pooling", "Normalize"}]
    if unknown or "Pooling" not in kinds:
        listed = ", ".join(kinds)
        raise StartupError(
            [f"{_MODULES_FILE}: steps are {listed}, expected Transformer, Pooling and Normalize"]
        )
    pooling = steps[kinds.index("Pooling")]
    config = _read_json(folder / str(pooling.get("path", "")) / "config.json")
    mode = _read_mode(config if isinstance(config, dict) else {})
    return EmbeddingRecipe(mode=mode, is_normalised="Normalize" in kinds)


def read_max_length(folder: Path) -> int | None:
    """Return the longest text in tokens that sentence-transformers would take; None if unsaid."""
    config = _read_json(folder / _SIZES_FILE)
    length = config.get("max_seq_length") if isinstance(config, dict) else None
    return length if isinstance(length, int) and length > 0 else None


def is_sentence_model(folder: Path) -> bool:
    """Whether the checkpoint was made with sentence-transformers."""
    return (folder / _MODULES_FILE).is_file()


def _read_mode(config: Mapping[str, Any]) -> PoolingMode:
    stated = config.get("pooling_mode")
    names: Sequence[str] = [stated] if isinstance(stated, str) else []
    names = names or [name for switch, name in _SWITCHES.items() if config.get(switch)]
    if len(names) != 1 or names[0] not in set(PoolingMode):
        found = ", ".join(names) or "none"
        raise StartupError([f"pooling modes are {found}; expected one of {', '.join(PoolingMode)}"])
    return PoolingMode(names[0])


def _read_json(path: Path) -> Any:
    """Return a file's content; None where there is no such file."""
    if not path.is_file():
        return None
    try:
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError) as error:
        raise StartupError([f"{path} cannot be read: {error}"]) from error
