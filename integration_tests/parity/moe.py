"""Mixture-of-experts bases and expert adapters in every form, with what each must answer.

PEFT makes and runs what it can. Forms that PEFT cannot load (one file tensor per expert, unequal
ranks, factors shared by all experts) are written here; their answer is that of a base with the
deltas merged into its weights in float64.

Letters: `X` experts, `H` hidden size, `F` intermediate size, `r` rank.
"""

from __future__ import annotations

import copy
import json
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import peft
import torch
from safetensors.torch import save_file
from transformers import (
    AutoModelForCausalLM,
    DeepseekV3Config,
    Glm4MoeConfig,
    GptOssConfig,
    MixtralConfig,
    NemotronHConfig,
    Qwen3MoeConfig,
)

from parity.formats import randomise, run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path

    from torch import Tensor, nn
    from transformers import PreTrainedConfig

NUM_EXPERTS, HIDDEN, INNER = 4, 64, 24
_SIZES: Mapping[str, Any] = {
    "vocab_size": 320,
    "hidden_size": HIDDEN,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 64,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 1,
}
_TWO_LAYERS: Mapping[str, Any] = {**_SIZES, "num_hidden_layers": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class MoeBase:
    """One family of experts."""

    name: str
    config: Callable[[], PreTrainedConfig]
    attention: tuple[str, ...] = ("q_proj", "k_proj", "v_proj", "o_proj")
    router: str | None = "gate"
    """Module name of the router, when PEFT can adapt its weight."""
    shared: tuple[str, ...] = ()
    """Linear modules of experts that every token uses."""
    has_gate: bool = True

    @property
    def stacked(self) -> tuple[str, str]:
        """The stacked parameters, as PEFT's `target_parameters` names them."""
        first = "gate_up_proj" if self.has_gate else "up_proj"
        return f"experts.{first}", "experts.down_proj"

    def build(self) -> nn.Module:
        """Return the base in float32."""
        torch.manual_seed(0)
        create: Any = AutoModelForCausalLM.from_config
        model: nn.Module = create(self.config(), attn_implementation="eager")
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.data.normal_(std=0.2, generator=generator)
        return model.float().eval().requires_grad_(requires_grad=False)


MOE_BASES: Mapping[str, MoeBase] = {
    base.name: base
    for base in (
        MoeBase(
            name="Mixtral",
            config=lambda: MixtralConfig(
                **_TWO_LAYERS, intermediate_size=INNER, num_local_experts=NUM_EXPERTS
            ),
        ),
        MoeBase(
            name="Qwen3-MoE",
            config=lambda: Qwen3MoeConfig(
                **_TWO_LAYERS,
                intermediate_size=48,
                moe_intermediate_size=INNER,
                num_experts=NUM_EXPERTS,
                decoder_sparse_step=1,
            ),
        ),
        MoeBase(
            name="gpt-oss",
            config=lambda: GptOssConfig(
                **_TWO_LAYERS,
                intermediate_size=INNER,
                num_local_experts=NUM_EXPERTS,
                layer_types=["sliding_attention", "full_attention"],
                sliding_window=6,
            ),
            router="router",
        ),
        MoeBase(
            name="GLM-4-MoE",
            config=lambda: Glm4MoeConfig(
                **_TWO_LAYERS,
                intermediate_size=48,
                moe_intermediate_size=INNER,
                n_routed_experts=NUM_EXPERTS,
                n_shared_experts=1,
                first_k_dense_replace=1,
                n_group=1,
                topk_group=1,
            ),
            shared=("shared_experts.up_proj", "shared_experts.down_proj"),
        ),
        MoeBase(
            name="DeepSeek-V3",
            config=lambda: DeepseekV3Config(
                **{**_TWO_LAYERS, "num_key_value_heads": 4, "head_dim": 8},
                intermediate_size=48,
                moe_intermediate_size=INNER,
                n_routed_experts=NUM_EXPERTS,
                n_shared_experts=1,
                first_k_dense_replace=1,
                n_group=1,
                topk_group=1,
                kv_lora_rank=16,
                q_lora_rank=24,
                qk_rope_head_dim=8,
                qk_nope_head_dim=16,
                v_head_dim=12,
            ),
            attention=("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
            shared=("shared_experts.up_proj", "shared_experts.down_proj"),
        ),
        MoeBase(
            name="Nemotron-H",
            config=lambda: NemotronHConfig(
                **_SIZES,
                intermediate_size=48,
                layers_block_type=["attention", "moe", "attention", "moe"],
                n_routed_experts=NUM_EXPERTS,
                moe_intermediate_size=INNER,
                moe_shared_expert_intermediate_size=32,
                n_group=1,
                topk_group=1,
            ),
            shared=("shared_experts.up_proj", "shared_experts.down_proj"),
            has_gate=False,
        ),
    )
}


ALL: Mapping[str, Sequence[int]] = dict.fromkeys(
    ("gate_proj", "up_proj", "down_proj"), (2,) * NUM_EXPERTS
)
UNEQUAL: Mapping[str, Sequence[int]] = {
    "gate_proj": (1, 4, 0, 2),
    "up_proj": (3, 0, 0, 5),
    "down_proj": (2, 0, 6, 1),
}
"""Ranks by expert; 0 leaves an expert alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MadeAdapter:
    """An adapter on the disk and its answer."""

    folder: Path
    logits: Tensor
    """Of the input of every measurement."""
    model: nn.Module
    """What gave them: PEFT's model, or the base with merged weights."""


def peft_adapters(base: MoeBase, folder: Path) -> dict[str, MadeAdapter]:
    """Let PEFT make one adapter of each form it knows."""
    first, second = base.stacked
    attention = list(base.attention)
    forms: dict[str, dict[str, Any]] = {
        "attention": {"target_modules": attention, "r": 3},
        "both-stacks": {"target_modules": [], "target_parameters": [first, second], "r": 2},
        "first-stack": {"target_modules": attention[:1], "target_parameters": [first], "r": 5},
        "second-stack": {"target_modules": attention[1:], "target_parameters": [second], "r": 4},
        "everything": {
            "target_modules": attention,
            "target_parameters": [second, first],
            "r": 3,
            "use_rslora": True,
        },
    }
    if base.router is not None:
        forms["router"] = {
            "target_parameters": [f"{base.router}.weight"],
            "target_modules": [],
            "r": 2,
        }
    made = {}
    for number, (name, fields) in enumerate(forms.items()):
        config = peft.LoraConfig(lora_alpha=6, task_type="CAUSAL_LM", **fields)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = peft.get_peft_model(base.build(), config).eval()
            randomise(model, seed=10 + number)
            model.save_pretrained(str(folder / name))
        made[name] = MadeAdapter(folder=folder / name, logits=run(model), model=model)
    return made


Factors = dict[str, list[tuple["Tensor", "Tensor"] | None]]
"""Projection (gate, up, down) -> (A, B) of each expert, None for an expert left alone."""


def draw_factors(
    base: MoeBase, ranks: Mapping[str, Sequence[int]], generator: torch.Generator
) -> Factors:
    """Draw random factors; rank 0 leaves an expert alone."""
    sizes = {"gate_proj": (HIDDEN, INNER), "up_proj": (HIDDEN, INNER), "down_proj": (INNER, HIDDEN)}
    factors: Factors = {}
    for name, per_expert in ranks.items():
        if name == "gate_proj" and not base.has_gate:
            continue
        in_features, out_features = sizes[name]
        factors[name] = [
            (
                torch.randn(rank, in_features, generator=generator) * 0.2,
                torch.randn(out_features, rank, generator=generator) * 0.2,
            )
            if rank
            else None
            for rank in per_expert
        ]
    return factors


def per_expert_adapter(
    base: MoeBase, folder: Path, ranks: Mapping[str, Sequence[int]], *, seed: int
) -> MadeAdapter:
    """Write an adapter with tensors of its own for every expert, and merge it for the answer."""
    model = base.build()
    tensors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    for path, experts in experts_of(model):
        factors = draw_factors(base, ranks, generator)
        merge(experts, factors)
        for name, per_expert in factors.items():
            for expert, pair in enumerate(per_expert):
                if pair is not None:
                    key = f"base_model.model.{path}.{expert}.{name}"
                    tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = pair
    # Ranks differ: alpha equal to the rank makes the scaling 1 for each.
    pattern = {
        f"{expert}.{name}": rank
        for name, per_expert in ranks.items()
        for expert, rank in enumerate(per_expert)
        if rank
    }
    _write(folder, tensors, rank_pattern=pattern, alpha_pattern=pattern)
    return MadeAdapter(folder=folder, logits=run(model), model=model)


def shared_outer_adapter(base: MoeBase, folder: Path, *, seed: int, rank: int = 3) -> MadeAdapter:
    """Write an adapter whose factors next to the hidden state are one for all experts."""
    model = base.build()
    tensors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.2

    for path, experts in experts_of(model):
        names = ("w1", "w2", "w3") if base.has_gate else ("w1", "w2")
        stacks = {
            name: (draw(NUM_EXPERTS, rank, INNER), draw(1, HIDDEN, rank))
            if name == "w2"
            else (draw(1, rank, HIDDEN), draw(NUM_EXPERTS, INNER, rank))
            for name in names
        }
        projections = {"w1": "gate_proj" if base.has_gate else "up_proj", "w2": "down_proj"}
        projections["w3"] = "up_proj"
        factors: Factors = {
            projections[name]: [
                (a[min(x, len(a) - 1)], b[min(x, len(b) - 1)]) for x in range(NUM_EXPERTS)
            ]
            for name, (a, b) in stacks.items()
        }
        merge(experts, factors)
        for name, (a, b) in stacks.items():
            key = f"base_model.model.{path}.{name}"
            tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = a, b
    _write(folder, tensors, r=rank, lora_alpha=rank)
    return MadeAdapter(folder=folder, logits=run(model), model=model)


def shared_experts_adapter(base: MoeBase, folder: Path, *, seed: int) -> MadeAdapter:
    """Write an adapter of the experts that every token uses.

    PEFT takes their names for those of single experts in an older form of the family.
    """
    model = base.build()
    tensors: dict[str, Tensor] = {}
    generator = torch.Generator().manual_seed(seed)
    for path, module in model.named_modules():
        if path.endswith(base.shared) and isinstance(module, torch.nn.Linear):
            lora_a = torch.randn(2, module.in_features, generator=generator) * 0.2
            lora_b = torch.randn(module.out_features, 2, generator=generator) * 0.2
            module.weight.data += lora_b @ lora_a
            key = f"base_model.model.{path}"
            tensors[f"{key}.lora_A.weight"], tensors[f"{key}.lora_B.weight"] = lora_a, lora_b
    _write(folder, tensors)
    return MadeAdapter(folder=folder, logits=run(model), model=model)


def experts_of(model: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield path and module of every stacked experts module."""
    for path, module in model.named_modules():
        if path.endswith("experts") and hasattr(module, "down_proj"):
            weight = module.down_proj
            if isinstance(weight, torch.nn.Parameter):
                yield path, module


def merge(experts: Any, factors: Factors) -> None:
    """Add `B A` of every expert to the stacked weights, in float64, in the base's own layout."""
    for name, per_expert in factors.items():
        for expert, pair in enumerate(per_expert):
            if pair is None:
                continue
            delta = pair[1].double() @ pair[0].double()
            rows = _rows(experts, name, expert)
            rows.copy_((rows.double() + delta).float())


def _rows(experts: Any, name: str, expert: int) -> Tensor:
    """Return a view of one expert's projection as `[O, I]`."""
    stacked = name if name == "down_proj" or not experts.has_gate else "gate_up_proj"
    matrix: Tensor = getattr(experts, stacked).data[expert]
    matrix = matrix.t() if experts.is_transposed else matrix
    if stacked != "gate_up_proj":
        return matrix
    if not experts.is_concatenated:
        return matrix[0::2] if name == "gate_proj" else matrix[1::2]
    half = matrix.shape[0] // 2
    return matrix[:half] if name == "gate_proj" else matrix[half:]


def _write(folder: Path, tensors: dict[str, Tensor], **fields: Any) -> None:
    folder.mkdir(parents=True)
    save_file(
        {key: value.contiguous() for key, value in tensors.items()},
        folder / "adapter_model.safetensors",
    )
    names = sorted({key.split(".lora_")[0].rpartition(".")[2] for key in tensors})
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": names, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def make_all(base: MoeBase, folder: Path) -> dict[str, MadeAdapter]:
    """Make one adapter of every form."""
    adapters = peft_adapters(base, folder)
    adapters["per-expert"] = per_expert_adapter(base, folder / "per-expert", ALL, seed=1)
    adapters["unequal"] = per_expert_adapter(base, folder / "unequal", UNEQUAL, seed=2)
    adapters["shared-outer"] = shared_outer_adapter(base, folder / "shared-outer", seed=3)
    if base.shared:
        adapters["shared-experts"] = shared_experts_adapter(base, folder / "always", seed=4)
    return adapters


def clone(base: nn.Module) -> nn.Module:
    """Return a copy that can be wrapped."""
    return copy.deepcopy(base)
