"""vLLM's flags that do not exist here, each with the sentence that says what to do instead."""

from __future__ import annotations

from types import MappingProxyType

_SPECULATION = "speculative decoding is not supported; leave it out."
_PROMPT_ADAPTERS = "prompt adapters are not supported; train a LoRA adapter instead."
_DATA_PARALLEL = "start one server for each replica and put a router in front."

REFUSED_FLAGS = MappingProxyType(
    {
        "chat-template": "the template of the base's folder is used; change it there.",
        "cpu-offload-gb": "the base model stays on its device; choose a smaller one or a dtype.",
        "data-parallel-size": _DATA_PARALLEL,
        "default-mm-loras": "multimodal models are not supported; name the adapter in the request.",
        "enable-chunked-prefill": (
            "prompts are always chunked; choose the size with --max-num-batched-tokens."
        ),
        "enable-lora-bias": "bias terms of an adapter are found in its file; leave it out.",
        "enable-prompt-adapter": _PROMPT_ADAPTERS,
        "enforce-eager": "the model always runs without captured graphs; leave it out.",
        "kv-cache-dtype": "the KV cache has the dtype of the model; leave it out.",
        "kv-cache-memory-bytes": "write --kv-cache-memory, which takes sizes such as 2GiB.",
        "long-lora-scaling-factors": "use a base model whose own configuration has the length.",
        "lora-extra-vocab-size": "added vocabulary is not supported; resize and merge the base.",
        "max-prompt-adapter-token": _PROMPT_ADAPTERS,
        "max-prompt-adapters": _PROMPT_ADAPTERS,
        "model": "write the model as the first argument, `lora-server serve MODEL`.",
        "num-speculative-tokens": _SPECULATION,
        "pipeline-parallel-size": "layers are not spread over devices; leave it out.",
        "quantization": "the base model runs in --dtype; use a checkpoint that is not quantised.",
        "seed": "send `seed` in the requests that need it.",
        "specialize-active-lora": "steps already skip the slots they do not use; leave it out.",
        "speculative-config": _SPECULATION,
        "speculative-model": _SPECULATION,
        "swap-space": "preempted requests are computed again; leave it out.",
        "tokenizer": "the tokenizer of the base's folder is used; put it there.",
        "trust-remote-code": "code from model folders is never run; leave it out.",
    }
)
"""Flag without dashes -> what to do instead."""
