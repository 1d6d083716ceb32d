"""Expert adapters from file to bound part: every layout, blocks of experts, what is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from lora_weights import (
    ExpertPart,
    ExpertShape,
    InvalidAdapterError,
    ModuleShape,
    ProblemCode,
    RawAdapter,
    bind_adapter,
    expert_range,
    inspect_adapter,
    load_adapter,
    save_adapter,
    slice_experts,
    to_parameters,
    to_per_expert,
)
from lora_weights.names import PEFT_PREFIX
from lora_weights.tensors import read_header
from lora_weights.testing import count_reads

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

E = "model.layers.0.mlp.experts"
Q = "model.layers.0.self_attn.q_proj"
X, H, F, R = 4, 16, 12, 2
SHAPE = ExpertShape(num_experts=X, hidden_size=H, intermediate_size=F)
SHAPES: dict[str, ModuleShape | ExpertShape] = {
    E: SHAPE,
    Q: ModuleShape(in_features=H, out_features=H),
}


def random(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def tensors_of(pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """Return module path -> (A, B) under PEFT's keys."""
    return {
        f"{PEFT_PREFIX}{path}.lora_{half}.weight": tensor
        for path, pair in pairs.items()
        for half, tensor in zip("AB", pair, strict=True)
    }


def per_expert(
    experts: Sequence[int] = range(X), *, alone: bool = False
) -> dict[str, torch.Tensor]:
    sizes = {"gate_proj": (H, F), "up_proj": (H, F), "down_proj": (F, H)}
    pairs = {
        f"{E}.{expert}.{name}": (
            random(R, wide, seed=expert + wide),
            random(high, R, seed=7 * expert + len(name)),
        )
        for expert in experts
        for name, (wide, high) in sizes.items()
    }
    if not alone:
        pairs[Q] = random(R, H), random(H, R, seed=1)
    return tensors_of(pairs)


def parameters() -> dict[str, torch.Tensor]:
    return tensors_of(
        {
            f"{E}.base_layer": (random(X * R, H, seed=2), random(2 * F, R * X, seed=3)),
            E: (random(X * R, F, seed=4), random(H, R * X, seed=5)),
            Q: (random(R, H), random(H, R, seed=1)),
        }
    )


def shared_outer() -> dict[str, torch.Tensor]:
    return tensors_of(
        {
            f"{E}.w1": (random(1, R, H, seed=2), random(X, F, R, seed=3)),
            f"{E}.w2": (random(X, R, F, seed=4), random(1, H, R, seed=5)),
            f"{E}.w3": (random(1, R, H, seed=6), random(X, F, R, seed=7)),
            Q: (random(R, H), random(H, R, seed=1)),
        }
    )


def stacked() -> dict[str, torch.Tensor]:
    return tensors_of(
        {
            f"{E}.gate_up_proj": (random(X, R, H, seed=2), random(X, 2 * F, R, seed=3)),
            f"{E}.down_proj": (random(X, R, F, seed=4), random(X, H, R, seed=5)),
        }
    )


LAYOUTS = {
    "single experts": per_expert,
    "parameters": parameters,
    "shared outer": shared_outer,
    "stacked": stacked,
}


def write(folder: Path, tensors: Mapping[str, torch.Tensor], **config: object) -> Path:
    fields = {
        "peft_type": "LORA",
        "r": R,
        "lora_alpha": 3 * R,
        "target_modules": ["q_proj"],
        "peft_version": "0.21.2",
        **config,
    }
    return save_adapter(RawAdapter(config=fields, tensors=tensors), folder)


def bound_experts(folder: Path, experts: range | None = None) -> ExpertPart:
    found = bind_adapter(load_adapter(folder, experts=experts), SHAPES, max_rank=8)[E].experts
    assert found is not None
    return found


def same(first: ExpertPart, second: ExpertPart) -> bool:
    return all(
        (one is None and other is None)
        or (
            one is not None
            and other is not None
            and torch.equal(one.lora_a, other.lora_a)
            and torch.equal(one.lora_b, other.lora_b)
        )
        for one, other in zip(
            (first.w1, first.w2, first.w3), (second.w1, second.w2, second.w3), strict=True
        )
    )


@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout_of_a_file_is_bound_with_nothing_left_over(
    tmp_path: Path, layout: str
) -> None:
    tensors = LAYOUTS[layout]()
    folder = write(tmp_path, tensors)

    bound = bind_adapter(load_adapter(folder), SHAPES, max_rank=8)

    assert bound[E].experts is not None
    assert (Q in bound) is any(Q in key for key in tensors)
    assert inspect_adapter(folder).problems == ()


def delta(part: ExpertPart, name: str) -> torch.Tensor:
    pair = {"w1": part.w1, "w2": part.w2, "w3": part.w3}[name]
    assert pair is not None
    return pair.lora_b.double() @ pair.lora_a.double()


def test_2d_and_3d_files_of_one_adapter_are_bound_to_the_same_update(tmp_path: Path) -> None:
    whole = bound_experts(write(tmp_path / "first", parameters()))
    single = {
        f"{E}.{name}": (pair.lora_a, pair.lora_b)
        for name, pair in to_per_expert(whole, SHAPE).items()
    }
    flat = to_parameters(whole, SHAPE)
    nested = {
        f"{E}.base_layer": (flat["gate_up_proj"].lora_a, flat["gate_up_proj"].lora_b),
        E: (flat["down_proj"].lora_a, flat["down_proj"].lora_b),
    }

    two = bound_experts(write(tmp_path / "2d", tensors_of(single), lora_alpha=R))
    three = bound_experts(write(tmp_path / "3d", tensors_of(nested), lora_alpha=R))

    assert same(three, whole)
    for name in ("w1", "w2", "w3"):
        assert torch.allclose(delta(two, name), delta(whole, name), atol=1e-6)


def test_stacked_fused_files_are_split_like_their_parts(tmp_path: Path) -> None:
    part = bound_experts(write(tmp_path, stacked(), lora_alpha=R))

    keys = {key.removeprefix(f"{PEFT_PREFIX}{E}."): tensor for key, tensor in stacked().items()}
    fused = keys["gate_up_proj.lora_B.weight"]
    assert part.w1 is not None
    assert part.w3 is not None
    assert torch.equal(part.w1.lora_b, fused[:, :F])
    assert torch.equal(part.w3.lora_b, fused[:, F:])


@pytest.mark.parametrize("ep_size", [2, 4])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_blocks_of_experts_put_together_are_the_whole(
    tmp_path: Path, layout: str, ep_size: int
) -> None:
    folder = write(tmp_path, LAYOUTS[layout]())
    whole = bound_experts(folder)

    for rank in range(ep_size):
        local = expert_range(X, ep_size, rank)
        assert same(bound_experts(folder, local), slice_experts(whole, local))


def touched_keys(folder: Path, experts: range) -> dict[str, float]:
    """Return tensor key -> share of its bytes that loading a block of experts reads."""
    header, _ = read_header(folder / "adapter_model.safetensors")
    assert header is not None
    with count_reads() as offsets:
        load_adapter(folder, experts=experts)
    shares = {}
    for entry in header.entries:
        start, end = header.data_start + entry.start, header.data_start + entry.end
        shares[entry.key] = len(offsets & set(range(start, end))) / (end - start)
    return shares


def test_not_a_byte_of_a_remote_single_expert_is_read(tmp_path: Path) -> None:
    shares = touched_keys(write(tmp_path, per_expert()), range(1, 3))

    local = {key for key in shares if ".experts." not in key or ".1." in key or ".2." in key}
    assert {key for key, share in shares.items() if share} == local
    assert all(shares[key] == 1 for key in local)
    assert len(local) == 2 * 3 * 2 + 2


@pytest.mark.parametrize("layout", ["shared outer", "stacked"])
def test_not_a_byte_of_a_remote_expert_in_a_stack_is_read(tmp_path: Path, layout: str) -> None:
    tensors = LAYOUTS[layout]()
    shares = touched_keys(write(tmp_path, tensors), range(1, 3))

    for key, tensor in tensors.items():
        is_stack = ".experts." in key and tensor.shape[0] == X
        assert shares[key] == (0.5 if is_stack else 1)


def test_a_pair_on_a_parameter_is_read_whole_and_kept_in_part(tmp_path: Path) -> None:
    folder = write(tmp_path, parameters())

    shares = touched_keys(folder, range(1, 2))

    assert set(shares.values()) == {1.0}
    assert bound_experts(folder, range(1, 2)).nbytes * X == bound_experts(folder).nbytes


def test_a_rank_may_have_nothing_of_an_adapter_on_other_experts(tmp_path: Path) -> None:
    folder = write(tmp_path, per_expert([3], alone=True))

    first = load_adapter(folder, experts=range(2))
    second = load_adapter(folder, experts=range(2, 4))

    assert (first.rank, first.nbytes) == (0, 0)
    assert bind_adapter(first, SHAPES, max_rank=8) == {}
    assert list(bind_adapter(second, SHAPES, max_rank=8)) == [E]


def test_a_block_has_a_digest_of_its_own(tmp_path: Path) -> None:
    folder = write(tmp_path, per_expert())

    digests = {
        load_adapter(folder, experts=block).digest
        for block in (None, range(2), range(2, 4), range(4))
    }

    assert len(digests) == 4
    assert load_adapter(folder, experts=range(2)).digest in digests


def test_pickles_are_cut_after_reading(tmp_path: Path) -> None:
    folder = write(tmp_path / "safe", per_expert())
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "adapter_config.json").write_bytes((folder / "adapter_config.json").read_bytes())
    torch.save(per_expert(), pickled / "adapter_model.bin")

    adapter = load_adapter(pickled, experts=range(1), allow_pickle=True)

    assert set(adapter.parts) == {
        Q,
        *(f"{E}.0.{name}" for name in ("gate_proj", "up_proj", "down_proj")),
    }
    assert adapter.digest == load_adapter(folder, experts=range(1)).digest


@pytest.mark.parametrize("experts", [range(0), range(0, 4, 2), range(-1, 2)])
def test_experts_that_are_no_block_are_an_error(tmp_path: Path, experts: range) -> None:
    with pytest.raises(ValueError, match="expected a block of them"):
        load_adapter(write(tmp_path, per_expert()), experts=experts)


def test_a_block_beyond_the_experts_of_the_base_is_named(tmp_path: Path) -> None:
    adapter = load_adapter(write(tmp_path, parameters()), experts=range(3, 5))

    with pytest.raises(InvalidAdapterError, match="asked for experts 3 to 4, expected experts 0"):
        bind_adapter(adapter, SHAPES, max_rank=8)


def test_c16_a_pair_inside_another_is_legal_for_experts_and_refused_for_dense_layers(
    tmp_path: Path,
) -> None:
    dense = tensors_of({f"{Q}.base_layer": (random(R, H), random(H, R))})

    with pytest.raises(InvalidAdapterError) as caught:
        load_adapter(write(tmp_path, {**parameters(), **dense}))

    assert [problem.code for problem in caught.value.problems] == [ProblemCode.NESTED_ADAPTER]
    assert Q in str(caught.value)


def test_c12_layers_to_transform_filters_no_expert_out(tmp_path: Path) -> None:
    pairs = {
        "layers.1.experts.0.up_proj": (random(R, H), random(F, R)),
        "layers.1.experts.1.up_proj": (random(R, H), random(F, R)),
    }
    folder = write(tmp_path, tensors_of(pairs), layers_to_transform=[1], layers_pattern="layers")
    shapes = {f"layers.{layer}.experts": SHAPE for layer in (0, 1)}

    bound = bind_adapter(load_adapter(folder), shapes, max_rank=8)

    assert list(bound) == ["layers.1.experts"]
    part = bound["layers.1.experts"].experts
    assert part is not None
    assert part.w3 is not None
    assert part.w3.lora_b.any(dim=(1, 2)).tolist() == [True, True, False, False]


@pytest.mark.parametrize("ending", ["lora_magnitude_vector", "lora_B.bias"])
def test_dora_and_biases_on_expert_parameters_are_refused_by_name(
    tmp_path: Path, ending: str
) -> None:
    extra = {f"{PEFT_PREFIX}{E}.{ending}": torch.ones(H)}
    flags = {"use_dora": ending != "lora_B.bias", "lora_bias": ending == "lora_B.bias"}
    tensors = {key: value for key, value in parameters().items() if Q not in key}

    with pytest.raises(InvalidAdapterError) as caught:
        load_adapter(write(tmp_path, {**tensors, **extra}, **flags))

    assert f"{E}.{ending}" in str(caught.value)


def test_c29_a_file_for_another_number_of_experts_is_named_with_both(tmp_path: Path) -> None:
    tensors = tensors_of({E: (random(3 * R, F), random(H, R * 3))})
    adapter = load_adapter(write(tmp_path, tensors))

    with pytest.raises(InvalidAdapterError, match="6 rows high, expected a multiple of 4"):
        bind_adapter(adapter, SHAPES, max_rank=8)


def test_patterns_of_single_and_stacked_experts_are_those_of_their_paths(tmp_path: Path) -> None:
    tensors = stacked()
    folder = write(
        tmp_path, tensors, alpha_pattern={"experts.gate_up_proj": 2 * R, "down_proj": 5 * R}
    )

    part = bound_experts(folder)

    down = tensors[f"{PEFT_PREFIX}{E}.down_proj.lora_B.weight"]
    fused = tensors[f"{PEFT_PREFIX}{E}.gate_up_proj.lora_B.weight"]
    assert part.w1 is not None
    assert part.w2 is not None
    assert torch.equal(part.w2.lora_b, down * 5)
    assert torch.equal(part.w1.lora_b, fused[:, :F] * 2)


def test_the_digest_knows_scalings_order_and_release_of_expert_parameters(tmp_path: Path) -> None:
    names: dict[str, object] = {
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    }
    patterns = {"experts.*": 4, "experts.down_proj": 6}
    turned = dict(reversed(patterns.items()))
    variants: dict[str, dict[str, object]] = {
        "plain": names,
        "release": {**names, "peft_version": "0.18.1"},
        "alpha": {**names, "alpha_pattern": {"experts.down_proj": 5}},
        "order": {**names, "alpha_pattern": patterns},
        "other order": {**names, "alpha_pattern": turned},
    }

    digests = {
        load_adapter(write(tmp_path / name, parameters(), **fields)).digest
        for name, fields in variants.items()
    }

    assert len(digests) == len(variants)


def test_a_saved_expert_adapter_is_bound_to_the_same_values(tmp_path: Path) -> None:
    for name, layout in LAYOUTS.items():
        first = write(tmp_path / name, layout(), alpha_pattern={"down_proj": 5})
        second = save_adapter(load_adapter(first), tmp_path / f"{name} again")

        assert same(bound_experts(second), bound_experts(first))


def test_types_narrower_than_stored_are_cast_once(tmp_path: Path) -> None:
    folder = write(tmp_path, parameters(), lora_alpha=R / 3)

    adapter = load_adapter(folder, dtype=torch.bfloat16)
    part = bind_adapter(adapter, SHAPES, max_rank=8)[E].experts

    stored = parameters()[f"{PEFT_PREFIX}{E}.base_layer.lora_B.weight"]
    fused = stored.reshape(2 * F, R, X).permute(2, 0, 1)
    assert part is not None
    assert part.w1 is not None
    assert torch.equal(part.w1.lora_b, (fused * (1 / 3)).bfloat16()[:, :F])


GATE = "model.layers.0.mlp.gate"


def test_a_matrix_called_weight_outside_experts_is_an_ordinary_pair(tmp_path: Path) -> None:
    tensors = {**parameters(), **tensors_of({GATE: (random(R, H), random(X, R))})}
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"]
    shapes = {**SHAPES, GATE: ModuleShape(in_features=H, out_features=X)}

    adapter = load_adapter(write(tmp_path, tensors, target_parameters=names))

    assert set(bind_adapter(adapter, shapes, max_rank=8)) == {E, GATE, Q}


@pytest.mark.parametrize(
    ("name", "pair", "found"),
    [
        ("mlp.gate.scores", (random(R, H), random(X, R)), "on the parameter scores"),
        (
            "mlp.gate.weight",
            (random(3 * R, H), random(X, 3 * R)),
            "over 3 matrices in one parameter (rank 2, 6 rows)",
        ),
    ],
)
def test_other_parameters_outside_experts_are_refused_by_name(
    tmp_path: Path, name: str, pair: tuple[torch.Tensor, torch.Tensor], found: str
) -> None:
    folder = write(tmp_path, tensors_of({GATE: pair}), target_parameters=[name])

    problems = inspect_adapter(folder).problems

    wanted = f"{GATE} lora_A is {found}, expected a matrix called weight, or a parameter of a"
    assert any(str(problem).startswith(wanted) for problem in problems)
    assert any(problem.code is ProblemCode.UNSUPPORTED_TENSOR for problem in problems)
