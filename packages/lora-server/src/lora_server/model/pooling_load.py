"""Loads a checkpoint for classification, scoring or embeddings, and finds out how to run it.

What a family's head reads is written down nowhere: it is found out, and then compared with
transformers' own forward pass before anything is served.
"""

from __future__ import annotations

import inspect
import logging
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    AutoTokenizer,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.utils import logging as transformers_logging
from transformers.utils.hub import cached_file

from lora_server.config import Task
from lora_server.errors import StartupError

from .embedding_recipe import read_max_length, read_recipe
from .labels import build_labels, read_notes
from .load import find_source
from .pooling_attention import PackedAttention
from .pooling_check import check_batched, run_alone
from .pooling_model import HeadInfo, HeadRows, LoadedPooler, body_of, head_paths

if TYPE_CHECKING:
    from collections.abc import Sequence

    from transformers import PreTrainedConfig

_log = logging.getLogger(__name__)

POOLING_CLASSES: Final[dict[Task, Any]] = {
    Task.CLASSIFY: AutoModelForSequenceClassification,
    Task.SCORE: AutoModelForSequenceClassification,
    Task.TOKEN_CLASSIFY: AutoModelForTokenClassification,
    Task.EMBED: AutoModel,
}
"""Task -> transformers' class that loads a model for it."""


def load_pooler(
    path: str, task: Task, *, dtype: str = "auto", device: str = "auto"
) -> LoadedPooler:
    """Load a checkpoint.

    Args:
        path: folder in transformers' layout, or the name of a repository in the local hub cache.
        task: what it is served for; not `auto` and not `generate`.
        dtype: `auto` takes the checkpoint's; else `float32`, `bfloat16` or `float16`.
        device: `auto` takes CUDA where there is one.

    Raises:
        StartupError: there is nothing of that name, or it holds no such model with a tokenizer, or
            sequences in one batch would change each other.
    """
    source = find_source(path)
    transformers_logging.disable_progress_bar()  # the log is the operator's
    target = torch.device(
        ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    )
    attention = PackedAttention()
    pooler, missing = _load(source, task, dtype=dtype, device=target, attention=attention)
    with torch.inference_mode():
        alone = run_alone(pooler)
        if attention.num_calls == 0:
            # The model computes attention by itself: it needs batches as transformers makes them.
            pooler, missing = _load(source, task, dtype=dtype, device=target, attention=None)
            alone = run_alone(pooler)
        pooler.recipe = read_recipe(_folder_of(source), is_causal=attention.is_causal)
        is_trained = _check_keys(pooler.module, missing, path)
        if task is not Task.EMBED:
            pooler.head = _describe_head(
                pooler.module, task, is_causal=attention.is_causal, is_trained=is_trained
            )
        check_batched(pooler, alone)
        if pooler.head is not None and not is_trained:
            _clear_labels(pooler.module, len(pooler.head.labels))
    return pooler


def choose_task(path: str) -> Task:
    """Return the task that a checkpoint was made for, by the architecture its configuration names.

    Raises:
        StartupError: there is nothing of that name.
    """
    config = _read_config(find_source(path))
    names = [name for name in config.architectures or [] if not name.endswith("LMHeadModel")]
    for ending, task in (
        ("ForSequenceClassification", Task.CLASSIFY),
        ("ForTokenClassification", Task.TOKEN_CLASSIFY),
        ("ForMaskedLM", Task.EMBED),
        ("Model", Task.EMBED),
    ):
        if any(name.endswith(ending) for name in names):
            is_score = task is Task.CLASSIFY and config.num_labels == 1
            return Task.SCORE if is_score else task
    return Task.GENERATE


def _load(
    source: str,
    task: Task,
    *,
    dtype: str,
    device: torch.device,
    attention: PackedAttention | None,
) -> tuple[LoadedPooler, Sequence[str]]:
    """Load model and tokenizer; also return the keys that the checkpoint lacks."""
    options: dict[str, Any] = {"num_labels": 1} if _wants_one_label(source, task) else {}
    if attention is not None:
        options["attn_implementation"] = attention.name
    try:
        tokenizer = AutoTokenizer.from_pretrained(source)
        module, info = POOLING_CLASSES[task].from_pretrained(
            source,
            dtype="auto" if dtype == "auto" else getattr(torch, dtype),
            output_loading_info=True,
            **options,
        )
    except (OSError, ValueError, KeyError) as error:
        raise StartupError([f"model {source}: {error}"]) from error
    torch.nn.Module.to(module, device)
    module = module.eval().requires_grad_(requires_grad=False)
    config = module.config.get_text_config()
    pad_token_id = config.pad_token_id
    if pad_token_id is None:
        config.pad_token_id = -1  # no token; without one decoders' heads refuse batches
    body = body_of(module)
    positions = int(config.max_position_embeddings) - _position_offset(body)
    pooler = LoadedPooler(
        module=module,
        tokenizer=tokenizer,
        text_config=config,
        attention=attention,
        recipe=read_recipe(_folder_of(source), is_causal=False),
        head=None,
        dtype=module.dtype,
        device=device,
        vocab_size=int(config.vocab_size),
        hidden_size=int(config.hidden_size),
        num_positions=positions,
        max_length=min(positions, read_max_length(_folder_of(source)) or positions),
        position_offset=_position_offset(body),
        has_types=_has_types(body, config),
        pad_token_id=pad_token_id,
    )
    return pooler, info["missing_keys"]


def _folder_of(source: str) -> Path:
    """Return the folder of a checkpoint, also of one in the hub cache."""
    if Path(source).is_dir():
        return Path(source)
    found = cached_file(source, "config.json", local_files_only=True)
    return Path(str(found)).parent


def _read_config(source: str) -> PreTrainedConfig:
    try:
        config: PreTrainedConfig = AutoConfig.from_pretrained(source)
    except (OSError, ValueError, KeyError) as error:
        raise StartupError([f"model {source}: {error}"]) from error
    return config


def _wants_one_label(source: str, task: Task) -> bool:
    """Whether a head has to be made up for scoring, which takes one label."""
    if task is not Task.SCORE:
        return False
    names = _read_config(source).architectures or []
    return not any(name.endswith("ForSequenceClassification") for name in names)


def _position_offset(body: Any) -> int:
    """Return the position of a first token: RoBERTa's relatives begin behind their padding id."""
    embeddings = getattr(body, "embeddings", None)
    if isinstance(embeddings, torch.nn.Embedding):
        return 0  # a plain table, whose padding id is about gradients
    padding = getattr(embeddings, "padding_idx", None)
    return padding + 1 if isinstance(padding, int) else 0


def _has_types(body: Any, config: PreTrainedConfig) -> bool:
    accepts = "token_type_ids" in inspect.signature(body.forward).parameters
    return accepts and bool(getattr(config, "type_vocab_size", 0))


def _describe_head(module: Any, task: Task, *, is_causal: bool, is_trained: bool) -> HeadInfo:
    """Say which rows the head reads and what its columns mean."""
    config = module.config
    try:
        notes = read_notes(config.to_dict())
    except StartupError as error:
        raise StartupError([f"config.json: {problem}" for problem in error.problems]) from error
    if task is Task.TOKEN_CLASSIFY:
        rows = HeadRows.ALL
    elif isinstance(module, GenericForSequenceClassification) or is_causal:
        rows = HeadRows.LAST
    elif getattr(config, "classifier_pooling", "cls") == "mean":
        rows = HeadRows.MEAN
    else:
        rows = HeadRows.FIRST
    labels = build_labels(int(config.num_labels), notes)
    return HeadInfo(rows=rows, labels=labels, notes=notes, is_trained=is_trained)


def _check_keys(module: Any, missing: Sequence[str], path: str) -> bool:
    """Tell whether the head is the checkpoint's; refuse a body that is not whole."""
    outside = head_paths(module)
    absent = sorted(key for key in missing if key.rpartition(".")[0] not in outside)
    if absent:
        listed = ", ".join(absent[:8])
        raise StartupError([f"model {path}: the checkpoint lacks {len(absent)} tensors: {listed}"])
    if missing and body_of(module) is not module:
        _log.warning(
            "the checkpoint has no %s: only adapters that bring a head of their own can classify",
            ", ".join(sorted(missing)),
        )
    return not missing


def _clear_labels(module: Any, num_labels: int) -> None:
    """Make a label layer that nobody trained the same at every start."""
    for path in head_paths(module):
        layer = module.get_submodule(path)
        if isinstance(layer, torch.nn.Linear) and layer.out_features == num_labels:
            for parameter in layer.parameters():
                parameter.zero_()
