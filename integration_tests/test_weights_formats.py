"""Every format of lora-weights against PEFT: its module outputs, and its reading of what we save.

PEFT builds and saves an adapter on a tiny model; `load_adapter` and `bind_adapter` read it, and the
formula that a bound part stands for is applied in plain torch, in float64.
"""

from __future__ import annotations

import warnings
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
from torch import nn
from transformers.pytorch_utils import Conv1D

from lora_weights import (
    AdapterConfig,
    BaseTensors,
    BoundPart,
    InvalidAdapterError,
    ModuleKind,
    ModuleShape,
    ProblemCode,
    bind_adapter,
    load_adapter,
    save_adapter,
)
from lora_weights.fields import METHOD_FIELDS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

    from torch import Tensor

    from lora_weights import Adapter

VOCAB, WIDTH, INNER, LABELS = 24, 12, 16, 3

TOLERANCE = 2e-6
"""The adapter is held in float32 and folded once; everything else is float64."""


class Pooler(nn.Module):
    """A classification head of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(WIDTH, WIDTH)
        self.out_proj = nn.Linear(WIDTH, LABELS)

    def forward(self, hidden: Tensor) -> Tensor:
        logits: Tensor = self.out_proj(torch.tanh(self.dense(hidden)))
        return logits


class Decoder(nn.Module):
    """One of each kind of module: linear with and without bias, Conv1D, embedding, heads."""

    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.config = {"model_type": "custom", "tie_word_embeddings": is_tied}
        self.embed_tokens = nn.Embedding(VOCAB, WIDTH)
        self.q_proj = nn.Linear(WIDTH, WIDTH)
        self.up_proj = nn.Linear(WIDTH, INNER, bias=False)
        self.c_fc: nn.Module = Conv1D(WIDTH, INNER)  # type: ignore[no-untyped-call]
        self.lm_head = nn.Linear(WIDTH, VOCAB, bias=False)
        self.classifier = Pooler()
        if is_tied:
            self._tied_weights_keys = {"lm_head.weight": "embed_tokens.weight"}
            self.lm_head.weight = self.embed_tokens.weight

    def get_input_embeddings(self) -> nn.Module:
        return self.embed_tokens

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def forward(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.embed_tokens(ids)
        hidden = hidden + self.q_proj(hidden)
        hidden = hidden + self.c_fc(torch.tanh(self.up_proj(hidden)))
        return self.lm_head(hidden), self.classifier(hidden)


def tiny_model(*, is_tied: bool = False) -> Decoder:
    """Return a base whose numbers float32 can hold, in float64."""
    torch.manual_seed(0)
    model = Decoder(is_tied=is_tied)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    return model.double().eval()


def randomise(model: nn.Module, base: Decoder) -> None:
    """Give everything that an adapter trains other values, which float32 can hold."""
    own = {id(parameter) for parameter in base.parameters() if not parameter.requires_grad}
    generator = torch.Generator().manual_seed(1)
    for name, parameter in model.named_parameters():
        if id(parameter) in own or not parameter.requires_grad:
            continue
        noise = torch.randn(parameter.shape, generator=generator) * 0.5
        value = parameter.detach() * 1.25 + noise if "magnitude" in name else noise
        parameter.data.copy_(value.float() + (0.75 if "ia3" in name else 0.0))


def train(config: peft.PeftConfig, folder: Path, *, is_tied: bool = False) -> peft.PeftModel:
    """Return a PEFT model with random trained values; its adapter lies in the folder."""
    base = tiny_model(is_tied=is_tied)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, config)
        for name, parameter in model.named_parameters():
            # Biases are trained where the configuration says so.
            parameter.requires_grad_(parameter.requires_grad or _is_trained(name, config))
        randomise(model, base)
        model.save_pretrained(str(folder))
    return model.eval()


def _is_trained(name: str, config: peft.PeftConfig) -> bool:
    bias = getattr(config, "bias", "none")
    return bias == "lora_only" and name.endswith("base_layer.bias")


def peft_outputs(folder: Path, ids: Tensor, *, is_tied: bool = False) -> tuple[Tensor, Tensor]:
    """Return what PEFT computes with a saved adapter."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(tiny_model(is_tied=is_tied), folder)
        outputs: tuple[Tensor, Tensor] = model.eval()(ids)
    return outputs


def shapes_of(base: Decoder) -> dict[str, ModuleShape]:
    """Return the table that `bind_adapter` wants."""
    shapes = {}
    for path, module in base.named_modules():
        if isinstance(module, nn.Embedding):
            shapes[path] = ModuleShape(
                in_features=VOCAB, out_features=WIDTH, kind=ModuleKind.EMBEDDING
            )
        elif isinstance(module, Conv1D):
            shapes[path] = ModuleShape(
                in_features=module.nx, out_features=module.nf, is_transposed=True
            )
        elif isinstance(module, nn.Linear):
            shapes[path] = ModuleShape(
                in_features=module.in_features, out_features=module.out_features
            )
    return shapes


def bind(
    adapter: Adapter, base: Decoder, *, max_rank: int = 64, leave_out: tuple[str, ...] = ()
) -> dict[str, BoundPart]:
    """Bind an adapter with the base's tensors at hand."""
    modules = dict(base.named_modules())

    def tensors(path: str) -> BaseTensors:
        module: Any = modules[path]
        weight = module.weight.T if isinstance(module, Conv1D) else module.weight
        return BaseTensors(weight=weight, bias=getattr(module, "bias", None))

    shapes = {path: s for path, s in shapes_of(base).items() if path not in leave_out}
    return bind_adapter(adapter, shapes, max_rank=max_rank, base=tensors)


def our_outputs(
    parts: Mapping[str, BoundPart], base: Decoder, ids: Tensor
) -> tuple[Tensor, Tensor]:
    """Apply ``y' = gain * (y + B A x) + bias``, or the whole replacement, in float64."""
    handles = [
        base.get_submodule(path).register_forward_hook(_hook(part)) for path, part in parts.items()
    ]
    with torch.no_grad():
        outputs: tuple[Tensor, Tensor] = base(ids)
    for handle in handles:
        handle.remove()
    return outputs


def _hook(part: BoundPart) -> Any:
    def apply(module: nn.Module, inputs: tuple[Tensor], y: Tensor) -> Tensor:
        (x,) = inputs
        if part.full is not None:
            weight = part.full.weight.double()
            if isinstance(module, nn.Embedding):
                return nn.functional.embedding(x, weight)
            bias = None if part.full.bias is None else part.full.bias.double()
            return nn.functional.linear(x, weight, bias)
        if part.pair is not None:
            lora_a, lora_b = part.pair.lora_a.double(), part.pair.lora_b.double()
            inner = lora_a.T[x] if part.pair.is_embedding else x @ lora_a.T
            y = y + inner @ lora_b.T
        if part.gain is not None:
            y = y * part.gain.double()
        return y if part.bias is None else y + part.bias.double()

    return apply


def largest_difference(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor]) -> float:
    """Return the largest difference of the outputs, relative to their size."""
    return max(
        float((a - b).abs().amax() / b.abs().amax()) for a, b in zip(first, second, strict=True)
    )


LINEARS = ["q_proj", "up_proj", "c_fc"]
EVERY = [*LINEARS, "embed_tokens", "lm_head"]


def lora(**fields: Any) -> peft.LoraConfig:
    """Return a LoRA configuration with ranks and alphas that differ between modules."""
    defaults: dict[str, Any] = {
        "r": 3,
        "lora_alpha": 7,
        "target_modules": LINEARS,
        "rank_pattern": {"up_proj": 2},
        "alpha_pattern": {"c_fc": 5},
    }
    return peft.LoraConfig(**{**defaults, **fields})


CONFIGS: dict[str, peft.PeftConfig] = {
    "lora": lora(),
    "rslora": lora(use_rslora=True),
    "embeddings and head": lora(target_modules=EVERY),
    "dora": lora(use_dora=True),
    "dora with rslora on embeddings": lora(target_modules=EVERY, use_dora=True, use_rslora=True),
    "lora_bias": lora(lora_bias=True),
    "bias lora_only": lora(bias="lora_only"),
    "bias all": lora(bias="all"),
    "bias all and a head": lora(bias="all", modules_to_save=["classifier"]),
    "dora with trained biases": lora(use_dora=True, bias="lora_only"),
    "whole head": lora(modules_to_save=["classifier", "score"]),
    "whole embeddings": lora(modules_to_save=["embed_tokens", "lm_head"]),
    "a whole Conv1D": lora(target_modules=["q_proj"], modules_to_save=["c_fc"]),
    "tokens by list": lora(trainable_token_indices=[3, 0, 17]),
    "tokens by name": lora(trainable_token_indices={"embed_tokens": [5], "lm_head": [1, 2]}),
    "velora": lora(target_modules=["q_proj"], velora_config=peft.VeloraConfig(num_groups=2)),
    "ia3": peft.IA3Config(target_modules=LINEARS, feedforward_modules=[]),
    "ia3 with a head": peft.IA3Config(
        target_modules=["q_proj"], feedforward_modules=[], modules_to_save=["classifier"]
    ),
    "vera": peft.VeraConfig(target_modules=LINEARS, r=5),
    "vera wider than its modules": peft.VeraConfig(target_modules=LINEARS, r=40),
    "vera with biases": peft.VeraConfig(target_modules=LINEARS, r=5, bias="vera_only"),
    "loha": peft.LoHaConfig(target_modules=["q_proj", "up_proj"], r=2, alpha=5),
    "loha of full rank": peft.LoHaConfig(target_modules=["q_proj", "up_proj"], r=4, alpha=5),
    "loha with patterns": peft.LoHaConfig(
        target_modules=["q_proj", "up_proj"],
        r=2,
        alpha=5,
        rank_pattern={"up_proj": 3},
        alpha_pattern={"q_proj": 1},
    ),
    "lokr whole": peft.LoKrConfig(target_modules=["q_proj", "up_proj"], r=8, alpha=5),
    "lokr with factors": peft.LoKrConfig(
        target_modules=["q_proj", "up_proj"], r=1, alpha=5, decompose_both=True
    ),
    "lokr by a factor": peft.LoKrConfig(
        target_modules=["q_proj", "up_proj"], r=2, alpha=5, decompose_factor=2
    ),
}


@pytest.fixture
def ids() -> Tensor:
    return torch.arange(VOCAB).view(2, -1)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_format_gives_what_peft_computes(name: str, tmp_path: Path, ids: Tensor) -> None:
    trained = train(CONFIGS[name], tmp_path)
    with torch.no_grad():
        expected = trained(ids)

    parts = bind(load_adapter(tmp_path), tiny_model())

    outputs = our_outputs(parts, tiny_model(), ids)
    assert largest_difference(outputs, expected) < TOLERANCE
    assert largest_difference(our_outputs({}, tiny_model(), ids), expected) > 1e-2


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_saved_again_is_read_by_peft_and_bit_equal(
    name: str, tmp_path: Path, ids: Tensor
) -> None:
    trained = train(CONFIGS[name], tmp_path / "first")
    with torch.no_grad():
        expected = trained(ids)
    adapter = load_adapter(tmp_path / "first")

    folder = save_adapter(adapter, tmp_path / "again")

    assert largest_difference(peft_outputs(folder, ids), expected) < TOLERANCE
    again = bind(load_adapter(folder), tiny_model())
    assert_bit_equal(again, bind(adapter, tiny_model()))


def assert_bit_equal(first: Mapping[str, BoundPart], second: Mapping[str, BoundPart]) -> None:
    """Compare everything that bound parts hold."""
    assert first.keys() == second.keys()
    for path, part in first.items():
        ours, theirs = dict(_tensors(part)), dict(_tensors(second[path]))
        assert ours.keys() == theirs.keys(), path
        assert all(torch.equal(tensor, theirs[key]) for key, tensor in ours.items()), path


def _tensors(part: BoundPart) -> Iterator[tuple[str, Tensor]]:
    if part.pair is not None:
        yield "lora_a", part.pair.lora_a
        yield "lora_b", part.pair.lora_b
    if part.full is not None:
        yield "weight", part.full.weight
        if part.full.bias is not None:
            yield "full bias", part.full.bias
    for key, tensor in (("gain", part.gain), ("bias", part.bias)):
        if tensor is not None:
            yield key, tensor


@pytest.mark.parametrize("name", CONFIGS)
def test_the_digest_is_that_of_what_peft_saves_again(name: str, tmp_path: Path) -> None:
    train(CONFIGS[name], tmp_path / "first")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(tiny_model(), tmp_path / "first")
        model.save_pretrained(str(tmp_path / "again"))

    assert load_adapter(tmp_path / "again").digest == load_adapter(tmp_path / "first").digest


TIED: dict[str, peft.PeftConfig] = {
    "tokens reach the head": lora(trainable_token_indices=[3, 0, 17]),
    "tokens named for both": lora(
        trainable_token_indices={"embed_tokens": [4, 9], "lm_head": [4, 9]}
    ),
    "tokens of its own for the head": lora(
        trainable_token_indices={"embed_tokens": [4], "lm_head": [9, 10]}
    ),
    "pair of the embedding alone": lora(target_modules=["q_proj", "embed_tokens"]),
    "pair of the head alone": lora(target_modules=["q_proj", "lm_head"]),
    "tied pairs": lora(target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True),
    "tied dora": lora(
        target_modules=["q_proj", "embed_tokens"], ensure_weight_tying=True, use_dora=True
    ),
    "whole embedding alone": lora(modules_to_save=["embed_tokens"]),
    "tied whole embedding": lora(modules_to_save=["embed_tokens"], ensure_weight_tying=True),
}


@pytest.mark.parametrize("name", TIED)
def test_c22_a_head_that_is_tied_to_the_embedding_gets_what_peft_gives_it(
    name: str, tmp_path: Path, ids: Tensor
) -> None:
    trained = train(TIED[name], tmp_path, is_tied=True)
    with torch.no_grad():
        expected = trained(ids)
    base = tiny_model(is_tied=True)

    parts = bind(load_adapter(tmp_path), base)

    assert largest_difference(our_outputs(parts, base, ids), expected) < TOLERANCE
    assert largest_difference(peft_outputs(tmp_path, ids, is_tied=True), expected) < TOLERANCE


@pytest.mark.parametrize("name", ["tied pairs", "tied whole embedding"])
def test_a_tied_head_whose_tensors_are_not_in_the_file_follows_the_embedding(
    name: str, tmp_path: Path, ids: Tensor
) -> None:
    trained = train(TIED[name], tmp_path, is_tied=True)
    with torch.no_grad():
        expected = trained(ids)
    adapter = load_adapter(tmp_path)
    alone = {path: part for path, part in adapter.parts.items() if path != "lm_head"}
    base = tiny_model(is_tied=True)

    parts = bind(replace(adapter, parts=alone, base_copies={}), base)

    assert largest_difference(our_outputs(parts, base, ids), expected) < TOLERANCE


METHODS = {
    "LORA": peft.LoraConfig,
    "IA3": peft.IA3Config,
    "VERA": peft.VeraConfig,
    "LOHA": peft.LoHaConfig,
    "LOKR": peft.LoKrConfig,
}


@pytest.mark.parametrize("name", METHODS)
def test_every_field_that_peft_has_is_classed(name: str) -> None:
    written = {field.name for field in fields(METHODS[name])}

    assert written <= METHOD_FIELDS[name].keys()


@pytest.mark.parametrize("kind", sorted({kind.value for kind in peft.PeftType} - METHODS.keys()))
def test_every_other_method_of_peft_is_refused_by_name(kind: str) -> None:
    with pytest.raises(InvalidAdapterError) as caught:
        AdapterConfig.from_dict({"peft_type": kind, "r": 8})

    (problem,) = caught.value.problems
    assert problem.code is ProblemCode.UNSUPPORTED_TYPE
    assert kind in problem.found
