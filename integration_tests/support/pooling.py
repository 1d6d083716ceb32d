"""Tiny random models that classify or embed, adapters with heads for them, and PEFT's answers.

Nothing here is ours but the numbers: the models are transformers', adapters are written and run by
PEFT, one text at a time.
"""

from __future__ import annotations

import asyncio
import warnings
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    BertConfig,
    DistilBertConfig,
    LlamaConfig,
    ModernBertConfig,
    MPNetConfig,
    RobertaConfig,
)

from support.checkpoints import build_tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from transformers import PreTrainedConfig

_SIZES: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 96,
}
BASE_LABELS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingFamily:
    """One architecture at a tiny size."""

    name: str
    config: Callable[[int], PreTrainedConfig]
    """Vocabulary size -> configuration."""
    targets: tuple[str, ...]
    """Modules that adapters change; the pooler of BERT is one of them by its name."""


FAMILIES = {
    family.name: family
    for family in (
        PoolingFamily(
            name="bert",
            config=lambda vocab: BertConfig(vocab_size=vocab, **_SIZES),
            targets=("query", "value", "dense"),
        ),
        PoolingFamily(
            name="roberta",
            config=lambda vocab: RobertaConfig(
                vocab_size=vocab, pad_token_id=1, bos_token_id=0, eos_token_id=2, **_SIZES
            ),
            targets=("query", "key", "intermediate.dense"),
        ),
        PoolingFamily(
            name="distilbert",
            config=lambda vocab: DistilBertConfig(
                vocab_size=vocab,
                dim=32,
                hidden_dim=48,
                n_layers=2,
                n_heads=4,
                max_position_embeddings=96,
            ),
            targets=("q_lin", "v_lin", "lin1"),
        ),
        PoolingFamily(
            name="modernbert",
            config=lambda vocab: ModernBertConfig(
                vocab_size=vocab,
                local_attention=8,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                cls_token_id=1,
                sep_token_id=2,
                **_SIZES,
            ),
            targets=("Wqkv", "Wo"),
        ),
        PoolingFamily(
            name="llama",
            config=lambda vocab: LlamaConfig(
                vocab_size=vocab, num_key_value_heads=2, pad_token_id=None, **_SIZES
            ),
            targets=("q_proj", "v_proj", "down_proj"),
        ),
        # Computes attention by itself, so that batches have to be padded.
        PoolingFamily(
            name="mpnet",
            config=lambda vocab: MPNetConfig(vocab_size=vocab, **_SIZES),
            targets=("q", "v", "intermediate.dense"),
        ),
    )
}

_CLASSES = {
    "classify": AutoModelForSequenceClassification,
    "token_classify": AutoModelForTokenClassification,
    "embed": AutoModel,
}
_TASK_TYPES = {
    "classify": "SEQ_CLS",
    "token_classify": "TOKEN_CLS",
    "embed": "FEATURE_EXTRACTION",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolingWorld:
    """A base model, adapters by name, and what PEFT computes with each."""

    base: Path
    task: str
    labels: Mapping[str, int | None]
    """Labels of each adapter's own head; None for one without."""
    adapters: Mapping[str, Path]
    _models: dict[str | None, torch.nn.Module] = field(default_factory=dict)

    @property
    def flags(self) -> list[str]:
        """Return the command line."""
        modules = [f"{name}={path}" for name, path in self.adapters.items()]
        return ["--task", self.task, "--lora-modules", *modules]

    def output(self, adapter: str | None, token_ids: Sequence[int]) -> torch.Tensor:
        """Return PEFT's logits of one text, or its hidden states `[S, H]` when there is no head."""
        if adapter not in self._models:
            labels = BASE_LABELS if adapter is None else self.labels[adapter] or BASE_LABELS
            model = load_base(self.base, self.task, labels)
            if adapter is not None:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # as in `save_adapter`
                    model = PeftModel.from_pretrained(model, str(self.adapters[adapter]))
            self._models[adapter] = model.eval()
        with torch.inference_mode():
            output = self._models[adapter](input_ids=torch.tensor([list(token_ids)]))
        values = output.last_hidden_state if self.task == "embed" else output.logits
        return values[0].double()  # type: ignore[no-any-return]


def load_base(folder: Path, task: str, num_labels: int) -> Any:
    """Load a checkpoint with a head of so many labels."""
    options = {} if task == "embed" else {"num_labels": num_labels}
    return _CLASSES[task].from_pretrained(
        folder,
        dtype=torch.float32,
        attn_implementation="eager",
        ignore_mismatched_sizes=True,
        **options,
    )


def build_world(
    family: PoolingFamily, folder: Path, task: str, labels: Mapping[str, int | None]
) -> PoolingWorld:
    """Write a random model and its adapters below `folder`.

    Args:
        family: the architecture.
        folder: where.
        task: `classify`, `token_classify` or `embed`.
        labels: adapter name -> labels of its own head, None for one without.
    """
    torch.manual_seed(0)
    tokenizer = build_tokenizer()
    config = family.config(len(tokenizer))
    config.num_labels = BASE_LABELS
    create: Any = _CLASSES[task].from_config
    model = create(config, dtype=torch.float32)
    _randomise(model, seed=1)
    model.save_pretrained(folder / "base")
    tokenizer.save_pretrained(folder / "base")
    adapters = {}
    for seed, (name, count) in enumerate(labels.items(), start=10):
        base = load_base(folder / "base", task, count or BASE_LABELS)
        adapters[name] = folder / name
        save_adapter(
            base, adapters[name], task, family.targets, has_head=count is not None, seed=seed
        )
    return PoolingWorld(base=folder / "base", task=task, labels=dict(labels), adapters=adapters)


def save_adapter(
    base: Any, folder: Path, task: str, targets: Sequence[str], *, has_head: bool, seed: int
) -> None:
    """Write a random adapter with PEFT, with a head of its own or without."""
    config = LoraConfig(
        # Without a task PEFT adds no head to what is saved.
        task_type=_TASK_TYPES[task] if has_head or task == "embed" else None,
        r=2 + seed % 4,
        lora_alpha=8,
        target_modules=list(targets),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT asks transformers by a name that will go
        model = get_peft_model(base, config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
    model.save_pretrained(str(folder), save_embedding_layers=False)


def texts(count: int, *, seed: int = 0, longest: int = 40) -> list[list[int]]:
    """Return random texts as token ids, of unequal length, without special tokens."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest, (count,), generator=generator).tolist()
    return [torch.randint(5, 270, (n,), generator=generator).tolist() for n in lengths]


def post_all(url: str, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Send (path, body) all at once and return the replies in order; each must be a 200."""

    async def send() -> list[httpx.Response]:
        async with httpx.AsyncClient(base_url=url, timeout=120) as client:
            return await asyncio.gather(*(client.post(path, json=body) for path, body in requests))

    replies = asyncio.run(send())
    for reply in replies:
        assert reply.status_code == 200, reply.text
    return [reply.json() for reply in replies]


def _randomise(model: torch.nn.Module, *, seed: int) -> None:
    """Give every parameter a value of its own, so that a part left out would show."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            scale = 0.1 if parameter.dim() == 1 else 0.25
            parameter.add_(noise * scale) if parameter.dim() == 1 else parameter.copy_(
                noise * scale
            )
