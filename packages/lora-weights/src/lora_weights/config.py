"""``adapter_config.json`` as a frozen dataclass. Knows nothing of tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from lora_weights.errors import InvalidAdapterError, Problem, ProblemCode
from lora_weights.field_reader import FieldReader
from lora_weights.fields import CONFIG_FILE, check_fields
from lora_weights.json_object import parse_object
from lora_weights.peft_types import check_type

if TYPE_CHECKING:
    import os
    from collections.abc import Mapping

REQUIRED_FIELDS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "LORA": ("lora_alpha", "r", "target_modules"),
        "IA3": ("target_modules",),
        "VERA": ("r", "target_modules"),
        "LOHA": ("alpha", "r", "target_modules"),
        "LOKR": ("alpha", "r", "target_modules"),
    }
)
"""``peft_type`` -> keys that must be present; ``target_modules`` may be null."""

_BIAS_WORDS = {"LORA": ("none", "all", "lora_only"), "VERA": ("none", "all", "vera_only")}


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterConfig:
    """What PEFT recorded about an adapter, checked. Build it with `from_dict` or `from_json`."""

    r: int
    """Rank of every module that no rank pattern matches, at least 1; 0 for IA3, which has none."""
    lora_alpha: float
    """Alpha of every module that no alpha pattern matches; 1 for IA3 and VeRA."""
    target_modules: tuple[str, ...] | str | None = None
    """Names, a regular expression, or None. Explains; the tensors decide what is adapted."""
    peft_type: str = "LORA"
    """The method: LORA, IA3, VERA, LOHA or LOKR."""
    use_rslora: bool = False
    """Scale by ``alpha / sqrt(r)`` instead of ``alpha / r``."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict)
    """Rank by module path or regular expression; the first match in this order wins."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    """Alpha by module path or regular expression; the first match in this order wins."""
    bias: str = "none"
    """Which biases of the base were trained: none, all, lora_only, vera_only."""
    lora_bias: bool = False
    """B has a bias."""
    use_dora: bool = False
    """Weight-decomposed: each module has a magnitude vector."""
    fan_in_fan_out: bool = False
    """The base stores `[I, O]` weights (Conv1D). A and B keep their usual form."""
    init_lora_weights: bool | str | None = True
    """How A and B were initialised."""
    modules_to_save: tuple[str, ...] = ()
    """Names of modules that may be replaced as a whole."""
    ensure_weight_tying: bool = False
    """The adapter of the input embedding is also that of the tied head."""
    trainable_token_indices: Mapping[str, tuple[int, ...]] | tuple[int, ...] | None = None
    """Token ids whose embeddings were trained: of the input embedding, or by module name."""
    target_parameters: tuple[str, ...] = ()
    """Names of expert parameters that have pairs."""
    feedforward_modules: tuple[str, ...] | str | None = None
    """IA3: names, or a regular expression, of the modules whose input is scaled."""
    save_projection: bool = True
    """VeRA: the shared projections are in the file."""
    alora_invocation_tokens: tuple[int, ...] = ()
    """Token sequence from which on an activated LoRA applies."""
    base_model_name_or_path: str | None = None
    """The base in the trainer's words: untrusted text, shown and never opened."""
    task_type: str | None = None
    """PEFT's task, such as CAUSAL_LM."""
    peft_version: str | None = None
    """The PEFT release that wrote the file, where it says so."""
    raw: Mapping[str, object] = field(default_factory=dict, repr=False, compare=False)
    """All fields as found, so that a saved copy loses nothing."""

    @property
    def max_rank(self) -> int:
        """Largest rank the configuration names, in `r` or in a pattern."""
        return max(self.r, *self.rank_pattern.values()) if self.rank_pattern else self.r

    @classmethod
    def from_dict(cls, data: Mapping[str, object]) -> AdapterConfig:
        """Check the content of an ``adapter_config.json``.

        Args:
            data: the parsed JSON object.

        Raises:
            InvalidAdapterError: a field is missing, has a wrong value, or cannot be honoured;
                names all of them.
        """
        config, problems = parse_config(data)
        if config is None or problems:
            raise InvalidAdapterError(problems)
        return config

    @classmethod
    def from_json(cls, path: str | os.PathLike[str]) -> AdapterConfig:
        """Read and check an ``adapter_config.json``.

        Args:
            path: the file.

        Raises:
            InvalidAdapterError: the file is not JSON, or as in `from_dict`.
            OSError: the file cannot be read.
        """
        data, problems = parse_json(Path(path).read_bytes())
        if data is None:
            raise InvalidAdapterError(problems, source=str(path))
        try:
            return cls.from_dict(data)
        except InvalidAdapterError as error:
            raise InvalidAdapterError(error.problems, source=str(path)) from None


def parse_json(content: bytes) -> tuple[Mapping[str, object] | None, list[Problem]]:
    """Return the JSON object in a configuration file, or the problem with it."""
    data, fault = parse_object(content)
    return (data, []) if fault is None else (None, [_unreadable(*fault)])


def _unreadable(found: str, expected: str) -> Problem:
    return Problem(
        code=ProblemCode.CONFIG_UNREADABLE, tensor=CONFIG_FILE, found=found, expected=expected
    )


def parse_config(data: Mapping[str, object]) -> tuple[AdapterConfig | None, list[Problem]]:
    """Return the configuration and everything that is wrong with it.

    Returns:
        The configuration, or None when rank and alpha cannot be told (or the method is another
        one); and the problems. Both can be there at once.
    """
    kind = check_type(data)
    if kind is not None:
        return None, [kind]
    peft_type = str(data["peft_type"])
    reader = FieldReader(data)
    problems = [
        Problem(code=ProblemCode.MISSING_FIELD, tensor=f"{CONFIG_FILE} {name}", found="missing")
        for name in REQUIRED_FIELDS[peft_type]
        if name not in data
    ]
    rank = 0 if peft_type == "IA3" else reader.rank("r")
    name = "lora_alpha" if peft_type == "LORA" else "alpha"
    alpha = reader.number(name) if name in REQUIRED_FIELDS[peft_type] else 1.0
    # Build it even with stand-ins, so that every other field is checked as well.
    numbers = (1 if rank is None else rank, 1.0 if alpha is None else alpha)
    config = _read_fields(reader, data, peft_type, *numbers)
    problems += reader.problems + check_fields(data, peft_type) + _contradictions(config)
    return (None if rank is None or alpha is None else config), problems


def _contradictions(config: AdapterConfig) -> list[Problem]:
    """Return a problem for fields that PEFT refuses together."""
    if not (config.lora_bias and config.use_dora):
        return []
    return [
        Problem(
            code=ProblemCode.INVALID_FIELD,
            tensor=f"{CONFIG_FILE} lora_bias",
            found="true, and use_dora too",
            expected="one of the two; PEFT defines no bias of lora_B under DoRA",
        )
    ]


def _read_fields(
    reader: FieldReader, data: Mapping[str, object], peft_type: str, rank: int, alpha: float
) -> AdapterConfig:
    return AdapterConfig(
        r=rank,
        lora_alpha=alpha,
        peft_type=peft_type,
        target_modules=reader.targets("target_modules"),
        use_rslora=reader.flag("use_rslora"),
        rank_pattern=MappingProxyType(reader.rank_pattern("rank_pattern")),
        alpha_pattern=MappingProxyType(reader.alpha_pattern("alpha_pattern")),
        bias=reader.choice("bias", _BIAS_WORDS.get(peft_type, ("none",))),
        lora_bias=reader.flag("lora_bias"),
        use_dora=reader.flag("use_dora"),
        fan_in_fan_out=reader.flag("fan_in_fan_out"),
        init_lora_weights=reader.initialisation("init_lora_weights"),
        modules_to_save=reader.names("modules_to_save"),
        ensure_weight_tying=reader.flag("ensure_weight_tying"),
        trainable_token_indices=reader.rows("trainable_token_indices"),
        target_parameters=reader.names("target_parameters"),
        feedforward_modules=reader.targets("feedforward_modules"),
        save_projection=reader.flag("save_projection", absent=True),
        alora_invocation_tokens=reader.tokens("alora_invocation_tokens"),
        base_model_name_or_path=reader.text("base_model_name_or_path"),
        task_type=reader.text("task_type"),
        peft_version=reader.text("peft_version"),
        raw=MappingProxyType(dict(data)),
    )
