"""Puts a service together that classifies, scores and embeds."""

from __future__ import annotations

import logging
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

from lora_server.adapters.catalog import AdapterCatalog
from lora_server.adapters.loader import AdapterLoader
from lora_server.adapters.paths import AdapterRoots
from lora_server.cli.build_keys import build_body_limits, build_keys
from lora_server.cli.build_observers import build_observers
from lora_server.cli.build_probe import attach_probe, prepare_probe
from lora_server.cli.ledger.measured import LedgerMeter
from lora_server.cli.running import Fetcher, RunningService
from lora_server.cli.wrap import choose_backend, lora_dtype, wrap_model
from lora_server.engine.admission import AdapterAdmission
from lora_server.engine.pooling_core import PoolingCore
from lora_server.engine.pooling_driver import PoolingEngine
from lora_server.engine.pooling_request import PoolingKind, PoolingRequest
from lora_server.engine.pooling_scheduler import PoolingLimits
from lora_server.errors import StartupError
from lora_server.http.pooling_service import PoolingService
from lora_server.http.pooling_text import PoolingText
from lora_server.http.service import Readiness, Service
from lora_server.http.text import TextProcessor
from lora_server.model.pooling_load import load_pooler
from lora_server.options import static_modules

if TYPE_CHECKING:
    from lora_layers import LoraModelManager
    from lora_server.config import ServerConfig, Task
    from lora_server.engine.journal import AdapterJournal
    from lora_server.model.pooling_model import LoadedPooler

_log = logging.getLogger(__name__)

_WARM_UP_TOKENS = 8


def build_pooling_service(config: ServerConfig, task: Task, *, num_threads: int) -> RunningService:
    """Load the model and every adapter named at start, and start the engine.

    Args:
        config: the options.
        task: what they come to; not `auto` and not `generate`.
        num_threads: threads of one operator on a CPU.

    Raises:
        StartupError: with everything that keeps the service from starting.
    """
    keys = build_keys(config)
    observers = build_observers(config)
    started = time.perf_counter()
    model = load_pooler(config.model, task, dtype=config.dtype, device=config.device)
    max_length = _max_length(config, model)
    journal = observers.journal
    manager = None
    if config.enable_lora:
        backend = choose_backend(config, model.device)
        manager = wrap_model(model, config, backend=backend, on_evict=journal.evicted)
    fetcher = Fetcher()
    core = _build_core(config, model, manager, fetcher, journal)
    engine = PoolingEngine(core, num_threads=num_threads)
    loader = None
    if manager is not None:
        loader = AdapterLoader(
            manager, dtype=lora_dtype(config) or model.dtype, max_rank=config.max_lora_rank
        )
        fetcher.connect(engine, loader)
    catalog = AdapterCatalog(
        engine=engine,
        loader=loader,
        roots=AdapterRoots(config.adapter_roots),
        base_names=config.base_names,
        journal=journal,
    )
    engine.start()
    try:
        catalog.load_static(static_modules(config))
    except StartupError:
        engine.stop()
        raise
    _log.info(
        "task %s; model and adapters loaded in %.1f s; adapter slots: %d bytes",
        task,
        time.perf_counter() - started,
        0 if manager is None else manager.buffer_bytes,
    )
    service = Service(
        engine=engine,
        catalog=catalog,
        text=TextProcessor(model.tokenizer),
        max_model_len=max_length,
        vocab_size=model.vocab_size,
        max_loras=config.max_loras,
        model_path=config.model,
        version=version("lora-server"),
        metrics=observers.metrics,
        traces=observers.traces,
        is_alive=lambda: engine.is_alive,
        memory=LedgerMeter(
            config=config,
            task=task,
            model=model,
            manager=manager,
            engine=engine,
            max_model_len=max_length,
        ),
        pooling=PoolingService(
            engine=engine,
            task=task,
            text=PoolingText(model.tokenizer),
            head=model.head,
            embedding_length=model.hidden_size,
            labels_of=catalog.labels_of,
        ),
        readiness=Readiness(),
        keys=keys,
        body_limits=build_body_limits(config),
    )
    return RunningService(
        service=service,
        engine=engine,
        loader=loader,
        warm_up=lambda: engine.call(_warm_up).result(),
    )


def _max_length(config: ServerConfig, model: LoadedPooler) -> int:
    """Return the longest text; the operator may go beyond what the checkpoint was trained with."""
    wanted = config.max_model_len
    if wanted is not None and wanted > model.num_positions:
        raise StartupError(
            [f"--max-model-len is {wanted}, the model has {model.num_positions} positions"]
        )
    return wanted or model.max_length


def _build_core(
    config: ServerConfig,
    model: LoadedPooler,
    manager: LoraModelManager | None,
    fetcher: Fetcher,
    journal: AdapterJournal,
) -> PoolingCore:
    admission = None
    if manager is not None:
        admission = AdapterAdmission(
            manager,
            host_capacity=manager.config.host_capacity,
            fetch=fetcher,
            journal=journal,
        )
        attach_probe(config, model, admission)
    return PoolingCore(
        model=model,
        adapters=admission,
        limits=PoolingLimits(
            max_num_seqs=config.max_num_seqs, max_num_batched_tokens=config.max_num_batched_tokens
        ),
        clock=time.monotonic,
    )


def _warm_up(core: PoolingCore) -> None:
    """Run a short text through every layer, so that the first request finds all allocated."""
    kinds = [PoolingKind.EMBED] if core.model.head is None else list(PoolingKind)
    tokens = tuple(i % core.model.vocab_size for i in range(3, 3 + _WARM_UP_TOKENS))
    for kind in kinds:
        request = PoolingRequest(
            request_id=f"warm-up-{kind}",
            token_ids=tokens,
            type_ids=(0,) * len(tokens),
            kind=kind,
        )
        core.submit(request)
        with torch.inference_mode():
            while core.is_known(request.request_id):
                core.step()
    prepare_probe(core.adapters)
    core.reset_statistics()
