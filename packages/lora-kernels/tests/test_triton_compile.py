"""Every kernel, as the launchers launch it, compiles for NVIDIA GPUs; the interpreter cannot tell.

Launches are caught before they need a GPU and handed to Triton's compiler with a target by name.
"""

from __future__ import annotations

import itertools
import re
import subprocess
from typing import TYPE_CHECKING, Any

import pytest
import torch

from lora_kernels import Backend, apply_lora_, embedding_lora_, expand_, moe_lora_, shrink

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

pytestmark = pytest.mark.ptx

FLOATS = (torch.float32, torch.float16, torch.bfloat16)
POINTERS = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}
CAPABILITIES = (80, 90)
DIVISIBLE_BY_16 = [["tt.divisibility", 16]]


def signature_of(
    kernel: Any, values: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], dict[Any, Any]]:
    """Types, constants and attributes of a launch, specialised as Triton does it."""
    types: dict[str, Any] = {}
    constants: dict[str, Any] = {}
    attributes: dict[Any, Any] = {}
    for index, parameter in enumerate(kernel.params):
        value = values[parameter.name]
        if isinstance(value, torch.Tensor):
            types[parameter.name] = POINTERS[value.dtype]
            is_divisible = value.data_ptr() % 16 == 0
        elif parameter.is_constexpr or (value == 1 and not parameter.do_not_specialize):
            types[parameter.name] = "constexpr"
            constants[parameter.name] = value
            is_divisible = False
        else:
            types[parameter.name] = "i32" if abs(value) < 2**31 else "i64"
            is_divisible = value % 16 == 0 and not parameter.do_not_specialize
        if is_divisible:
            attributes[index,] = DIVISIBLE_BY_16
    return types, constants, attributes


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """What the test launched: name and compiled kernel."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.runtime.jit import JITFunction

    from lora_kernels._triton import embedding, linear, moe

    launched: list[tuple[str, Any]] = []

    def compile_launch(kernel: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        options = {name: kwargs.pop(name) for name in [*kwargs] if name not in kernel.arg_names}
        values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
        source = ASTSource(kernel, *signature_of(kernel, values))
        for capability in CAPABILITIES:
            target = GPUTarget("cuda", capability, 32)
            launched.append((kernel.__name__, triton.compile(source, target, options)))

    def accept_any_device(op: str, tensor: Tensor) -> None:
        pass

    monkeypatch.setattr(JITFunction, "run", compile_launch)
    monkeypatch.setattr(linear, "check_device", accept_any_device)
    monkeypatch.setattr(embedding, "check_device", accept_any_device)
    monkeypatch.setattr(moe, "check_device", accept_any_device)
    return launched


def spilled_bytes(kernel: Any, folder: Path) -> int:
    """Local memory a thread needs because it has no registers left."""
    from triton import knobs

    cubin = folder / "kernel.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(cubin)]
    listing = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    (stack,) = re.findall(r"STACK:(\d+)", listing)
    return int(stack)


def assert_compiled(compiled: list[tuple[str, Any]], names: list[str], folder: Path) -> None:
    assert [name for name, _ in compiled] == [name for name in names for _ in CAPABILITIES]
    for _, kernel in compiled:
        assert kernel.metadata.shared <= 99 * 1024  # what a block has on any GPU since Ampere
        assert spilled_bytes(kernel, folder) <= 64


DTYPES = [
    (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16, torch.float16),
    (torch.float32, torch.float32, torch.float32),
    (torch.bfloat16, torch.float16, torch.float32),
    (torch.float32, torch.bfloat16, torch.float16),
]


@pytest.mark.parametrize("dtypes", DTYPES)
@pytest.mark.parametrize(("num_tokens", "kind"), [(4, "bgmv"), (40, "sgmv"), (300, "sgmv")])
def test_apply_compiles_for_every_dtype_and_way(  # noqa: PLR0917 - one parameter an axis
    make_step: Callable[..., Any],
    compiled: list[tuple[str, Any]],
    tmp_path: Path,
    dtypes: tuple[torch.dtype, ...],
    num_tokens: int,
    kind: str,
) -> None:
    weight_dtype, x_dtype, y_dtype = dtypes
    step = make_step(
        entries=[(t, 2 * t // num_tokens if kind == "sgmv" else t, 1.0) for t in range(num_tokens)],
        num_tokens=num_tokens,
        ranks=[(8, 16)] * 4,
        in_features=512,
        widths=(64, 32),
        dtype=weight_dtype,
        x_dtype=x_dtype,
        y_dtype=y_dtype,
    )

    apply_lora_(step.y, step.x, step.weights, step.routing, backend=Backend.TRITON)

    assert_compiled(compiled, [f"{kind}_shrink_kernel", f"{kind}_expand_kernel"], tmp_path)


@pytest.mark.parametrize("num_tokens", [2, 40])
@pytest.mark.parametrize(
    ("max_rank", "in_features", "widths"),
    [(1, 1, (1,)), (7, 37, (23, 5)), (512, 4096, (1024,)), (64, 576, (576, 192, 192))],
)
def test_odd_and_extreme_sizes_compile(  # noqa: PLR0917 - one parameter an axis
    make_step: Callable[..., Any],
    compiled: list[tuple[str, Any]],
    tmp_path: Path,
    num_tokens: int,
    max_rank: int,
    in_features: int,
    widths: tuple[int, ...],
) -> None:
    step = make_step(
        entries=[(t, 2 * t // num_tokens, 1.0) for t in range(num_tokens)],
        num_tokens=num_tokens,
        ranks=[(max_rank,) * len(widths)] * 2,
        max_rank=max_rank,
        in_features=in_features,
        widths=widths,
        dtype=torch.bfloat16,
    )

    v = shrink(step.x.t().contiguous().t(), step.weights, step.routing, backend=Backend.TRITON)
    expand_(step.y.t().contiguous().t(), v, step.weights, step.routing, backend=Backend.TRITON)

    kind = "bgmv" if num_tokens == 2 else "sgmv"
    assert_compiled(compiled, [f"{kind}_shrink_kernel", f"{kind}_expand_kernel"], tmp_path)


@pytest.mark.parametrize(("num_tokens", "dtype"), list(itertools.product([2, 40], FLOATS)))
def test_gains_biases_and_embeddings_compile(
    make_step: Callable[..., Any],
    compiled: list[tuple[str, Any]],
    tmp_path: Path,
    num_tokens: int,
    dtype: torch.dtype,
) -> None:
    step = make_step(
        entries=[(t, 0, 1.0) for t in range(num_tokens)],
        num_tokens=num_tokens,
        ranks=[(8,)],
        in_features=100,
        widths=(64,),
        dtype=dtype,
    )
    step.weights.write_slot(0, step.pairs[0], gain=torch.ones(64))
    ids = torch.zeros(num_tokens, dtype=torch.int64)

    embedding_lora_(step.y, ids, step.weights, step.routing, backend=Backend.TRITON)

    kind = "bgmv" if num_tokens == 2 else "sgmv"
    assert_compiled(compiled, ["gather_kernel", f"{kind}_expand_kernel"], tmp_path)


@pytest.mark.parametrize("dtypes", [DTYPES[0], DTYPES[2], DTYPES[3]])
@pytest.mark.parametrize(("num_tokens", "kind"), [(4, "bgmv"), (40, "sgmv"), (300, "sgmv")])
def test_experts_compile_for_every_dtype_and_way(  # noqa: PLR0917 - one parameter an axis
    make_expert_step: Callable[..., Any],
    compiled: list[tuple[str, Any]],
    tmp_path: Path,
    dtypes: tuple[torch.dtype, ...],
    num_tokens: int,
    kind: str,
) -> None:
    weight_dtype, x_dtype, y_dtype = dtypes
    step = make_expert_step(
        entries=[(t, 0 if kind == "sgmv" else t % 4, 1.0) for t in range(num_tokens)],
        num_tokens=num_tokens,
        ranks=[(8, 16)] * 4,
        in_features=512,
        width=64,
        dtype=weight_dtype,
        x_dtype=x_dtype,
        y_dtype=y_dtype,
        has_row_x=num_tokens == 40,
        has_router_weights=num_tokens != 300,
    )

    moe_lora_(
        step.y,
        step.x,
        step.weights,
        step.expert_routing,
        router_weights=step.router_weights,
        backend=Backend.TRITON,
    )

    assert_compiled(compiled, [f"moe_{kind}_shrink_kernel", f"moe_{kind}_expand_kernel"], tmp_path)


def test_experts_in_weighted_sets_expand_row_by_row(
    make_expert_step: Callable[..., Any], compiled: list[tuple[str, Any]], tmp_path: Path
) -> None:
    step = make_expert_step(
        entries=[(t, slot, 0.5) for t in range(64) for slot in (0, 1)],
        num_tokens=64,
        ranks=[(8,), (8,)],
        in_features=512,
        width=64,
    )

    moe_lora_(step.y, step.x, step.weights, step.expert_routing, backend=Backend.TRITON)

    assert_compiled(compiled, ["moe_sgmv_shrink_kernel", "moe_bgmv_expand_kernel"], tmp_path)
