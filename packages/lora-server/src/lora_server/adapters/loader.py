"""Reads, checks and packs adapters beside the running steps.

Knows nothing of names: what comes in is a folder, what goes out is ready for the host tier.
"""

from __future__ import annotations

import math
import os
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from lora_layers import AdapterMismatchError
from lora_server.effect import AdapterEffect
from lora_server.errors import (
    InvalidAdapterRequestError,
    RequestError,
    StartupError,
    UnknownAdapterError,
)
from lora_server.model.labels import AdapterLabels, adapter_notes
from lora_weights import (
    AdapterNotFoundError,
    InvalidAdapterError,
    SourceError,
    UnsafeFormatError,
    load_adapter,
)

if TYPE_CHECKING:
    from pathlib import Path

    from lora_layers import LoraModelManager, PreparedAdapter
    from lora_server.engine.core import AdapterEngine, Core
    from lora_weights import Adapter

_NICENESS = 10
"""Of the threads that read: where cores are short they get a tenth of what the engine gets."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadAdapter:
    """An adapter that has been read and fits the model."""

    digest: str
    rank: int
    size_bytes: int
    path: str
    prepared: PreparedAdapter
    labels: AdapterLabels
    effect: AdapterEffect | None
    """What it changes, the probe left out; None for one that is read again."""
    load_s: float
    """Seconds for reading, checking and packing."""


class AdapterLoader:
    """Turns folders into adapters on threads of its own. Make it before the engine starts."""

    def __init__(
        self,
        manager: LoraModelManager,
        *,
        dtype: torch.dtype,
        max_rank: int,
        num_threads: int = 1,
    ) -> None:
        self._manager = manager
        self._dtype = dtype
        self._max_rank = max_rank
        self._threads = ThreadPoolExecutor(
            num_threads, thread_name_prefix="adapter-load", initializer=_step_back
        )
        # Before the engine says how many threads its operators use: part of what they are told
        # holds for the whole process, and the last word must be the engine's.
        wait([self._threads.submit(_step_back) for _ in range(num_threads)])

    @property
    def threads(self) -> ThreadPoolExecutor:
        """Where reads run."""
        return self._threads

    def read(self, path: str | Path, *, is_new: bool = True) -> ReadAdapter:
        """Read one adapter; blocks, so call it on `threads`.

        Args:
            path: where it is.
            is_new: whether to look at what it changes too.

        Raises:
            UnknownAdapterError: there is no adapter in that folder.
            InvalidAdapterRequestError: there is one, and it cannot be served; `details` says all
                the reasons.
        """
        start = time.perf_counter()
        try:
            adapter = load_adapter(path, dtype=self._dtype, max_rank=self._max_rank)
            prepared = self._manager.prepare(adapter)
        except (AdapterNotFoundError, SourceError) as error:
            raise UnknownAdapterError(str(error), param="lora_path") from error
        except (InvalidAdapterError, AdapterMismatchError) as error:
            details = [str(problem) for problem in error.problems]
            raise InvalidAdapterRequestError(
                f"the adapter in {path} cannot be served: {'; '.join(details)}",
                param="lora_path",
                details=details,
            ) from error
        except UnsafeFormatError as error:
            raise InvalidAdapterRequestError(
                str(error), param="lora_path", details=[str(error)]
            ) from error
        return ReadAdapter(
            labels=self._labels(adapter, prepared, path),
            digest=adapter.digest,
            rank=adapter.rank,
            size_bytes=prepared.nbytes,
            path=str(path),
            prepared=prepared,
            effect=self._effect(adapter, prepared) if is_new else None,
            load_s=time.perf_counter() - start,
        )

    def _effect(self, adapter: Adapter, prepared: PreparedAdapter) -> AdapterEffect:
        """Say how much of the file is applied, and how large the updates are."""
        norms = self._manager.update_norms(prepared)
        return AdapterEffect(
            applied_tensors=adapter.num_applied,
            total_tensors=adapter.num_tensors,
            update_norm=math.hypot(*norms.values()),
            largest_module=max(norms, key=norms.__getitem__, default=None),
        )

    def _labels(
        self, adapter: Adapter, prepared: PreparedAdapter, path: str | Path
    ) -> AdapterLabels:
        """Read what the adapter's files say of labels, where the model has any."""
        if self._manager.num_labels() is None:
            return AdapterLabels(num_labels=None, notes=None)
        try:
            notes = adapter_notes(adapter.config.raw, path)
        except StartupError as error:
            raise InvalidAdapterRequestError(
                f"the adapter in {path} cannot be served: {error}",
                param="lora_path",
                details=error.problems,
            ) from error
        return AdapterLabels(num_labels=prepared.num_labels, notes=notes)

    def refetch(self, engine: AdapterEngine, digest: str, path: str) -> None:
        """Read a known adapter again, for requests that wait for it; returns at once."""
        self._threads.submit(self._refetch, engine, digest, path)

    def _refetch(self, engine: AdapterEngine, digest: str, path: str) -> None:
        result: PreparedAdapter | Exception
        start = time.perf_counter()
        try:
            found = self.read(path, is_new=False)
            if found.digest == digest:
                result = found.prepared
            else:
                result = RequestError(
                    f"{path} now holds version {found.digest[:12]}, not {digest[:12]}:"
                    " load it again under its name"
                )
        except Exception as error:  # noqa: BLE001 - whatever it is, the waiting requests are told
            result = error
        seconds = time.perf_counter() - start

        def finish(core: Core) -> None:
            if core.adapters is not None:
                core.adapters.finish_fetch(digest, result, seconds=seconds)

        engine.call(finish)

    def close(self) -> None:
        """Drop what has not begun; a read in progress ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)


def _step_back() -> None:
    """Let the thread that calls this give way to the engine's, which somebody waits for."""
    torch.set_num_threads(1)
    if sys.platform == "linux":  # elsewhere priorities belong to processes
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)
