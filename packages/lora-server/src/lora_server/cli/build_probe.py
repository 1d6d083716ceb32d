"""Gives the adapters their proof of effect: the probe's text as tokens, and who runs it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_server.config import EffectProbe
from lora_server.engine.probe import (
    MAX_PROBE_TOKENS,
    PROBE_TEXT,
    GenerationProbe,
    PoolingProbe,
)
from lora_server.engine.prober import EffectProber
from lora_server.http.pooling_text import PoolingText
from lora_server.http.text import TextProcessor
from lora_server.model.load import LoadedModel

if TYPE_CHECKING:
    from lora_server.config import ServerConfig
    from lora_server.engine.admission import AdapterAdmission
    from lora_server.model.pooling_model import LoadedPooler


def attach_probe(
    config: ServerConfig, model: LoadedModel | LoadedPooler, admission: AdapterAdmission
) -> None:
    """Have the adapters that are loaded from now on probed, unless the options say no."""
    if EffectProbe(config.effect_probe) is EffectProbe.OFF:
        return
    manager = admission.manager
    if isinstance(model, LoadedModel):
        length = min(MAX_PROBE_TOKENS, model.context_length)
        ids = TextProcessor(model.tokenizer).encode(PROBE_TEXT)[:length]
        probe = GenerationProbe(model, manager, ids or [0])
        admission.prober = EffectProber(manager, probe, shown=admission.shown, ride=probe.ride)
    else:
        length = min(MAX_PROBE_TOKENS, model.num_positions)
        text = PoolingText(model.tokenizer).encode(PROBE_TEXT, max_tokens=length)
        pooled = PoolingProbe(model, manager, text.token_ids, text.type_ids)
        admission.prober = EffectProber(manager, pooled, shown=admission.shown)


def prepare_probe(admission: AdapterAdmission | None) -> None:
    """Run the base's part of the probe on the engine's thread, before there are requests."""
    if admission is not None and admission.prober is not None:
        admission.prober.prepare()
