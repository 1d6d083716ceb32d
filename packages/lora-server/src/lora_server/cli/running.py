"""A service that runs behind one address, whatever its model does, and its background reads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lora_server.http.app import create_app
from lora_server.http.service import Phase

if TYPE_CHECKING:
    from collections.abc import Callable

    from fastapi import FastAPI

    from lora_server.adapters.loader import AdapterLoader
    from lora_server.engine.core import AdapterEngine
    from lora_server.engine.driver import Engine
    from lora_server.http.service import Service


class RunningService:
    """Everything that runs behind one address."""

    def __init__(
        self,
        *,
        service: Service,
        engine: Engine[Any],
        loader: AdapterLoader | None,
        warm_up: Callable[[], None],
    ) -> None:
        """Put the application around a service.

        Args:
            service: what the routes work with.
            engine: its engine, which runs.
            loader: reads adapters; None where they are switched off.
            warm_up: runs the model once and returns when that is done.
        """
        self.app: FastAPI = create_app(service)
        self._service = service
        self._engine = engine
        self._loader = loader
        self._warm_up = warm_up

    def warm_up(self) -> None:
        """Run the model once on the engine's thread, then take requests."""
        self._warm_up()
        if self._service.readiness.phase is Phase.STARTING:
            self._service.readiness.phase = Phase.READY

    @property
    def num_running(self) -> int:
        """Requests that were taken and whose replies are not complete."""
        return self._service.readiness.num_running

    def begin_drain(self) -> None:
        """Take no more requests; running ones go on. May be called in a signal handler."""
        self._service.readiness.phase = Phase.DRAINING

    def reload_keys(self) -> None:
        """Read the file of keys again, if there is one. Called on the event loop's thread."""
        self._service.keys.reload()

    def begin_shutdown(self) -> None:
        """Take no more requests and end the running ones, so that their streams end."""
        self._service.readiness.phase = Phase.DRAINING
        self._engine.begin_shutdown()

    def close(self) -> None:
        """End the engine's thread, and send the last traces."""
        self._engine.stop()
        if self._loader is not None:
            self._loader.close()
        if self._service.traces is not None:
            self._service.traces.close()


class Fetcher:
    """Starts background reads for the engine; connected once both ends exist."""

    def __init__(self) -> None:
        self._ends: tuple[AdapterEngine, AdapterLoader] | None = None

    def connect(self, engine: AdapterEngine, loader: AdapterLoader) -> None:
        """Name who asks and who reads."""
        self._ends = (engine, loader)

    def __call__(self, digest: str, path: str) -> None:
        """Start one read."""
        assert self._ends is not None, "an adapter was fetched before the service was built"
        engine, loader = self._ends
        loader.refetch(engine, digest, path)
