"""The ledger of a running service: from its tensors, each byte counted once, and its process."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lora_server.cli.ledger.parts import weigh_base, weigh_host_tier, weigh_kv, weigh_slots
from lora_server.cli.ledger.planned import look_at_machine, shown_lora_dtype
from lora_server.cli.ledger.workspace import StepSizes, estimate_workspace
from lora_server.ledger import KvLedger, LedgerKind, MemoryLedger, ProcessLedger
from lora_server.machine import file_bytes, peak_rss_bytes, resident_bytes, rss_bytes
from lora_server.model.extents import address_ranges, tensor_bytes
from lora_server.model.load import LoadedModel

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from typing import Any

    import torch

    from lora_cache import CacheStats
    from lora_layers import LoraModelManager
    from lora_server.config import ServerConfig
    from lora_server.engine.driver import Engine
    from lora_server.ledger import AdapterLedger
    from lora_server.model.pooling_model import LoadedPooler

_TIMEOUT_S = 30.0


class LedgerMeter:
    """Measures one service whenever it is asked to. Any thread may ask."""

    def __init__(
        self,
        *,
        config: ServerConfig,
        task: str,
        model: LoadedModel | LoadedPooler,
        manager: LoraModelManager | None,
        engine: Engine[Any],
        max_model_len: int,
    ) -> None:
        self._config = config
        self._task = task
        self._model = model
        self._manager = manager
        self._engine = engine
        self._max_model_len = max_model_len

    def measure(self, adapters: Sequence[AdapterLedger]) -> MemoryLedger:
        """Return the ledger of this moment; waits for the engine to end its step.

        Args:
            adapters: the adapters that are known by name.

        Raises:
            TimeoutError: the engine did not answer, or has stopped.
        """
        held, stats = self._engine.call(lambda _core: self._tiers()).result(timeout=_TIMEOUT_S)
        model, manager = self._model, self._manager
        kv = self._kv()
        weights = weigh_base(model.module, manager)
        host = None
        slots = None
        if manager is not None and stats is not None:
            slots = weigh_slots(manager, held, generates=isinstance(model, LoadedModel))
            host = weigh_host_tier(
                manager,
                [adapter.size_bytes for adapter in adapters],
                held_bytes=stats.host_bytes,
                num_held=stats.host_entries,
            )
        hidden = weights.prepacked_bytes + (host.size_bytes if host else 0)
        process = _look_at_process(list(self._tensors()), hidden_bytes=hidden)
        return MemoryLedger(
            kind=LedgerKind.MEASURED,
            model=self._config.model,
            task=self._task,
            device=model.device.type,
            dtype=str(model.dtype).removeprefix("torch."),
            lora_dtype=shown_lora_dtype(self._config, model.dtype),
            weights=weights,
            kv_cache=kv,
            slots=slots,
            host_tier=host,
            workspace=estimate_workspace(self._sizes(kv), self._config),
            runtime_bytes=max(process.unaccounted_bytes, 0),
            adapters=tuple(adapters),
            machine=look_at_machine(model.device),
            process=process,
        )

    def _tiers(self) -> tuple[list[dict[str, tuple[int, ...]]], CacheStats | None]:
        """Say what the slots hold and what the host tier takes. Runs on the engine's thread."""
        manager = self._manager
        if manager is None:
            return [], None
        found = [manager.slot_of(key) for key in list(manager.keys())]
        slots = [slot for slot in found if slot is not None]
        stacks = manager.memory()
        held = [{stack.path: stack.slot_ranks[slot] for stack in stacks} for slot in slots]
        return held, manager.stats()

    def _kv(self) -> KvLedger | None:
        model = self._model
        if not isinstance(model, LoadedModel) or model.attention.cache is None:
            return None
        cache = model.attention.cache
        block_bytes = tensor_bytes(cache.layers.values()) // cache.num_blocks
        return weigh_kv(
            token_bytes=block_bytes // cache.block_size,
            block_size=cache.block_size,
            num_blocks=cache.num_blocks,
        )

    def _sizes(self, kv: KvLedger | None) -> StepSizes:
        model = self._model
        generates = isinstance(model, LoadedModel)
        return StepSizes(
            module=model.module,
            text_config=model.text_config,
            dtype=model.dtype,
            vocab_size=model.vocab_size if generates else 0,
            kv_token_bytes=kv.block_bytes // kv.block_size if kv else 0,
            num_kv_layers=len(model.kv_shapes) if isinstance(model, LoadedModel) else 0,
            num_kv_tokens=kv.num_tokens if kv else 0,
            max_model_len=self._max_model_len,
        )

    def _tensors(self) -> Iterator[torch.Tensor]:
        """Yield everything of the ledger that lies in tensors of known places."""
        model = self._model
        yield from model.module.parameters()
        yield from model.module.buffers()
        if isinstance(model, LoadedModel) and model.attention.cache is not None:
            yield from model.attention.cache.layers.values()
        if self._manager is not None:
            for stack in self._manager.memory():
                yield from stack.tensors


def _look_at_process(tensors: list[torch.Tensor], *, hidden_bytes: int) -> ProcessLedger:
    """Compare what the process has with what the tensors explain.

    Args:
        tensors: those whose addresses are known.
        hidden_bytes: what lies elsewhere, and counts as resident.
    """
    rss = rss_bytes()
    resident = resident_bytes(address_ranges(tensors)) + hidden_bytes
    return ProcessLedger(
        rss_bytes=rss,
        peak_rss_bytes=max(peak_rss_bytes(), rss),
        resident_bytes=resident,
        unaccounted_bytes=rss - resident,
        file_bytes=file_bytes(),
    )
