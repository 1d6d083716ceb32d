"""Puts LoRA into a loaded model as the options say; the same for serving and for examining."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypedDict

import torch

from lora_layers import LayerError, LoraModelConfig, LoraModelManager
from lora_server.errors import StartupError
from lora_server.model.families import PACKED_MODULES, fused_modules
from lora_server.model.load import LoadedModel
from lora_server.model.pooling_model import HeadRows

if TYPE_CHECKING:
    from lora_cache import EvictionHook
    from lora_server.config import ServerConfig
    from lora_server.model.pooling_model import LoadedPooler


def wrap_model(
    model: LoadedModel | LoadedPooler,
    config: ServerConfig,
    *,
    on_evict: EvictionHook[str] | None = None,
) -> LoraModelManager:
    """Wrap a model in place and allocate its slots.

    Args:
        model: what to wrap.
        config: the options.
        on_evict: told of each adapter that has to make room for another.

    Raises:
        StartupError: the model has nothing to wrap, or the options name what it does not have.
    """
    targets = config.lora_target_modules
    try:
        return LoraModelManager(
            model.module,
            LoraModelConfig(
                max_loras=config.max_loras,
                max_lora_rank=config.max_lora_rank,
                max_cpu_loras=config.max_cpu_loras,
                lora_dtype=lora_dtype(config),
                target_modules=None if targets is None else frozenset(targets),
                packed_modules=PACKED_MODULES,
                fused_modules=fused_modules(model.text_config),
                moe_shared_loras=config.enable_moe_shared_loras,
                prepack_linear=model.device.type == "cpu" and model.dtype == torch.bfloat16,
                allow_pin_all=config.allow_pin_all,
                **_head_options(model, config),
            ),
            on_evict=on_evict,
            is_paced=True,
        )
    except LayerError as error:
        raise StartupError([str(error)]) from error


class _HeadOptions(TypedDict, total=False):
    logits_modules: frozenset[str]
    max_labels: int | None
    head_task_type: str


def _head_options(model: LoadedModel | LoadedPooler, config: ServerConfig) -> _HeadOptions:
    """Return what `LoraModelConfig` must know of a model that does not generate."""
    if isinstance(model, LoadedModel):
        return {}
    is_per_token = model.head is not None and model.head.rows is HeadRows.ALL
    return {
        "logits_modules": model.head_paths,
        "max_labels": config.max_lora_cls_labels,
        "head_task_type": "TOKEN_CLS" if is_per_token else "SEQ_CLS",
    }


def lora_dtype(config: ServerConfig) -> torch.dtype | None:
    """Return the adapters' dtype; None means the model's."""
    name = str(config.lora_dtype)
    if name == "auto":
        return None
    dtype: torch.dtype = getattr(torch, name)
    return dtype
