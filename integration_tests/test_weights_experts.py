"""Adapters on experts equal PEFT: every layout it writes or converts, merged, weight by weight.

The oracle is the merged model. PEFT's older releases differ in the dimension of a parameter that
A runs over; what they wrote is made by telling the current one that the base is transposed, or
that it is not, which is the only thing that it looks at.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import peft
import pytest
import torch
import transformers

from lora_weights import (
    ExpertPart,
    ExpertShape,
    InvalidAdapterError,
    ModuleShape,
    bind_adapter,
    join_w13,
    load_adapter,
    save_adapter,
)
from lora_weights.testing import write_adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

# PEFT asks a model for a property that transformers is about to rename.
pytestmark = pytest.mark.filterwarnings(
    "ignore:.is_gradient_checkpointing:FutureWarning",
    # It looks for patterns of modules only, and applies those of parameters all the same.
    "ignore:The following .* keys did not match:RuntimeWarning",
)

TOLERANCE = 2e-6
"""Of values of about 1: two float32 products in another order."""

PARAMETERS = ("gate_up_proj", "down_proj")


def tiny(config: type, **sizes: object) -> transformers.PreTrainedModel:
    torch.manual_seed(0)
    common = {
        "vocab_size": 64,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "num_experts_per_tok": 2,
    }
    made = config(**{**common, **sizes})
    model: transformers.PreTrainedModel = transformers.AutoModelForCausalLM.from_config(made)  # type: ignore[no-untyped-call]
    model.train(mode=False)
    return model


def mixtral(inner: int = 24) -> transformers.PreTrainedModel:
    return tiny(transformers.MixtralConfig, intermediate_size=inner, num_local_experts=4)


def qwen3_moe(inner: int = 24) -> transformers.PreTrainedModel:
    sizes = {"moe_intermediate_size": inner, "intermediate_size": 48, "num_experts": 4}
    return tiny(transformers.Qwen3MoeConfig, **sizes)


def gpt_oss(inner: int = 24) -> transformers.PreTrainedModel:
    layers = ["full_attention", "full_attention"]
    sizes = {"intermediate_size": inner, "num_local_experts": 4, "layer_types": layers}
    return tiny(transformers.GptOssConfig, **sizes)


def deepseek(inner: int = 24) -> transformers.PreTrainedModel:
    return tiny(
        transformers.DeepseekV3Config,
        moe_intermediate_size=inner,
        intermediate_size=48,
        n_routed_experts=4,
        n_shared_experts=1,
        n_group=2,
        topk_group=1,
        first_k_dense_replace=1,
        num_key_value_heads=4,
        kv_lora_rank=8,
        q_lora_rank=8,
        qk_rope_head_dim=4,
        qk_nope_head_dim=4,
        v_head_dim=8,
    )


def nemotron_h(inner: int = 24) -> transformers.PreTrainedModel:
    """Return a model whose experts have no gate."""
    return tiny(
        transformers.NemotronHConfig,
        layers_block_type=["attention", "moe"],
        moe_intermediate_size=inner,
        moe_shared_expert_intermediate_size=inner,
        n_routed_experts=4,
        n_group=1,
        topk_group=1,
        mamba_num_heads=4,
        mamba_head_dim=8,
        ssm_state_size=8,
        n_groups=2,
    )


MODELS: dict[str, Callable[..., transformers.PreTrainedModel]] = {
    "mixtral": mixtral,
    "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss,
    "deepseek": deepseek,
}


@dataclass(frozen=True, slots=True)
class Expert:
    """One fused experts module of a model."""

    path: str
    module: Any

    @property
    def shape(self) -> ExpertShape:
        names = dict(self.module.named_parameters(recurse=False))
        down = names["down_proj"]
        high, wide = down.shape[1:] if not self.module.is_transposed else down.shape[:0:-1]
        return ExpertShape(
            num_experts=down.shape[0],
            hidden_size=high,
            intermediate_size=wide,
            is_gated=bool(self.module.has_gate),
            is_interleaved=not self.module.is_concatenated,
            is_transposed=bool(self.module.is_transposed),
        )

    def weight(self, name: str) -> torch.Tensor:
        """Return a parameter as `[X, O, I]`, whichever way the model stores it."""
        weight: torch.Tensor = self.module.get_parameter(name).detach().double()
        return weight.transpose(1, 2).clone() if self.module.is_transposed else weight.clone()


def experts_of(model: torch.nn.Module) -> list[Expert]:
    return [
        Expert(path, module)
        for path, module in model.named_modules()
        if path.endswith(".experts") and hasattr(module, "is_transposed")
    ]


def shapes_of(model: torch.nn.Module) -> dict[str, ModuleShape | ExpertShape]:
    shapes: dict[str, ModuleShape | ExpertShape] = {
        path: ModuleShape(in_features=module.in_features, out_features=module.out_features)
        for path, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    return shapes | {expert.path: expert.shape for expert in experts_of(model)}


def deltas(part: ExpertPart, shape: ExpertShape) -> dict[str, torch.Tensor]:
    """Return each parameter's update, `[X, O, I]`, in float64."""
    found = {"down_proj": part.w2}
    if shape.is_gated:
        if part.w1 is not None or part.w3 is not None:
            joined = join_w13(part.w1, part.w3, is_interleaved=shape.is_interleaved)
            found["gate_up_proj"] = joined
    else:
        found["up_proj"] = part.w1
    return {
        name: pair.lora_b.double() @ pair.lora_a.double()
        for name, pair in found.items()
        if pair is not None
    }


def wrap(
    model: transformers.PreTrainedModel, *, version: str | None = None, **config: object
) -> peft.PeftModel:
    """Return the model with a random adapter, laid out as a release of PEFT would."""
    experts = experts_of(model)
    before = [expert.module.is_transposed for expert in experts]
    if version is not None:
        # Whether the current release exchanges in and out as the named one does.
        for expert, is_transposed in zip(experts, before, strict=True):
            exchanges = is_transposed if version == "0.19.0" else False
            expert.module.is_transposed = not exchanges
    fields: dict[str, Any] = {"r": 4, "lora_alpha": 12, "target_modules": [], **config}
    wrapped = peft.get_peft_model(model, peft.LoraConfig(**fields))
    for expert, is_transposed in zip(experts, before, strict=True):
        expert.module.is_transposed = is_transposed
    generator = torch.Generator().manual_seed(1)
    for name, value in wrapped.named_parameters():
        if "lora_" in name:
            value.data.copy_(torch.randn(value.shape, generator=generator) * 0.3)
    return wrapped


def save(wrapped: peft.PeftModel, folder: Path, *, version: str | None = None) -> Path:
    wrapped.save_pretrained(str(folder))
    return folder if version is None else declare(folder, version)


def declare(folder: Path, version: str | None) -> Path:
    """Let a file say that another release wrote it, or none."""
    path = folder / "adapter_config.json"
    config = {**json.loads(path.read_text()), "peft_version": version}
    path.write_text(json.dumps(config))
    return folder


def check_merged(
    build: Callable[[], transformers.PreTrainedModel], wrapped: peft.PeftModel, folder: Path
) -> None:
    """Compare base + our update with PEFT's merged weights, for every parameter of every layer."""
    base = build()
    bound = bind_adapter(load_adapter(folder), shapes_of(base), max_rank=64)
    merged = {expert.path: expert for expert in experts_of(wrapped.merge_and_unload())}
    changed = 0
    for expert in experts_of(base):
        part = bound[expert.path].experts
        assert part is not None
        found = deltas(part, expert.shape)
        for name in ("gate_up_proj", "up_proj", "down_proj"):
            if not hasattr(expert.module, name):
                continue
            wanted = merged[expert.path].weight(name)
            ours = expert.weight(name) + found.get(name, 0)
            assert torch.allclose(ours, wanted, atol=TOLERANCE, rtol=0)
            changed += not torch.equal(wanted, expert.weight(name))
    assert changed


@pytest.mark.parametrize("targets", [PARAMETERS, PARAMETERS[:1], PARAMETERS[1:]])
@pytest.mark.parametrize("name", MODELS)
def test_c27_target_parameters_equal_the_merged_model(
    tmp_path: Path, name: str, targets: Sequence[str]
) -> None:
    model = MODELS[name]()
    wrapped = wrap(model, target_parameters=[f"mlp.experts.{target}" for target in targets])

    check_merged(MODELS[name], wrapped, save(wrapped, tmp_path))


@pytest.mark.parametrize("version", ["0.17.1", "0.18.1", "0.19.0"])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_c28_what_older_releases_wrote_equals_their_merged_model(
    tmp_path: Path, name: str, version: str
) -> None:
    targets = [f"mlp.experts.{target}" for target in PARAMETERS]
    wrapped = wrap(MODELS[name](), version=version, target_parameters=targets)

    check_merged(MODELS[name], wrapped, save(wrapped, tmp_path, version=version))


@pytest.mark.parametrize("version", ["0.18.1", "0.19.0", "0.21.2"])
@pytest.mark.parametrize("targets", [("up_proj", "down_proj"), ("up_proj",), ("down_proj",)])
def test_experts_without_a_gate_equal_the_merged_model_of_the_declared_release(
    tmp_path: Path, targets: Sequence[str], version: str
) -> None:
    written_by = None if version == "0.21.2" else version
    parameters = [f"mixer.experts.{target}" for target in targets]
    wrapped = wrap(nemotron_h(), version=written_by, target_parameters=parameters)
    folder = save(wrapped, tmp_path, version=version)

    check_merged(nemotron_h, wrapped, folder)
    # Up and down mirror each other, so without a release only a single declared name can tell.
    unknown = load_adapter(declare(folder, None))
    if len(targets) > 1:
        with pytest.raises(InvalidAdapterError, match="fits in 2 ways"):
            bind_adapter(unknown, shapes_of(nemotron_h()), max_rank=64)
    else:
        bind_adapter(unknown, shapes_of(nemotron_h()), max_rank=64)


@pytest.mark.parametrize("version", ["0.18.1", "0.19.1"])
@pytest.mark.parametrize(("inner", "target"), [(16, "gate_up_proj"), (32, "down_proj")])
@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_c28_square_parameters_are_read_by_the_declared_release_or_refused(
    tmp_path: Path, name: str, inner: int, target: str, version: str
) -> None:
    def build() -> transformers.PreTrainedModel:
        return MODELS[name](inner)

    written_by = version if version == "0.18.1" else None
    wrapped = wrap(build(), version=written_by, target_parameters=[f"experts.{target}"])
    folder = save(wrapped, tmp_path, version=version)

    check_merged(build, wrapped, folder)
    for unknown in (None, "0.18.2.dev0"):
        adapter = load_adapter(declare(folder, unknown))
        with pytest.raises(InvalidAdapterError, match="fits in 2 ways"):
            bind_adapter(adapter, shapes_of(build()), max_rank=64)


def test_c30_parameters_wrapped_in_the_other_order_equal_the_merged_model(tmp_path: Path) -> None:
    model = mixtral()
    for expert in experts_of(model):
        # PEFT wraps in the order of registration: the first one ends up innermost.
        fused = expert.module.gate_up_proj
        del expert.module.gate_up_proj
        expert.module.gate_up_proj = fused
    targets = [f"mlp.experts.{target}" for target in PARAMETERS]
    wrapped = wrap(model, target_parameters=targets)
    folder = save(wrapped, tmp_path)

    keys = [entry for entry in wrapped.state_dict() if "experts.base_layer.lora_A" in entry]
    inner = wrapped.state_dict()[keys[0]]
    assert inner.shape[1] == 24
    check_merged(mixtral, wrapped, folder)


def test_patterns_by_parameter_and_rslora_equal_the_merged_model(tmp_path: Path) -> None:
    wrapped = wrap(
        mixtral(),
        target_parameters=[f"mlp.experts.{target}" for target in PARAMETERS],
        rank_pattern={"experts.gate_up_proj": 2, r"layers\.1\..*down_proj": 3},
        alpha_pattern={"down_proj": 5},
        use_rslora=True,
    )

    check_merged(mixtral, wrapped, save(wrapped, tmp_path))


def test_experts_beside_attention_and_a_router_keep_every_part(tmp_path: Path) -> None:
    wrapped = wrap(
        qwen3_moe(),
        target_modules=["q_proj"],
        target_parameters=["mlp.experts.down_proj", "mlp.gate.weight"],
    )
    folder = save(wrapped, tmp_path)
    base = qwen3_moe()
    shapes = shapes_of(base)
    gates = {
        f"model.layers.{layer}.mlp.gate": ModuleShape(in_features=32, out_features=4)
        for layer in range(2)
    }

    bound = bind_adapter(load_adapter(folder), shapes | gates, max_rank=64)

    merged = dict(wrapped.merge_and_unload().named_parameters())
    plain = dict(base.named_parameters())
    for path in (*gates, *(f"model.layers.{layer}.self_attn.q_proj" for layer in range(2))):
        pair = bound[path].pair
        assert pair is not None
        ours = plain[f"{path}.weight"].double() + pair.lora_b.double() @ pair.lora_a.double()
        assert torch.allclose(ours, merged[f"{path}.weight"].double(), atol=TOLERANCE, rtol=0)
    assert sum(part.experts is not None for part in bound.values()) == 2


MIXTRAL_NAMES = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


@pytest.mark.parametrize("projections", [("gate_proj", "up_proj", "down_proj"), ("down_proj",)])
@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_files_of_single_experts_equal_what_peft_makes_of_them(
    tmp_path: Path, name: str, projections: Sequence[str]
) -> None:
    sizes = {"gate_proj": (32, 24), "up_proj": (32, 24), "down_proj": (24, 32)}
    block = {"mixtral": "block_sparse_moe", "qwen3_moe": "mlp"}[name]
    spelled = MIXTRAL_NAMES if name == "mixtral" else {key: key for key in sizes}
    modules = {
        f"model.layers.{layer}.{block}.experts.{expert}.{spelled[key]}": sizes[key]
        for layer in range(2)
        for expert in range(4)
        for key in projections
    }
    folder = write_adapter(tmp_path, modules, r=4, std=0.3)
    wrapped = peft.PeftModel.from_pretrained(MODELS[name](), folder)

    base = MODELS[name]()
    renames = {f"model.layers.{layer}.{block}": f"model.layers.{layer}.mlp" for layer in range(2)}
    adapter = load_adapter(folder, rename=renames if name == "mixtral" else None)
    bound = bind_adapter(adapter, shapes_of(base), max_rank=64)

    merged = {expert.path: expert for expert in experts_of(wrapped.merge_and_unload())}
    for expert in experts_of(base):
        part = bound[expert.path].experts
        assert part is not None
        for parameter, delta in deltas(part, expert.shape).items():
            wanted = merged[expert.path].weight(parameter)
            ours = expert.weight(parameter) + delta
            assert torch.allclose(ours, wanted, atol=TOLERANCE, rtol=0)
            assert not torch.equal(wanted, expert.weight(parameter))


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss"])
def test_a_saved_expert_adapter_is_loaded_by_peft_with_the_same_weights(
    tmp_path: Path, name: str
) -> None:
    targets = [f"mlp.experts.{target}" for target in PARAMETERS]
    wrapped = wrap(MODELS[name](), target_parameters=targets, rank_pattern={"experts.down_proj": 3})
    first = save(wrapped, tmp_path / "first")

    second = save_adapter(load_adapter(first), tmp_path / "second")

    again = peft.PeftModel.from_pretrained(MODELS[name](), second)
    wanted = experts_of(wrapped.merge_and_unload())
    found = experts_of(again.merge_and_unload())
    for one, other in zip(found, wanted, strict=True):
        for parameter in PARAMETERS:
            ours, theirs = one.weight(parameter), other.weight(parameter)
            assert torch.allclose(ours, theirs, atol=TOLERANCE, rtol=0)
