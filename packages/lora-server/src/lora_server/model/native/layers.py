"""Norms, gated MLPs and rotary embeddings of a model, in one kernel each.

A module is recognised by what it holds, and its fast form is kept only where it agrees with the
module's own forward on random numbers. Everything else stays as it is.

Letters: `T` rows, `D` width, `F` inner width.
"""

from __future__ import annotations

import logging
import types
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from lora_server.model.native.kernels import LANES

if TYPE_CHECKING:
    from collections.abc import Callable

    from lora_server.model.native.kernels import LayerKernels

_log = logging.getLogger(__name__)

_ROWS = 5
"""Rows of the comparison."""
_ROTARY = "apply_rotary_pos_emb"


@torch.inference_mode()
def use_native_layers(model: nn.Module, kernels: LayerKernels) -> dict[str, int]:
    """Give a model's modules their fast forms, where they have one. Call it before LoRA is put in.

    Args:
        model: on the CPU.
        kernels: those for the model's dtype; modules of another one are left alone.

    Returns:
        Kind of module -> how many got one.
    """
    counts = {"norms": 0, "gated MLPs": 0, "rotary embeddings": 0}
    for module in model.modules():
        weight = next(module.parameters(), None)
        if weight is None or weight.dtype is not kernels.dtype:
            continue
        if _is_rms_norm(module):
            counts["norms"] += _replace(module, RmsNorm(module, kernels), weight, len(weight))
        elif _is_gated_mlp(module):
            width = cast("nn.Linear", module.gate_proj).in_features
            counts["gated MLPs"] += _replace(module, GatedMlp(module, kernels), weight, width)
        else:
            counts["rotary embeddings"] += _replace_rotary(module, kernels, weight.dtype)
    _log.info("native forms of %s", ", ".join(f"{n} {name}" for name, n in counts.items()))
    return counts


class RmsNorm:
    """`weight * (x / sqrt(mean(x^2) + epsilon))`, rounded where transformers rounds."""

    def __init__(self, module: nn.Module, kernels: LayerKernels) -> None:
        """Read weight and epsilon from `module` at each call."""
        self._module = cast("Any", module)
        self._kernels = kernels

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map `[..., D]` to the same shape."""
        weight = self._module.weight
        width = weight.shape[0]
        rows = _as_rows(hidden_states)
        out = torch.empty(hidden_states.shape, dtype=hidden_states.dtype)
        self._kernels.rms_norm(
            rows.data_ptr(),
            rows.stride(0),
            weight.data_ptr(),
            self._module.variance_epsilon,
            out.data_ptr(),
            rows.shape[0],
            width,
        )
        return out


class GatedMlp:
    """`down(silu(gate(x)) * up(x))`; its three projections are the module's own."""

    def __init__(self, module: nn.Module, kernels: LayerKernels) -> None:
        """Look the projections up in `module` at each call: they may be wrapped later."""
        self._module = cast("Any", module)
        self._kernels = kernels

    def __call__(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Map `[..., D]` to the same shape."""
        module = self._module
        gate, up = module.gate_proj(hidden_states), module.up_proj(hidden_states)
        gate_rows, up_rows = _as_rows(gate), _as_rows(up)
        inner = torch.empty(gate.shape, dtype=gate.dtype)
        self._kernels.silu_multiply(
            gate_rows.data_ptr(),
            gate_rows.stride(0),
            up_rows.data_ptr(),
            up_rows.stride(0),
            inner.data_ptr(),
            gate_rows.shape[0],
            gate_rows.shape[1],
        )
        result: torch.Tensor = module.down_proj(inner)
        return result


class Rotary:
    """transformers' `apply_rotary_pos_emb` for one sequence of packed rows."""

    def __init__(self, kernels: LayerKernels, original: Callable[..., Any]) -> None:
        """Call `original` for what the kernel does not take."""
        self._kernels = kernels
        self._original = original

    def __call__(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        unsqueeze_dim: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Rotate `[1, heads, T, D]`; `cos` and `sin` are `[1, T, D]`.

        Returns:
            Both, laid out as `[1, T, heads, D]` in memory.
        """
        is_plain = (
            unsqueeze_dim == 1
            and query.shape[0] == 1
            and cos.shape == sin.shape == (1, query.shape[2], query.shape[3])
            and cos.dtype is sin.dtype is query.dtype is key.dtype
            and query.stride(3) == key.stride(3) == 1
            and query.shape[3] % 2 == 0
        )
        if not is_plain:
            rotated: tuple[torch.Tensor, torch.Tensor] = self._original(
                query, key, cos, sin, unsqueeze_dim=unsqueeze_dim
            )
            return rotated
        cos, sin = cos.contiguous(), sin.contiguous()
        return self._rotate(query, cos, sin), self._rotate(key, cos, sin)

    def _rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        _, heads, rows, width = x.shape
        out = torch.empty((1, rows, heads, width), dtype=x.dtype)
        self._kernels.rotate(
            x.data_ptr(),
            x.stride(2),
            x.stride(1),
            cos.data_ptr(),
            sin.data_ptr(),
            out.data_ptr(),
            rows,
            heads,
            width,
        )
        return out.transpose(1, 2)


def _as_rows(x: torch.Tensor) -> torch.Tensor:
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _is_rms_norm(module: nn.Module) -> bool:
    own = dict(module.named_parameters())
    return (
        own.keys() == {"weight"} and own["weight"].ndim == 1 and hasattr(module, "variance_epsilon")
    )


def _is_gated_mlp(module: nn.Module) -> bool:
    projections = [getattr(module, name, None) for name in ("gate_proj", "up_proj", "down_proj")]
    is_linear = all(type(projection) is nn.Linear for projection in projections)
    return is_linear and "SiLU" in type(getattr(module, "act_fn", None)).__name__


def _replace(module: nn.Module, fast: Any, weight: torch.Tensor, width: int) -> int:
    """Put `fast` in the place of the module's forward if it computes the same; return 1 then."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, _ROWS, width, generator=generator).to(weight.dtype)
    if not _agree(fast(x), module(x)):
        return 0
    module.forward = fast
    return 1


def _replace_rotary(module: nn.Module, kernels: LayerKernels, dtype: torch.dtype) -> int:
    """Let one attention module's forward call `Rotary`; the function it knows is left alone."""
    forward = getattr(type(module).forward, "__wrapped__", type(module).forward)
    names = getattr(forward, "__globals__", {})
    code = getattr(forward, "__code__", None)
    if code is None or _ROTARY not in code.co_names or _ROTARY not in names:
        return 0
    fast = Rotary(kernels, names[_ROTARY])
    width = int(getattr(module, "head_dim", 0))
    if not width or width % (2 * LANES) or not _rotates_alike(fast, names[_ROTARY], width, dtype):
        return 0
    own = types.FunctionType(
        code, {**names, _ROTARY: fast}, forward.__name__, forward.__defaults__, forward.__closure__
    )
    own.__kwdefaults__ = forward.__kwdefaults__
    module.forward = types.MethodType(own, module)
    return 1


def _rotates_alike(
    fast: Rotary, original: Callable[..., Any], width: int, dtype: torch.dtype
) -> bool:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).to(dtype)

    arguments = (numbers(1, 3, _ROWS, width), numbers(1, 1, _ROWS, width))
    angles = (numbers(1, _ROWS, width), numbers(1, _ROWS, width))
    try:
        expected = original(*arguments, *angles)
    except (TypeError, ValueError, RuntimeError):
        return False  # a function of that name with other arguments
    found = fast(*arguments, *angles)
    return all(_agree(one, other) for one, other in zip(found, expected, strict=True))


def _agree(found: torch.Tensor, expected: torch.Tensor) -> bool:
    """Whether two results are the same up to sums in another order, rounded."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return False
    epsilon = torch.finfo(found.dtype).eps
    tolerance = max(2 * epsilon, 1e-5)
    return torch.allclose(found.float(), expected.float(), rtol=tolerance, atol=tolerance)
