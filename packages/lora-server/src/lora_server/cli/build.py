"""Puts the service together: model, adapters, engine, HTTP. The only place that knows all parts."""

from __future__ import annotations

import logging
import threading
import time
from importlib.metadata import version
from typing import TYPE_CHECKING

import torch

from lora_kernels import Backend
from lora_server.adapters.catalog import AdapterCatalog
from lora_server.adapters.loader import AdapterLoader
from lora_server.adapters.paths import AdapterRoots
from lora_server.cli.build_keys import build_body_limits, build_keys
from lora_server.cli.build_observers import build_observers
from lora_server.cli.build_probe import attach_probe, prepare_probe
from lora_server.cli.gate_file import gate_file
from lora_server.cli.ledger.kv_budget import choose_kv
from lora_server.cli.ledger.measured import LedgerMeter
from lora_server.cli.running import Fetcher, RunningService
from lora_server.cli.wrap import choose_backend, lora_dtype, wrap_model
from lora_server.config import Task
from lora_server.engine.admission import AdapterAdmission
from lora_server.engine.driver import Engine
from lora_server.engine.kv import BlockPool
from lora_server.engine.request import GenerationRequest, SamplingParams
from lora_server.engine.scheduler import SchedulerLimits
from lora_server.engine.step import EngineCore
from lora_server.errors import StartupError
from lora_server.http.service import Readiness, Service
from lora_server.http.text import TextProcessor
from lora_server.lora_modules import LoraModule, scan_folder
from lora_server.model.kv_cache import KvCache
from lora_server.model.load import LoadedModel, load_model
from lora_server.model.pooling_load import choose_task

if TYPE_CHECKING:
    from lora_layers import LoraModelManager
    from lora_server.config import ServerConfig
    from lora_server.engine.journal import AdapterJournal

_log = logging.getLogger(__name__)

_WARM_UP_TOKENS = 8
_POPULATED_BYTES = 512 * 1024**2
"""Of the KV cache's memory, handed out while the server starts; the rest as it is used."""


def build_service(config: ServerConfig) -> RunningService:
    """Load the model and every adapter named at start, and start the engine.

    Raises:
        StartupError: with everything that keeps the service from starting.
    """
    num_threads = config.num_threads or torch.get_num_threads()
    torch.set_num_threads(1)  # all workers belong to the engine's thread, see there
    task = Task(config.task)
    task = choose_task(config.model) if task is Task.AUTO else task
    gate = gate_file(config, task)
    if task is not Task.GENERATE:
        from lora_server.cli.build_pooling import build_pooling_service

        return build_pooling_service(config, task, num_threads=num_threads)
    keys = build_keys(config)
    observers = build_observers(config)
    started = time.perf_counter()
    model = load_model(config.model, dtype=config.dtype, device=config.device)
    backend = choose_backend(config, model.device)
    if backend is Backend.NATIVE:
        model.use_native_layers()
    journal = observers.journal
    manager = None
    if config.enable_lora:
        manager = wrap_model(model, config, backend=backend, on_evict=journal.evicted)
        if backend is Backend.NATIVE:
            model.fuse_layers()
    core, fetcher = _build_core(config, model, manager, journal)
    engine = Engine(core, num_threads=num_threads)
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
        catalog.load_static(_static_modules(config))
    except StartupError:
        engine.stop()
        raise
    _log.info("model and adapters loaded in %.1f s", time.perf_counter() - started)
    service = Service(
        engine=engine,
        catalog=catalog,
        text=TextProcessor(model.tokenizer),
        max_model_len=core.max_model_len,
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
            max_model_len=core.max_model_len,
        ),
        gate_file=gate,
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


def _build_core(
    config: ServerConfig,
    model: LoadedModel,
    manager: LoraModelManager | None,
    journal: AdapterJournal,
) -> tuple[EngineCore, Fetcher]:
    """Size and allocate the KV cache, and make the engine's state."""
    budget = choose_kv(config, model)
    cache = KvCache(
        model.kv_shapes,
        num_blocks=budget.num_blocks,
        block_size=budget.block_size,
        dtype=model.dtype,
        device=model.device,
    )
    model.use_cache(cache)
    threading.Thread(
        target=cache.populate, args=(_POPULATED_BYTES,), name="kv-populate", daemon=True
    ).start()
    _log.info(
        "KV cache: %d tokens in %d blocks, %d bytes; adapter slots: %d bytes",
        budget.num_tokens,
        budget.num_blocks,
        cache.size_bytes,
        0 if manager is None else manager.buffer_bytes,
    )
    fetcher = Fetcher()
    admission = None
    if manager is not None:
        admission = AdapterAdmission(
            manager,
            host_capacity=manager.config.host_capacity,
            fetch=fetcher,
            journal=journal,
        )
        attach_probe(config, model, admission)
    core = EngineCore(
        model=model,
        adapters=admission,
        limits=SchedulerLimits(
            max_num_seqs=config.max_num_seqs,
            max_num_batched_tokens=config.max_num_batched_tokens,
            block_size=config.block_size,
            max_adapter_wait_s=config.max_adapter_wait,
        ),
        pool=BlockPool(budget.num_blocks, keeps_prefixes=config.enable_prefix_caching),
        max_model_len=budget.max_model_len,
        clock=time.monotonic,
    )
    return core, fetcher


def _static_modules(config: ServerConfig) -> tuple[LoraModule, ...]:
    """Adapters named one by one, then those of the folder."""
    folder = () if config.lora_dir is None else scan_folder(config.lora_dir).modules
    return (*config.lora_modules, *folder)


def _warm_up(core: EngineCore) -> None:
    """Run a short prompt through every layer, so that the first request finds all allocated."""
    prompt = tuple(i % core.model.vocab_size for i in range(_WARM_UP_TOKENS))
    request = GenerationRequest(
        request_id="warm-up",
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True),
    )
    core.submit(request)
    while core.is_known(request.request_id):
        core.step()
    prepare_probe(core.adapters)
    core.reset_statistics()
