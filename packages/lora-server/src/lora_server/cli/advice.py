"""What to do about a problem with an adapter, in one sentence for each kind of problem."""

from __future__ import annotations

from types import MappingProxyType

from lora_weights import ProblemCode

ADVICE = MappingProxyType(
    {
        ProblemCode.AMBIGUOUS_MODULE: (
            "Spell the module's whole path in the file, as the base model has it."
        ),
        ProblemCode.BASE_COPY_DIFFERS: (
            "Save with save_embedding_layers=False, or serve the base it was trained on."
        ),
        ProblemCode.CONFIG_UNREADABLE: "Save the adapter again with PEFT's save_pretrained.",
        ProblemCode.DUPLICATE_MODULE: "Keep one entry a module; merge the two before saving.",
        ProblemCode.DUPLICATE_TENSOR: "Remove one of the two keys from the file.",
        ProblemCode.FOREIGN_FORMAT: (
            "Convert the file to PEFT's layout with the tool that wrote it."
        ),
        ProblemCode.INCOMPLETE_PAIR: "Save the adapter again; a tensor of the pair was lost.",
        ProblemCode.INVALID_FIELD: "Correct the field in adapter_config.json.",
        ProblemCode.KIND_MISMATCH: "Serve the base it was trained on.",
        ProblemCode.MISSING_FIELD: "Add the field to adapter_config.json.",
        ProblemCode.MISSING_WEIGHTS: "Put the file or tensor that is named beside the others.",
        ProblemCode.MIXED_NAMES: "Save one adapter a folder, selected by its name.",
        ProblemCode.NEEDS_BASE: "Examine it together with the base's weights.",
        ProblemCode.NESTED_ADAPTER: "Merge the inner adapter into its base, then train or save.",
        ProblemCode.NOT_FINITE: "Take an earlier checkpoint; the training diverged.",
        ProblemCode.NOT_FOUND: "Give the folder that holds adapter_config.json.",
        ProblemCode.NOT_PEFT: "Export the adapter in PEFT's format.",
        ProblemCode.NO_EFFECT: (
            "Save again after training; sharded training must gather the weights first."
        ),
        ProblemCode.RANK_TOO_LARGE: "Serve with a larger --max-lora-rank, or train a smaller rank.",
        ProblemCode.SHAPE_MISMATCH: "Serve the base it was trained on.",
        ProblemCode.SHARDED: "Copy every shard and the index, or save into one file.",
        ProblemCode.UNKNOWN_FIELD: "Train without the option, or merge the adapter into its base.",
        ProblemCode.UNKNOWN_MODULE: (
            "Serve the base it was trained on, or train without these modules."
        ),
        ProblemCode.UNREADABLE: "Check the address, the permissions and the credentials.",
        ProblemCode.UNSAFE_FORMAT: "Convert the pickle file to safetensors.",
        ProblemCode.UNSUPPORTED_DTYPE: "Save in float32, float16 or bfloat16.",
        ProblemCode.UNSUPPORTED_FIELD: (
            "Convert or merge the adapter as the message says; the option changes the model."
        ),
        ProblemCode.UNSUPPORTED_TENSOR: (
            "Train without it, or merge the adapter into its base and serve that."
        ),
        ProblemCode.UNSUPPORTED_TYPE: "Merge the adapter into its base, or train a LoRA.",
        ProblemCode.WEIGHTS_UNREADABLE: "Copy the file again; it is damaged or incomplete.",
    }
)
"""Kind of problem -> advice."""
