"""All formats, in the order of the table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import peft

from parity.formats import (
    RANK,
    Format,
    NotApplicableError,
    OtherNames,
    decoder_only,
    lora,
    peft_made,
    refused,
    with_experts,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from parity.bases import Base


def _last_linear(base: Base) -> str:
    return base.linears[-1]


def _embedding(base: Base) -> list[str]:
    return [*base.attention, base.embedding]


def _head(base: Base) -> list[str]:
    return [*base.attention, base.head]


def _attention(base: Base) -> list[str]:
    return list(base.attention)


def _pattern(base: Base) -> str:
    return rf".*\.({'|'.join(base.linears)})"


def _other(kind: Callable[..., Any], **fields: Any) -> Callable[[Base], Any]:
    """Return a configuration of another method on the attention's projections."""

    def configure(base: Base) -> Any:
        return kind(task_type=base.task, target_modules=list(base.attention), **fields)

    return configure


def _ia3(*, with_feed_forward: bool) -> Callable[[Base], Any]:
    def configure(base: Base) -> Any:
        if with_feed_forward and not base.feed_forward:
            raise NotApplicableError
        inputs = [base.feed_forward[-1]] if with_feed_forward else []
        return peft.IA3Config(
            task_type=base.task,
            target_modules=[*base.attention, *inputs],
            feedforward_modules=inputs,
            fan_in_fan_out=base.name == "GPT-2",
        )

    return configure


def _prompt(kind: Callable[..., Any], **fields: Any) -> Callable[[Base], Any]:
    return lambda base: kind(task_type=base.task, num_virtual_tokens=4, **fields)


FORMATS: tuple[Format, ...] = (
    Format(name="LoRA", make=peft_made(lora())),
    Format(name="LoRA, targets as a regular expression", make=peft_made(lora(_pattern))),
    Format(name="LoRA, all-linear", make=peft_made(lora(lambda _: "all-linear"))),
    Format(name="rsLoRA", make=peft_made(lora(use_rslora=True))),
    Format(
        name="rank_pattern and alpha_pattern",
        make=peft_made(
            lora(
                # Two that overlap, in the order in which they are saved: the first one wins.
                rank_pattern=lambda base: {
                    rf".*\.0\..*{_last_linear(base)}": 2,
                    _last_linear(base): 7,
                },
                alpha_pattern=lambda base: {rf".*\.1\..*{base.attention[0]}": 3},
            )
        ),
    ),
    Format(name="layers_to_transform", make=peft_made(lora(layers_to_transform=[1]))),
    Format(
        name="exclude_modules",
        make=peft_made(lora(exclude_modules=lambda base: rf".*\.0\..*{base.attention[0]}")),
    ),
    Format(name="DoRA", make=peft_made(lora(use_dora=True))),
    Format(name="DoRA with rsLoRA", make=peft_made(lora(use_dora=True, use_rslora=True))),
    Format(name="DoRA on the embedding", make=peft_made(lora(_embedding, use_dora=True))),
    Format(name="lora_bias", make=peft_made(lora(lora_bias=True))),
    Format(name="bias: all", make=peft_made(lora(bias="all"))),
    Format(name="bias: lora_only", make=peft_made(lora(bias="lora_only"))),
    Format(name="DoRA with bias: lora_only", make=peft_made(lora(bias="lora_only", use_dora=True))),
    Format(name="LoRA on the embedding", make=peft_made(lora(_embedding))),
    Format(name="LoRA on the head", make=peft_made(decoder_only(lora(_head)))),
    Format(
        name="modules_to_save: the head",
        make=peft_made(lora(_attention, modules_to_save=lambda base: [base.head])),
    ),
    Format(
        name="modules_to_save: the embedding",
        make=peft_made(lora(_attention, modules_to_save=lambda base: [base.embedding])),
    ),
    Format(
        name="modules_to_save: embedding and head",
        make=peft_made(
            decoder_only(lora(_attention, modules_to_save=lambda base: [base.embedding, base.head]))
        ),
    ),
    Format(
        name="modules_to_save: a projection",
        make=peft_made(
            lora(lambda base: [base.attention[0]], modules_to_save=lambda base: [base.saved])
        ),
    ),
    Format(
        name="trainable_token_indices",
        make=peft_made(
            lora(
                _attention,
                trainable_token_indices=lambda base: {base.embedding: [3, 9, 70]},
            )
        ),
    ),
    Format(
        name="target_parameters: both",
        make=peft_made(
            with_experts(lora(_attention, target_parameters=lambda base: list(base.experts)))
        ),
    ),
    Format(
        name="target_parameters: one",
        make=peft_made(
            with_experts(lora(_attention, target_parameters=lambda base: [base.experts[1]]))
        ),
    ),
    Format(name="names of the parts on a fused base", make=OtherNames(is_split=True)),
    Format(name="names of the whole on a split base", make=OtherNames(is_split=False)),
    Format(name="IA3, outputs only", make=peft_made(_ia3(with_feed_forward=False))),
    Format(name="IA3 with feed-forward inputs", make=refused(_ia3(with_feed_forward=True))),
    Format(name="VeRA", make=peft_made(_other(peft.VeraConfig, r=6, save_projection=True))),
    Format(
        name="VeRA without its projections",
        make=refused(_other(peft.VeraConfig, r=6, save_projection=False)),
    ),
    Format(name="LoHa", make=peft_made(_other(peft.LoHaConfig, r=RANK, alpha=2 * RANK))),
    Format(name="LoHa of rank 9", make=refused(_other(peft.LoHaConfig, r=9, alpha=9))),
    Format(
        name="LoKr",
        make=peft_made(_other(peft.LoKrConfig, r=2, alpha=4, decompose_factor=4)),
    ),
    Format(
        name="LoKr, both factors decomposed",
        make=peft_made(
            _other(peft.LoKrConfig, r=2, alpha=4, decompose_factor=8, decompose_both=True)
        ),
    ),
    Format(
        name="AdaLoRA",
        make=refused(_other(peft.AdaLoraConfig, init_r=6, target_r=RANK, total_step=10)),
    ),
    Format(name="PiSSA", make=refused(lora(init_lora_weights="pissa"))),
    Format(name="OLoRA", make=refused(lora(init_lora_weights="olora"))),
    Format(name="CorDA", make=peft_made(lora(), edit={"init_lora_weights": "corda"})),
    Format(name="LoftQ", make=peft_made(lora(), edit={"init_lora_weights": "loftq"})),
    Format(name="layer_replication", make=peft_made(lora(), edit={"layer_replication": [[0, 2]]})),
    Format(name="activated LoRA", make=peft_made(lora(), edit={"alora_invocation_tokens": [5, 6]})),
    Format(name="OFT", make=refused(_other(peft.OFTConfig, r=0, oft_block_size=4))),
    Format(name="prompt tuning", make=refused(decoder_only(_prompt(peft.PromptTuningConfig)))),
    Format(name="prefix tuning", make=refused(decoder_only(_prompt(peft.PrefixTuningConfig)))),
    Format(name="LN tuning", make=refused(lambda base: peft.LNTuningConfig(task_type=base.task))),
)
