"""Configurations with the traits that real adapters have, written here, each with its outcome.

`TRAITS` is what `test_config_traits` runs. As a program it says what becomes of any folder of
`*.json` configurations, each given the tensors it names: `python config_traits.py FOLDER`.

Shapes: `I` in, `O` out, `V` vocabulary.
"""

from __future__ import annotations

import json
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors.torch import save_file

from lora_weights import (
    AdapterError,
    BaseTensors,
    InvalidAdapterError,
    ModuleKind,
    ModuleShape,
    bind_adapter,
    load_adapter,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from torch import Tensor

MAX_RANK = 64
Sizes = dict[str, tuple[int, int]]
"""Module path -> (I, O)."""


def _layers(path: str, names: Mapping[str, tuple[int, int]], count: int = 2) -> Sizes:
    return {
        f"{path}.{layer}.{name}": size for layer in range(count) for name, size in names.items()
    }


def _square(*names: str) -> Sizes:
    return dict.fromkeys(names, (64, 64))


BASES: dict[str, Sizes] = {
    "llama": {
        **_layers(
            "model.layers",
            {
                "self_attn.q_proj": (64, 64),
                "self_attn.k_proj": (64, 32),
                "self_attn.v_proj": (64, 32),
                "self_attn.o_proj": (64, 64),
                "mlp.gate_proj": (64, 128),
                "mlp.up_proj": (64, 128),
                "mlp.down_proj": (128, 64),
            },
        ),
        "lm_head": (64, 128),
    },
    "phi3": _layers(
        "model.layers",
        {
            "self_attn.qkv_proj": (64, 128),
            "self_attn.o_proj": (64, 64),
            "mlp.gate_up_proj": (64, 256),
            "mlp.down_proj": (128, 64),
        },
    ),
    "phi": _layers(
        "model.layers",
        _square("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.dense"),
    ),
    "falcon": _layers(
        "transformer.h",
        {
            "self_attention.query_key_value": (64, 96),
            "self_attention.dense": (64, 64),
            "mlp.dense_h_to_4h": (64, 256),
            "mlp.dense_4h_to_h": (256, 64),
        },
    ),
    "gpt2": {
        **_layers("transformer.h", {"attn.c_attn": (64, 192), "attn.c_proj": (64, 64)}),
        **_layers("transformer.h", {"mlp.c_fc": (64, 256), "mlp.c_proj": (256, 64)}),
        "score": (64, 1),
    },
    "opt": _layers("model.decoder.layers", _square("self_attn.q_proj", "self_attn.v_proj")),
    "roberta": {
        **_layers("roberta.encoder.layer", _square("attention.self.query", "attention.self.value")),
        "classifier.dense": (64, 64),
        "classifier.out_proj": (64, 2),
    },
    "distilbert": {
        **_layers(
            "distilbert.transformer.layer",
            _square(*(f"attention.{name}" for name in ("q_lin", "k_lin", "v_lin", "out_lin"))),
        ),
        "pre_classifier": (64, 64),
        "classifier": (64, 2),
    },
    "token-cls": {
        **_layers("model.layers", _square("self_attn.q_proj", "self_attn.v_proj")),
        "score": (64, 9),
    },
    "llava": {
        **_layers("model.language_model.layers", _square("self_attn.q_proj", "mlp.up_proj")),
        **_layers("model.vision_tower.layers", _square("self_attn.out_proj")),
    },
}
"""Linear modules of the bases."""


@dataclass(frozen=True, kw_only=True)
class Trait:
    """One trait: a configuration, the tensors beside it, and what must become of it."""

    name: str
    config: Mapping[str, object]
    """Fields beside `peft_type`, `r`, `lora_alpha`."""
    base: str = "llama"
    modules: tuple[str, ...] = ("q_proj", "v_proj")
    """Last parts of the base's modules that get a pair."""
    others: Mapping[str, tuple[int, int]] = field(default_factory=dict)
    """Further modules with a pair, which the base may lack."""
    wholes: tuple[str, ...] = ()
    """Modules of the base whose whole weight and bias are in the file."""
    extra: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """Further tensors by key."""
    prefix: str = "base_model.model."
    dtype: torch.dtype = torch.float32
    is_raw: bool = False
    """`config` is the whole file."""
    line_end: str = "\n"
    refusal: tuple[str, ...] = ()
    """Texts that the refusal holds; empty when the adapter loads."""
    scaling: float | None = None
    """Factor of `B A` of every pair, when it loads."""
    loads: int | None = None
    """Modules of the base that get something; None: those with a pair or a whole weight."""


_EIGHT = {"task_type": "CAUSAL_LM", "lora_dropout": 0.05, "inference_mode": False}
_ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_TEXT_MAPPING = {"base_model_class": "SomeForCausalLM", "parent_library": "some.library"}

TRAITS: tuple[Trait, ...] = (
    Trait(
        name="minimal-local-base",
        config={"base_model_name_or_path": "models/some-base", "bias": "none"},
    ),
    Trait(
        name="fused-w-pack",
        config={"target_modules": ["W_pack"]},
        modules=(),
        others={"model.layers.0.self_attn.W_pack": (64, 192)},
        refusal=("model.layers.0.self_attn.W_pack", "not a module of the base"),
    ),
    Trait(
        name="multimodal-r64",
        config={"r": 64, "lora_alpha": 16, "target_modules": ["q_proj", "up_proj"]},
        base="llava",
        modules=("q_proj", "up_proj"),
        scaling=0.25,
    ),
    Trait(
        name="multimodal-tensors-on-a-text-base",
        config={"r": 64, "target_modules": ["q_proj", "out_proj"]},
        modules=("q_proj",),
        others={"model.vision_tower.layers.0.self_attn.out_proj": (64, 64)},
        refusal=("model.vision_tower.layers.0.self_attn.out_proj",),
    ),
    Trait(name="relative-base-path", config={"base_model_name_or_path": "../some/where"}),
    Trait(name="r64-alpha16", config={"r": 64, "lora_alpha": 16}, scaling=0.25),
    Trait(name="rank-above-the-limit", config={"r": 65}, refusal=("rank 65", "at most 64")),
    Trait(
        name="query-key-value-of-another-family",
        config={"target_modules": ["query_key_value"]},
        modules=(),
        others={"transformer.encoder.layers.0.self_attention.query_key_value": (64, 96)},
        refusal=("transformer.encoder.layers.0.self_attention.query_key_value",),
    ),
    Trait(
        name="regex-targets",
        config={"target_modules": "(.*(self_attn).*(q|v)_proj$|.*(custom_head).*$)"},
    ),
    Trait(
        name="regex-targets-with-a-head-the-base-lacks",
        config={"target_modules": "(.*(self_attn).*(q|v)_proj$|.*(custom_head).*$)"},
        others={"custom_head": (64, 32)},
        refusal=("custom_head is not a module of the base",),
    ),
    Trait(
        name="null-task-and-a-speech-model",
        config={"task_type": None, "auto_mapping": _TEXT_MAPPING},
        modules=(),
        others={"model.encoder.layers.0.self_attn.k_proj_in": (64, 64)},
        refusal=("model.encoder.layers.0.self_attn.k_proj_in",),
    ),
    Trait(name="null-task-alone", config={"task_type": None, "auto_mapping": _TEXT_MAPPING}),
    Trait(
        name="encoder-decoder",
        config={"task_type": "SEQ_2_SEQ_LM", "target_modules": ["q", "v"]},
        modules=(),
        others={"decoder.block.0.layer.1.EncDecAttention.q": (64, 64)},
        refusal=("decoder.block.0.layer.1.EncDecAttention.q",),
    ),
    Trait(
        name="two-heads-listed-one-there",
        config={"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]},
        base="roberta",
        modules=("query", "value"),
        wholes=("classifier.dense", "classifier.out_proj"),
    ),
    Trait(
        name="a-listed-head-without-its-weight",
        config={"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]},
        base="roberta",
        modules=("query", "value"),
        refusal=("classifier.dense", "modules_to_save"),
    ),
    Trait(
        name="duplicate-targets-and-a-4bit-base",
        config={
            "target_modules": ["q_proj", "q_proj", "v_proj", "v_proj"],
            "base_model_name_or_path": "someone/some-base-bnb-4bit",
        },
    ),
    Trait(
        name="fused-qkv-with-dense",
        config={"target_modules": ["query_key_value", "dense", "dense_h_to_4h"]},
        base="falcon",
        modules=("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
    ),
    Trait(
        name="nothing-attaches",
        config={"task_type": "FEATURE_EXTRACTION"},
        modules=(),
        others={"encoder.layer.0.attention.qkv_proj_of_its_own": (64, 192)},
        refusal=("encoder.layer.0.attention.qkv_proj_of_its_own",),
    ),
    Trait(
        name="absent-targets",
        config={"target_modules": ["Wqkv", "fc1", "fc2", "dense"]},
        base="phi",
        modules=("dense",),
    ),
    Trait(name="integer-dropout", config={"lora_dropout": 0}),
    Trait(
        name="four-projections-of-an-encoder",
        config={"task_type": "SEQ_CLS", "modules_to_save": ["classifier", "score"]},
        base="distilbert",
        modules=("q_lin", "k_lin", "v_lin", "out_lin"),
        # PEFT compares plain ends of names, so that "classifier" stands for both.
        wholes=("pre_classifier", "classifier"),
    ),
    Trait(
        name="split-targets-on-a-fused-base",
        config={"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]},
        base="phi3",
        modules=("o_proj",),
    ),
    Trait(
        name="auto-mapping-with-an-extra-key",
        config={"auto_mapping": {**_TEXT_MAPPING, "written_by": True}},
    ),
    Trait(
        name="hybrid-of-state-space-and-experts",
        config={"target_modules": ["in_proj", "out_proj", "q_proj"]},
        modules=("q_proj",),
        others={
            "backbone.layers.0.mixer.in_proj": (64, 256),
            "backbone.layers.0.mixer.out_proj": (128, 64),
        },
        refusal=("backbone.layers.0.mixer.in_proj", "backbone.layers.0.mixer.out_proj"),
    ),
    Trait(name="r1", config={"r": 1, "lora_alpha": 1}, modules=("o_proj", "down_proj"), scaling=1),
    Trait(
        name="exclude-modules-as-a-regex",
        config={"exclude_modules": ".*(vision_tower|layers\\.0).*"},
    ),
    Trait(
        name="token-classification-with-its-head",
        config={"task_type": "TOKEN_CLS", "modules_to_save": ["classifier", "score"]},
        base="token-cls",
        wholes=("score",),
    ),
    Trait(
        name="token-classification-elsewhere",
        config={"task_type": "TOKEN_CLS", "modules_to_save": ["classifier", "score"]},
        extra={"base_model.model.score.weight": (9, 64)},
        refusal=("score",),
    ),
    Trait(
        name="dotted-targets",
        config={
            "task_type": "SEQ_CLS",
            "target_modules": ["attn.c_proj", "attn.c_attn"],
            "modules_to_save": ["classifier", "score"],
            "fan_in_fan_out": True,
        },
        base="gpt2",
        modules=("c_attn",),
        others={"transformer.h.0.attn.c_proj": (64, 64)},
        wholes=("score",),
        loads=4,
    ),
    Trait(
        name="numeric-targets",
        config={"task_type": None, "target_modules": ["to_q", "0.proj_in"], "lora_alpha": 20},
        modules=(),
        others={"down_blocks.0.attentions.0.proj_in": (64, 64)},
        refusal=("down_blocks.0.attentions.0.proj_in",),
    ),
    Trait(
        name="crlf-and-a-name-twice",
        config={
            "task_type": "SEQ_CLS",
            "modules_to_save": ["pre_classifier", "classifier", "classifier", "score"],
            "monteclora_config": None,
        },
        base="distilbert",
        modules=("q_lin", "v_lin"),
        wholes=("pre_classifier", "classifier"),
        line_end="\r\n",
    ),
    Trait(name="eight-keys-by-hand", config=_EIGHT, modules=_ALL),
    Trait(
        name="regex-with-unescaped-dots",
        config={"target_modules": ".*attn.*(to_q|to_k|to_out.0)"},
        modules=(),
        others={"transformer_blocks.0.attn.to_q": (64, 64)},
        refusal=("transformer_blocks.0.attn.to_q",),
    ),
    Trait(
        name="no-peft-only-a-base",
        config={"base_model": "some/base"},
        is_raw=True,
        refusal=("peft_type", "base_model"),
    ),
    Trait(
        name="bottleneck-adapter-of-another-library",
        config={"config": {"reduction_factor": 16, "non_linearity": "relu"}, "hidden_size": 64},
        is_raw=True,
        refusal=("peft_type", "hidden_size"),
    ),
    Trait(
        name="projector-description",
        config={"format_version": 1, "projector_type": "mlp", "vision_dim": 64},
        is_raw=True,
        refusal=("peft_type", "projector_type"),
    ),
    Trait(name="keys-in-declaration-order", config={"inference_mode": False, "bias": "none"}),
    Trait(
        name="a-head-saved-by-a-string-suffix",
        config={"task_type": "SEQ_CLS", "modules_to_save": ["classifier"]},
        base="distilbert",
        modules=("q_lin",),
        wholes=("pre_classifier", "classifier"),
    ),
    Trait(name="decoder-below-model-in-bf16", config={}, base="opt", dtype=torch.bfloat16),
    Trait(
        name="adalora",
        config={"peft_type": "ADALORA", "init_r": 64, "target_r": 32, "total_step": 5000},
        refusal=("peft_type", "ADALORA"),
    ),
    Trait(
        name="prompt-tuning",
        config={"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 200},
        is_raw=True,
        refusal=("PROMPT_TUNING",),
    ),
    Trait(
        name="p-tuning",
        config={"peft_type": "P_TUNING", "num_virtual_tokens": 20, "encoder_hidden_size": 64},
        is_raw=True,
        refusal=("P_TUNING",),
    ),
    Trait(
        name="adaption-prompt",
        config={"peft_type": "ADAPTION_PROMPT", "adapter_layers": 28, "adapter_len": 10},
        is_raw=True,
        refusal=("ADAPTION_PROMPT",),
    ),
    Trait(
        name="ln-tuning",
        config={"peft_type": "LN_TUNING", "target_modules": None, "task_type": None},
        is_raw=True,
        refusal=("LN_TUNING",),
    ),
    Trait(
        name="dora-with-magnitudes",
        config={"use_dora": True, "target_modules": None},
        extra={
            f"base_model.model.model.layers.{layer}.self_attn.{name}.lora_magnitude_vector": (rows,)
            for layer in range(2)
            for name, rows in (("q_proj", 64), ("v_proj", 32))
        },
    ),
    Trait(
        name="dora-without-magnitudes",
        config={"use_dora": True, "target_modules": None},
        refusal=("magnitude",),
    ),
    Trait(
        name="rslora-r64",
        config={"r": 64, "lora_alpha": 64, "use_rslora": True, "target_modules": None},
        scaling=8,
    ),
    Trait(
        name="block-diagonal",
        config={"use_bdlora": {"target_modules_bd_a": ["o_proj"], "nblocks": 2}},
        refusal=("use_bdlora",),
    ),
    Trait(name="minimal-twelve-keys", config={"bias": "none", "fan_in_fan_out": False}),
    Trait(
        name="an-active-field-nobody-knows",
        config={"use_something_new": True},
        refusal=("use_something_new",),
    ),
    Trait(name="an-inactive-field-nobody-knows", config={"use_something_new": None}),
)


def shapes_of(base: str) -> dict[str, ModuleShape]:
    """Return a base's table for `bind_adapter`."""
    shapes = {
        path: ModuleShape(in_features=rows, out_features=columns)
        for path, (rows, columns) in BASES[base].items()
    }
    embedding = ModuleShape(in_features=128, out_features=64, kind=ModuleKind.EMBEDDING)
    return {**shapes, "model.embed_tokens": embedding}


def base_tensors(path: str) -> BaseTensors | None:
    """Return random weights of a base's module; one path gives one weight."""
    for sizes in BASES.values():
        if path in sizes:
            in_features, out_features = sizes[path]
            generator = torch.Generator().manual_seed(len(path))
            weight = torch.randn(out_features, in_features, generator=generator)
            return BaseTensors(weight=weight, bias=torch.zeros(out_features))
    return None


def write_trait(trait: Trait, folder: Path) -> Path:
    """Write the adapter of a trait."""
    targets = sorted({path.rpartition(".")[2] for path in (*trait.modules, *trait.others)})
    config: dict[str, object] = dict(trait.config)
    if not trait.is_raw:
        standard = {"peft_type": "LORA", "r": 8, "lora_alpha": 16, "target_modules": targets}
        config = {**standard, **config}
    rank = config.get("r", 8)
    assert isinstance(rank, int)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(config, indent=2).replace("\n", trait.line_end)
    (folder / "adapter_config.json").write_bytes(text.encode())
    pairs = {
        path: size
        for path, size in BASES[trait.base].items()
        if path.rpartition(".")[2] in trait.modules
    } | dict(trait.others)
    save_file(_tensors(trait, pairs, rank), folder / "adapter_model.safetensors")
    return folder


def _tensors(trait: Trait, pairs: Mapping[str, tuple[int, int]], rank: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.rand(shape, generator=generator).add(0.1).to(trait.dtype)

    tensors: dict[str, Tensor] = {}
    for path, (in_features, out_features) in pairs.items():
        tensors[f"{trait.prefix}{path}.lora_A.weight"] = draw(rank, in_features)
        tensors[f"{trait.prefix}{path}.lora_B.weight"] = draw(out_features, rank)
    for path in trait.wholes:
        in_features, out_features = BASES[trait.base][path]
        tensors[f"{trait.prefix}{path}.weight"] = draw(out_features, in_features)
        tensors[f"{trait.prefix}{path}.bias"] = draw(out_features)
    return tensors | {key: draw(*shape) for key, shape in trait.extra.items()}


def outcome(folder: Path, base: str) -> tuple[int, tuple[str, ...]]:
    """Return how many modules of a base an adapter changes, or why it is refused."""
    try:
        adapter = load_adapter(folder, max_rank=MAX_RANK)
        bound = bind_adapter(adapter, shapes_of(base), max_rank=MAX_RANK, base=base_tensors)
    except InvalidAdapterError as error:
        return 0, tuple(str(problem) for problem in error.problems)
    except AdapterError as error:
        return 0, (str(error),)
    return len(bound), ()


def _magnitudes(base: str, names: Collection[str]) -> dict[str, tuple[int, ...]]:
    """Return a magnitude for every module with a pair."""
    return {
        f"base_model.model.{path}.lora_magnitude_vector": (rows,)
        for path, (_, rows) in BASES[base].items()
        if path.rpartition(".")[2] in names
    }


def main(folder: Path) -> None:
    """Print what becomes of each configuration in `folder`, given the tensors it names."""
    for path in sorted(folder.glob("*.json")):
        config = json.loads(path.read_bytes())
        targets = config.get("target_modules") or ["q_proj", "v_proj"]
        named = ("q_proj", "v_proj") if isinstance(targets, str) else tuple(targets)
        known = {name.rpartition(".")[2] for name in named}
        bases = [b for b, sizes in BASES.items() if known & {p.rpartition(".")[2] for p in sizes}]
        base = bases[0] if bases else "llama"
        saved = tuple(config.get("modules_to_save") or ())
        trait = Trait(
            name=path.stem,
            config=config,
            base=base,
            modules=tuple(known),
            wholes=tuple(
                p
                for p in BASES[base]
                if any(part.endswith(saved) for part in p.split(".")) and saved
            ),
            extra=_magnitudes(base, known) if config.get("use_dora") else {},
            is_raw=True,
        )
        with tempfile.TemporaryDirectory() as temporary:
            target = write_trait(trait, Path(temporary))
            (target / "adapter_config.json").write_bytes(path.read_bytes())
            changed, problems = outcome(target, base)
        verdict = f"loads, {changed} modules" if not problems else "; ".join(problems)
        print(f"{path.stem:45} {base:11} {verdict[:160]}")  # noqa: T201 - it is a program


if __name__ == "__main__":
    main(Path(sys.argv[1]))
