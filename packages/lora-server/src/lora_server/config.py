"""The options of the service: one frozen dataclass, the single source for all their spellings.

Flags, `LORA_SERVER_*` variables, YAML keys and `docs/reference/cli.md` are derived from the fields
of `ServerConfig` and the `Option` in each field's metadata. Knows neither argparse nor files.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TYPE_CHECKING, Any

from lora_server.errors import StartupError
from lora_server.lora_modules import LoraModule, module_problems
from lora_server.option_fields import OptionKind, about, flag_of, value_problems

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = [
    "CpuKernels",
    "DeviceChoice",
    "Dtype",
    "EffectProbe",
    "LogFormat",
    "LogLevel",
    "LoraDtype",
    "LoraModule",
    "ServerConfig",
    "Task",
]

_MIN_HOST_ADAPTERS = 32
_GENERAL, _MEMORY, _LORA, _LATER = "Service", "Engine and memory", "Adapters", "Later versions"
_ACCESS = "Access and limits"


def _later(text: str, kind: OptionKind) -> Mapping[str, Any]:
    """Describe a flag of vLLM's that only has its default in this version."""
    return about(text, _LATER, kind, is_later=True)


class Dtype(StrEnum):
    """Data type of the base model's weights and activations."""

    AUTO = "auto"
    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class LoraDtype(StrEnum):
    """Data type of the adapters' weights."""

    AUTO = "auto"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


class DeviceChoice(StrEnum):
    """Where the model runs."""

    AUTO = "auto"
    CPU = "cpu"
    CUDA = "cuda"


class CpuKernels(StrEnum):
    """Implementation of the LoRA operators and the base's products on a CPU."""

    AUTO = "auto"
    NATIVE = "native"
    ATEN = "aten"


class Task(StrEnum):
    """What the base model is served for."""

    AUTO = "auto"
    GENERATE = "generate"
    CLASSIFY = "classify"
    TOKEN_CLASSIFY = "token_classify"  # noqa: S105 - a word of vLLM's, no secret
    SCORE = "score"
    EMBED = "embed"


class LogFormat(StrEnum):
    """How a log line is written."""

    TEXT = "text"
    JSON = "json"


class EffectProbe(StrEnum):
    """Whether adapters are compared with the base when they are loaded."""

    ON = "on"
    OFF = "off"


class LogLevel(StrEnum):
    """Least severe log lines that are printed."""

    DEBUG = "debug"
    INFO = "info"
    WARNING = "warning"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Everything that can be chosen about the service. Each field's metadata says what it is.

    Raises:
        StartupError: with every problem of the values, and of the values together.
    """

    model: str = field(
        metadata=about(
            "Base model: a folder in transformers' format, or a name in the local hub cache.",
            _GENERAL,
            metavar="MODEL",
            is_positional=True,
        )
    )
    host: str = field(
        default="127.0.0.1",
        metadata=about("Address to listen on; 0.0.0.0 for all interfaces.", _GENERAL),
    )
    port: int = field(
        default=8000,
        metadata=about(
            "Port to listen on; 0 picks a free one and prints it.",
            _GENERAL,
            OptionKind.INTEGER,
            minimum=0,
            maximum=65535,
        ),
    )
    served_model_name: tuple[str, ...] = field(
        default=(),
        metadata=about(
            "Names of the base model in the API; the first one appears in replies.",
            _GENERAL,
            OptionKind.NAMES,
            metavar="NAME",
            unset="the model as given",
        ),
    )
    log_level: LogLevel = field(
        default=LogLevel.INFO,
        metadata=about(
            "Least severe log lines to print.", _GENERAL, OptionKind.CHOICE, choices=tuple(LogLevel)
        ),
    )
    log_format: LogFormat = field(
        default=LogFormat.TEXT,
        metadata=about(
            "How log lines are written; json is one object a line.",
            _GENERAL,
            OptionKind.CHOICE,
            choices=tuple(LogFormat),
        ),
    )
    drain_timeout: float = field(
        default=30.0,
        metadata=about(
            "Time that running requests have to finish after SIGTERM; 0 ends them at once.",
            _GENERAL,
            OptionKind.NUMBER,
            unit="seconds",
            minimum=0,
        ),
    )
    metrics_max_adapters: int = field(
        default=100,
        metadata=about(
            "Adapters with series of their own in /metrics, those with most requests; the rest "
            "share the label other.",
            _GENERAL,
            OptionKind.INTEGER,
            minimum=1,
        ),
    )
    thrash_window: float = field(
        default=60.0,
        metadata=about(
            "Time over which evictions from slots are compared with admitted requests, to warn "
            "of too few slots; 0 turns the warning off.",
            _GENERAL,
            OptionKind.NUMBER,
            unit="seconds",
            minimum=0,
        ),
    )
    otlp_traces_endpoint: str | None = field(
        default=None,
        metadata=about(
            "OTLP collector to send traces to, such as http://host:4318/v1/traces; needs the "
            "extra otel.",
            _GENERAL,
            metavar="URL",
            unset="no traces",
        ),
    )

    api_key: tuple[str, ...] = field(
        default=(),
        metadata=about(
            "Keys of which clients must send one, separated by spaces or commas.",
            _ACCESS,
            OptionKind.NAMES,
            metavar="KEY",
            unset="no key needed",
            is_secret=True,
        ),
    )
    admin_api_key: str | None = field(
        default=None,
        metadata=about(
            "Key for loading, updating, unloading, pinning and unpinning adapters.",
            _ACCESS,
            metavar="KEY",
            unset="the API keys",
            is_secret=True,
        ),
    )
    api_key_file: str | None = field(
        default=None,
        metadata=about(
            "YAML or JSON file of further keys, each with its adapters, rights and limits; read "
            "again when it changes and on SIGHUP.",
            _ACCESS,
            metavar="FILE",
            unset="none",
        ),
    )
    max_body_bytes: int = field(
        default=32 * 1024**2,
        metadata=about(
            "Largest body of a request, such as 512K or 32M.",
            _ACCESS,
            OptionKind.BYTES,
            unit="bytes",
            minimum=1,
        ),
    )
    request_header_timeout: float = field(
        default=30.0,
        metadata=about(
            "Time for a new connection, or one that is used again, to send a request's headers.",
            _ACCESS,
            OptionKind.NUMBER,
            unit="seconds",
            minimum=0.1,
        ),
    )
    request_body_timeout: float = field(
        default=60.0,
        metadata=about(
            "Time for a request's body to arrive.",
            _ACCESS,
            OptionKind.NUMBER,
            unit="seconds",
            minimum=0.1,
        ),
    )
    response_write_timeout: float = field(
        default=60.0,
        metadata=about(
            "After this time without reading a client that is sent something is disconnected.",
            _ACCESS,
            OptionKind.NUMBER,
            unit="seconds",
            minimum=0.1,
        ),
    )
    keep_alive_timeout: int = field(
        default=30,
        metadata=about(
            "Time that a connection without requests is kept open.",
            _ACCESS,
            OptionKind.INTEGER,
            unit="seconds",
            minimum=1,
        ),
    )

    dtype: Dtype = field(
        default=Dtype.AUTO,
        metadata=about(
            "Data type of weights and activations; auto is the checkpoint's.",
            _MEMORY,
            OptionKind.CHOICE,
            choices=tuple(Dtype),
        ),
    )
    device: DeviceChoice = field(
        default=DeviceChoice.AUTO,
        metadata=about(
            "Where the model runs; auto is CUDA where there is a device.",
            _MEMORY,
            OptionKind.CHOICE,
            choices=tuple(DeviceChoice),
        ),
    )
    num_threads: int | None = field(
        default=None,
        metadata=about(
            "Threads of one operator on a CPU.",
            _MEMORY,
            OptionKind.INTEGER,
            minimum=1,
            unset="torch's choice",
        ),
    )
    cpu_kernels: CpuKernels = field(
        default=CpuKernels.AUTO,
        metadata=about(
            "Operators on a CPU: native ones, compiled once by the machine's C++ compiler, or"
            " torch's own; auto takes native ones where they run.",
            _MEMORY,
            OptionKind.CHOICE,
            choices=tuple(CpuKernels),
        ),
    )
    task: Task = field(
        default=Task.AUTO,
        metadata=about(
            "What the model is served for; auto is what its configuration names. classify and "
            "score take a model without a head too: adapters then bring theirs.",
            _MEMORY,
            OptionKind.CHOICE,
            choices=tuple(Task),
        ),
    )
    max_model_len: int | None = field(
        default=None,
        metadata=about(
            "Longest prompt and answer together.",
            _MEMORY,
            OptionKind.INTEGER,
            unit="tokens",
            minimum=1,
            unset="the model's own limit",
        ),
    )
    max_num_seqs: int = field(
        default=64,
        metadata=about("Most sequences in one step.", _MEMORY, OptionKind.INTEGER, minimum=1),
    )
    max_num_batched_tokens: int = field(
        default=512,
        metadata=about(
            "Most tokens in one step; longer prompts are processed in chunks of this size.",
            _MEMORY,
            OptionKind.INTEGER,
            unit="tokens",
            minimum=1,
        ),
    )
    block_size: int = field(
        default=16,
        metadata=about(
            "Size of a block of the KV cache.",
            _MEMORY,
            OptionKind.INTEGER,
            unit="tokens",
            minimum=1,
        ),
    )
    enable_prefix_caching: bool = field(
        default=True,
        metadata=about(
            "Reuse the KV cache of prompts that begin alike under the same adapter.",
            _MEMORY,
            OptionKind.SWITCH,
        ),
    )
    gpu_memory_utilization: float = field(
        default=0.9,
        metadata=about(
            "Part of the GPU's memory to use, when --kv-cache-memory is not given.",
            _MEMORY,
            OptionKind.NUMBER,
            minimum=0,
            maximum=1,
        ),
    )
    kv_cache_memory: int | None = field(
        default=None,
        metadata=about(
            "Size of the KV cache, such as 512M or 2GiB (both powers of 1024; MB, GB: of 1000).",
            _MEMORY,
            OptionKind.BYTES,
            unit="bytes",
            minimum=1,
            unset="chosen at start",
        ),
    )

    enable_lora: bool = field(
        default=True, metadata=about("Serve adapters beside the base.", _LORA, OptionKind.SWITCH)
    )
    lora_modules: tuple[LoraModule, ...] = field(
        default=(),
        metadata=about(
            "Adapters to load at start: name=path, several separated by spaces or commas, or "
            'JSON objects {"name": ..., "path": ..., "base_model_name": ...}.',
            _LORA,
            OptionKind.MODULES,
            metavar="NAME=PATH",
            unset="none",
        ),
    )
    lora_dir: str | None = field(
        default=None,
        metadata=about(
            "Load every sub-folder that holds an adapter_config.json, under the folder's name.",
            _LORA,
            metavar="DIR",
            unset="none",
        ),
    )
    adapter_root: tuple[str, ...] = field(
        default=(),
        metadata=about(
            "Folder below which adapters may be loaded over HTTP; repeat the flag for several. "
            "--lora-dir counts as one.",
            _LORA,
            OptionKind.TEXTS,
            metavar="ROOT",
            unset="loading over HTTP is refused",
        ),
    )
    gate: str | None = field(
        default=None,
        metadata=about(
            "Smoke baseline that the adapters named in it must pass before an update in place "
            "takes traffic; read again at every update.",
            _LORA,
            metavar="FILE",
            unset="updates are not checked",
        ),
    )
    max_loras: int = field(
        default=8,
        metadata=about(
            "Adapter slots on the device: most distinct adapters in one step.",
            _LORA,
            OptionKind.INTEGER,
            minimum=1,
        ),
    )
    max_lora_rank: int = field(
        default=64,
        metadata=about(
            "Highest rank of an adapter; any positive number.", _LORA, OptionKind.INTEGER, minimum=1
        ),
    )
    max_cpu_loras: int | None = field(
        default=None,
        metadata=about(
            "Adapters kept in host memory, at least --max-loras; 0 is the same as unset.",
            _LORA,
            OptionKind.INTEGER,
            minimum=0,
            unset="the larger of 32 and --max-loras",
        ),
    )
    lora_dtype: LoraDtype = field(
        default=LoraDtype.AUTO,
        metadata=about(
            "Data type of the adapters' weights; auto is the base model's.",
            _LORA,
            OptionKind.CHOICE,
            choices=tuple(LoraDtype),
        ),
    )
    lora_target_modules: tuple[str, ...] | None = field(
        default=None,
        metadata=about(
            "Modules that adapters may change, by last name part or full name.",
            _LORA,
            OptionKind.NAMES,
            metavar="MODULE",
            unset="all",
        ),
    )
    allow_pin_all: bool = field(
        default=False,
        metadata=about(
            "Let pins take every slot; requests for other adapters are then refused.",
            _LORA,
            OptionKind.SWITCH,
        ),
    )
    effect_probe: EffectProbe = field(
        default=EffectProbe.ON,
        metadata=about(
            "Run a short text with each adapter that is loaded, to tell how far it moves the "
            "base's answer.",
            _LORA,
            OptionKind.CHOICE,
            choices=tuple(EffectProbe),
        ),
    )
    max_adapter_wait: float = field(
        default=2.0,
        metadata=about(
            "After this wait for a slot a request goes before those whose adapters have one.",
            _LORA,
            OptionKind.NUMBER,
            unit="seconds",
            minimum=0,
        ),
    )

    tensor_parallel_size: int = field(
        default=1, metadata=_later("Devices that share each layer.", OptionKind.INTEGER)
    )
    enable_expert_parallel: bool = field(
        default=False, metadata=_later("Spread experts over devices.", OptionKind.SWITCH)
    )
    fully_sharded_loras: bool = field(
        default=False, metadata=_later("Shard both factors of every adapter.", OptionKind.SWITCH)
    )
    enable_tower_connector_lora: bool = field(
        default=False,
        metadata=_later("Adapters on vision towers and connectors.", OptionKind.SWITCH),
    )
    enable_mixed_moe_lora_format: bool = field(
        default=False,
        metadata=about(
            "Accepted for scripts; expert adapters of every layout are served side by side anyway.",
            _LORA,
            OptionKind.SWITCH,
        ),
    )
    enable_moe_shared_loras: bool = field(
        default=False,
        metadata=about(
            "Size the slots of experts for adapters that share the factors next to the hidden "
            "state between experts, and refuse other expert adapters.",
            _LORA,
            OptionKind.SWITCH,
        ),
    )
    max_lora_cls_labels: int | None = field(
        default=None,
        metadata=about(
            "Most labels of an adapter's own classification head.",
            _LORA,
            OptionKind.INTEGER,
            minimum=1,
            unset="as many as the base's head has",
        ),
    )

    def __post_init__(self) -> None:
        problems = [
            problem
            for config_field in dataclasses.fields(self)
            for problem in value_problems(config_field, getattr(self, config_field.name))
        ]
        problems += _name_problems(self)
        problems += _key_problems(self)
        problems += _adapter_problems(self)
        if problems:
            raise StartupError(problems)

    @property
    def base_names(self) -> tuple[str, ...]:
        """Names under which the base is served, at least one; the first appears in replies."""
        return self.served_model_name or (self.model,)

    @property
    def host_capacity(self) -> int:
        """`max_cpu_loras` with its default filled in: adapters kept in host memory."""
        return self.max_cpu_loras or max(_MIN_HOST_ADAPTERS, self.max_loras)

    @property
    def adapter_roots(self) -> tuple[str, ...]:
        """Folders below which adapters may be loaded over HTTP; empty when that is refused."""
        return (*self.adapter_root, *((self.lora_dir,) if self.lora_dir is not None else ()))


def _name_problems(config: ServerConfig) -> list[str]:
    """Check the names of the base."""
    problems = []
    if not config.model:
        problems.append("no model: write it as the first argument, `lora-server serve MODEL`")
    if len(set(config.served_model_name)) != len(config.served_model_name):
        problems.append("--served-model-name has a name twice")
    if config.gpu_memory_utilization == 0:
        problems.append("--gpu-memory-utilization is 0, expected more than 0")
    endpoint = config.otlp_traces_endpoint
    if endpoint and not endpoint.startswith(("http://", "https://")):
        problems.append(
            f"--otlp-traces-endpoint is {endpoint!r}, expected http://... or https://..."
        )
    return problems


def _key_problems(config: ServerConfig) -> list[str]:
    """Check the keys; no problem shows one."""
    problems = []
    if len(set(config.api_key)) != len(config.api_key):
        problems.append("--api-key has a key twice")
    if config.admin_api_key is not None and config.admin_api_key in config.api_key:
        problems.append("--admin-api-key is one of --api-key, whose owners would all be admins")
    for flag, keys in (("--api-key", config.api_key), ("--admin-api-key", (config.admin_api_key,))):
        if any(key and (key != key.strip() or not key.isprintable()) for key in keys):
            problems.append(f"{flag}: expected printable characters, and no space at either end")
    return problems


def _adapter_problems(config: ServerConfig) -> list[str]:
    """Check what the adapter options say together."""
    problems = []
    if config.max_cpu_loras is not None and 0 < config.max_cpu_loras < config.max_loras:
        problems.append(
            f"--max-cpu-loras is {config.max_cpu_loras}, expected at least --max-loras, "
            f"which is {config.max_loras}"
        )
    if not config.enable_lora:
        problems += [
            f"{flag_of(name)} needs adapters, which --no-enable-lora turns off"
            for name in ("lora_modules", "lora_dir", "adapter_root", "gate")
            if getattr(config, name)
        ]
    problems += [
        f"--adapter-root {root!r}: remote folders are not available in this version"
        for root in config.adapter_root
        if "://" in root
    ]
    return problems + module_problems(config.lora_modules, config.base_names)
