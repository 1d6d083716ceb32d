"""Puts LoRA into a loaded model as the options say; the same for serving and for examining."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, TypedDict

import torch

from lora_kernels import Backend
from lora_kernels.native import why_not_native
from lora_layers import LayerError, LoraModelConfig, LoraModelManager
from lora_server.config import CpuKernels
from lora_server.errors import StartupError
from lora_server.model.families import PACKED_MODULES, fused_modules
from lora_server.model.load import LoadedModel

if TYPE_CHECKING:
    from lora_cache import EvictionHook
    from lora_server.config import ServerConfig
    from lora_server.model.planned import PlannedModel
    from lora_server.model.pooling_model import LoadedPooler

_log = logging.getLogger(__name__)


def wrap_model(
    model: LoadedModel | LoadedPooler | PlannedModel,
    config: ServerConfig,
    *,
    backend: Backend = Backend.ATEN,
    on_evict: EvictionHook[str] | None = None,
) -> LoraModelManager:
    """Wrap a model in place and allocate its slots; those of a planned one take no memory.

    Args:
        model: what to wrap.
        config: the options.
        backend: implementation of the operators; who serves asks `choose_backend`.
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
                backend=backend,
                prepack_linear=model.device.type == "cpu" and model.dtype == torch.bfloat16,
                allow_pin_all=config.allow_pin_all,
                **_head_options(model, config),
            ),
            on_evict=on_evict,
            is_paced=True,
        )
    except LayerError as error:
        raise StartupError([str(error)]) from error


def choose_backend(config: ServerConfig, device: torch.device) -> Backend:
    """Return the operators' implementation; compiles the native kernels where they are wanted.

    Raises:
        StartupError: they were asked for by name and cannot run here.
    """
    if device.type != "cpu" or config.cpu_kernels is CpuKernels.ATEN:
        return Backend.for_device(device)
    reason = why_not_native()
    if reason is None:
        return Backend.NATIVE
    if config.cpu_kernels is CpuKernels.NATIVE:
        raise StartupError([f"--cpu-kernels native: {reason}"])
    _log.info("slower operators of torch are used: %s", reason)
    return Backend.ATEN


class _HeadOptions(TypedDict, total=False):
    logits_modules: frozenset[str]
    max_labels: int | None
    head_task_type: str


def _head_options(
    model: LoadedModel | LoadedPooler | PlannedModel, config: ServerConfig
) -> _HeadOptions:
    """Return what `LoraModelConfig` must know of a model that does not generate."""
    if isinstance(model, LoadedModel) or not model.has_head_rows:
        return {}
    is_per_token = model.is_per_token
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
