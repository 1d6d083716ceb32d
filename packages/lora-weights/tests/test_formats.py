"""Every format loads and binds to the formula PEFT gives it, worked out here in float64.

y' = gain * (y + B A x) + bias      y' = W x + b for a whole replacement
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch

from lora_weights import BoundPart, bind_adapter, load_adapter, save_adapter
from lora_weights.testing_formats import FORMATS, SHAPES, Q, V, base_tensors, build_format

if TYPE_CHECKING:
    from pathlib import Path

    from lora_weights import Adapter, RawAdapter

PREFIX = "base_model.model."
X = torch.randn(5, 8, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
EXACT = 1e-5
"""float32 factors folded once, in sums of eight products; everything else is float64."""


def assert_exact(found: torch.Tensor, expected: torch.Tensor) -> None:
    torch.testing.assert_close(found, expected, rtol=EXACT, atol=EXACT)


def loaded(raw: RawAdapter, folder: Path) -> Adapter:
    return load_adapter(save_adapter(raw, folder))


def bound(raw: RawAdapter, folder: Path) -> dict[str, BoundPart]:
    return bind_adapter(loaded(raw, folder), SHAPES, max_rank=16, base=base_tensors)


def tensor(raw: RawAdapter, key: str) -> torch.Tensor:
    return raw.tensors[PREFIX + key].double()


def base_output(path: str) -> torch.Tensor:
    base = base_tensors(path)
    y = X @ base.weight.double().T
    return y if base.bias is None else y + base.bias.double()


def output(path: str, part: BoundPart) -> torch.Tensor:
    """Apply a bound part to a linear module."""
    if part.full is not None:
        y = X @ part.full.weight.double().T
        return y if part.full.bias is None else y + part.full.bias.double()
    y = base_output(path)
    if part.pair is not None:
        y = y + X @ part.pair.lora_a.double().T @ part.pair.lora_b.double().T
    if part.gain is not None:
        y = y * part.gain.double()
    return y if part.bias is None else y + part.bias.double()


def update(raw: RawAdapter, path: str, scaling: float) -> torch.Tensor:
    lora_a, lora_b = tensor(raw, f"{path}.lora_A.weight"), tensor(raw, f"{path}.lora_B.weight")
    return scaling * lora_b @ lora_a


@pytest.mark.parametrize("name", FORMATS)
def test_every_tensor_of_a_format_is_applied(name: str, tmp_path: Path) -> None:
    raw = build_format(name)
    before = bound(raw, tmp_path / "before")

    for index, key in enumerate(sorted(raw.tensors)):
        changed = {**raw.tensors, key: raw.tensors[key] + 0.5}
        after = bound(type(raw)(config=raw.config, tensors=changed), tmp_path / str(index))
        assert any(differ(before[path], after[path]) for path in before), key


def differ(first: BoundPart, second: BoundPart) -> bool:
    if first.pair is not None and second.pair is not None:
        products = [pair.lora_b @ pair.lora_a for pair in (first.pair, second.pair)]
        if not torch.equal(*products):
            return True
    vectors = [(first.gain, second.gain), (first.bias, second.bias)]
    if first.full is not None and second.full is not None:
        vectors.append((first.full.weight, second.full.weight))
        vectors.append((first.full.bias, second.full.bias))
    return any(
        one is not None and two is not None and not torch.equal(one, two) for one, two in vectors
    )


def test_c13_dora_is_the_magnitude_over_the_norm_and_leaves_the_bias_alone(tmp_path: Path) -> None:
    raw = build_format("dora")
    base = base_tensors(Q)
    assert base.bias is not None
    weight = base.weight.double() + update(raw, Q, 1.5)
    gain = tensor(raw, f"{Q}.lora_magnitude_vector") / weight.norm(dim=1)
    expected = gain * (X @ weight.T) + base.bias.double()

    part = bound(raw, tmp_path)[Q]

    assert_exact(output(Q, part), expected)


def test_c13_dora_of_an_embedding_has_one_norm_for_each_output(tmp_path: Path) -> None:
    raw = build_format("dora")
    table = base_tensors("embed_tokens").weight.double()
    lora_a = tensor(raw, "embed_tokens.lora_embedding_A")
    lora_b = tensor(raw, "embed_tokens.lora_embedding_B")
    changed = table + 1.5 * (lora_b @ lora_a).T
    gain = tensor(raw, "embed_tokens.lora_magnitude_vector") / changed.norm(dim=0)

    part = bound(raw, tmp_path)["embed_tokens"]

    assert part.pair is not None
    assert part.gain is not None
    ours = table + part.pair.lora_a.double().T @ part.pair.lora_b.double().T
    assert_exact(ours * part.gain.double(), changed * gain)


def test_c13_an_embedding_without_biases_gets_none(tmp_path: Path) -> None:
    assert bound(build_format("dora"), tmp_path)["embed_tokens"].bias is None


def test_c13_norms_do_not_depend_on_the_size_of_a_chunk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    raw = build_format("dora")
    whole = bound(raw, tmp_path)

    monkeypatch.setattr("lora_weights.dora.CHUNK_ELEMENTS", 24)

    for path, part in bound(raw, tmp_path).items():
        assert part.gain is not None
        other = whole[path].gain
        assert other is not None
        torch.testing.assert_close(part.gain, other, rtol=1e-6, atol=0)


def test_c14_the_bias_of_lora_b_is_added_times_the_scaling(tmp_path: Path) -> None:
    raw = build_format("lora_bias")
    added = 1.5 * tensor(raw, f"{V}.lora_B.bias")

    part = bound(raw, tmp_path)[V]

    expected = base_output(V) + X @ update(raw, V, 1.5).T + added
    assert_exact(output(V, part), expected)


@pytest.mark.parametrize("key", ["bias", "base_layer.bias"])
@pytest.mark.parametrize("word", ["lora_only", "all"])
def test_c14_a_trained_bias_replaces_that_of_the_base(word: str, key: str, tmp_path: Path) -> None:
    raw = build_format("bias", bias=word)
    tensors = {k.replace("base_layer.bias", key): t for k, t in raw.tensors.items()}
    raw = type(raw)(config=raw.config, tensors=tensors)
    weight = base_tensors(Q).weight.double() + update(raw, Q, 1.5)

    part = bound(raw, tmp_path)[Q]

    expected = X @ weight.T + tensor(raw, f"{Q}.{key}")
    assert_exact(output(Q, part), expected)


def test_c14_a_plain_adapter_needs_no_base_and_has_no_bias(tmp_path: Path) -> None:
    parts = bind_adapter(loaded(build_format("lora"), tmp_path), SHAPES, max_rank=2)

    assert all(part.bias is None and part.gain is None for part in parts.values())


def test_trained_biases_beside_magnitudes_are_not_scaled(tmp_path: Path) -> None:
    raw = build_format("dora", bias="lora_only")
    trained = {f"{PREFIX}{Q}.base_layer.bias": torch.randn(8), f"{PREFIX}{V}.bias": torch.randn(4)}
    raw = type(raw)(config=raw.config, tensors={**raw.tensors, **trained})
    weight = base_tensors(Q).weight.double() + update(raw, Q, 1.5)
    gain = tensor(raw, f"{Q}.lora_magnitude_vector") / weight.norm(dim=1)

    part = bound(raw, tmp_path)[Q]

    expected = gain * (X @ weight.T) + tensor(raw, f"{Q}.base_layer.bias")
    assert_exact(output(Q, part), expected)


def test_c17_whole_matrices_replace_those_of_the_base(tmp_path: Path) -> None:
    raw = build_format("whole")

    parts = bound(raw, tmp_path)

    head = X @ tensor(raw, "lm_head.weight").T
    score = X @ tensor(raw, "score.weight").T + tensor(raw, "score.bias")
    torch.testing.assert_close(output("lm_head", parts["lm_head"]), head)
    torch.testing.assert_close(output("score", parts["score"]), score)
    assert not parts["score"].is_linear


def test_ia3_scales_what_the_module_puts_out_its_bias_too(tmp_path: Path) -> None:
    raw = build_format("ia3")
    gain = tensor(raw, f"{Q}.ia3_l").flatten()

    part = bound(raw, tmp_path)[Q]

    torch.testing.assert_close(output(Q, part), gain * base_output(Q))
    assert (part.pair, part.bias, part.is_linear) == (None, None, False)


def test_vera_takes_the_first_columns_and_rows_of_the_shared_matrices(tmp_path: Path) -> None:
    raw = build_format("vera")
    shared_a = raw.tensors["base_model.vera_A"].double()
    shared_b = raw.tensors["base_model.vera_B"].double()
    inner = tensor(raw, f"{V}.vera_lambda_d")[:, None] * shared_a
    expected = tensor(raw, f"{V}.vera_lambda_b")[:, None] * shared_b[:4] @ inner

    part = bound(raw, tmp_path)[V]

    assert_exact(output(V, part), base_output(V) + X @ expected.T)


def test_loha_is_the_elementwise_product_of_two_updates(tmp_path: Path) -> None:
    raw = build_format("loha")
    w1 = tensor(raw, f"{Q}.hada_w1_a") @ tensor(raw, f"{Q}.hada_w1_b")
    w2 = tensor(raw, f"{Q}.hada_w2_a") @ tensor(raw, f"{Q}.hada_w2_b")

    part = bound(raw, tmp_path)[Q]

    assert_exact(output(Q, part), base_output(Q) + X @ (1.5 * w1 * w2).T)
    assert part.rank == 4


def test_lokr_is_the_kronecker_product_of_two_matrices(tmp_path: Path) -> None:
    raw = build_format("lokr")
    w2 = tensor(raw, f"{Q}.lokr_w2_a") @ tensor(raw, f"{Q}.lokr_w2_b")
    product = torch.kron(tensor(raw, f"{Q}.lokr_w1"), w2)

    part = bound(raw, tmp_path)[Q]

    assert_exact(output(Q, part), base_output(Q) + X @ (1.5 * product).T)
    assert part.rank == 4


@pytest.mark.parametrize("name", FORMATS)
def test_only_formats_without_gain_and_whole_modules_are_linear(name: str, tmp_path: Path) -> None:
    raw = build_format(name)
    adapter = loaded(raw, tmp_path)

    parts = bind_adapter(adapter, SHAPES, max_rank=16, base=base_tensors)

    assert adapter.is_linear is (name not in ("dora", "ia3", "whole"))
    assert adapter.is_linear is all(part.is_linear for part in parts.values())


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float16, torch.bfloat16])
def test_a_format_is_read_in_every_type(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    raw = build_format(name)
    tensors = {key: tensor.to(dtype) for key, tensor in raw.tensors.items()}
    wide = type(raw)(config=raw.config, tensors={k: t.double() for k, t in tensors.items()})
    narrow = type(raw)(config=raw.config, tensors=tensors)

    parts = bound(narrow, tmp_path / "narrow")

    for path, part in bound(wide, tmp_path / "wide").items():
        if part.pair is not None:
            found = parts[path].pair
            assert found is not None
            both = [(pair.lora_b.float() @ pair.lora_a.float()) for pair in (found, part.pair)]
            # One rounding of each factor to the type it is held in.
            torch.testing.assert_close(*both, rtol=2e-2, atol=2e-2)
        assert (part.gain is None) is (parts[path].gain is None)


@pytest.mark.parametrize("name", FORMATS)
def test_a_raw_dump_with_the_adapters_name_in_it_is_the_same_adapter(
    name: str, tmp_path: Path
) -> None:
    raw = build_format(name)
    plain = loaded(raw, tmp_path / "plain")

    dumped = loaded(
        type(raw)(config=raw.config, tensors={_named(key): t for key, t in raw.tensors.items()}),
        tmp_path / "dumped",
    )

    assert dumped.digest == plain.digest
    assert dumped.parts.keys() == plain.parts.keys()


def _named(key: str) -> str:
    """Return a key as a state dict holds it, with the adapter's name "lora"."""
    for ending in (".lora_A.weight", ".lora_B.weight", ".lora_B.bias"):
        if key.endswith(ending):
            head, _, leaf = key.rpartition(".")
            return f"{head}.lora.{leaf}"
    if key.endswith(("base_layer.bias", "base_layer.weight")):
        return key
    if key.endswith(("score.weight", "score.bias", "lm_head.weight")):
        head, _, leaf = key.rpartition(".")
        return f"{head}.modules_to_save.lora.{leaf}"
    return f"{key}.lora"
