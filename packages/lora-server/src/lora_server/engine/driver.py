"""The engine thread, and the one way to talk to it.

The thread owns the model, the KV pool and the adapter tiers; everybody else sends it messages and
gets messages back. Streams are delivered to the event loop that asked, once a step.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Generic, TypeVar, cast

import torch

from lora_server.errors import EngineError, NotReadyError

from .core import AnyRequest, Core, Output
from .hand_over import HandOver
from .messages import EngineOutput, RequestFailed, SequenceOutput, merge_tokens
from .pooling_request import PoolingOutput

if TYPE_CHECKING:
    from .request import GenerationRequest
    from .stats import EngineStats

_log = logging.getLogger(__name__)

R = TypeVar("R")
C = TypeVar("C", bound=Core)

_IDLE_WAIT_S = 0.02
"""How long the thread sleeps when requests wait but none may run yet; a message wakes it."""

_SNAPSHOT_TIMEOUT_S = 30.0

_Command = Callable[[], None]


class _Stream:
    """Where the outputs of one request go. Used on its event loop's thread only."""

    __slots__ = ("_ready", "_waiter", "loop", "num_open")

    def __init__(self, loop: asyncio.AbstractEventLoop, num_open: int) -> None:
        self.loop = loop
        self.num_open = num_open
        """Continuations that have not ended."""
        self._ready: list[Output] = []
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: Output) -> None:
        """Add an output and wake the reader."""
        self._ready.append(output)
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def take(self) -> list[Output]:
        """Return what has come since the last call, in order; wait until there is something."""
        if not self._ready:
            self._waiter = self.loop.create_future()
            await self._waiter
        ready, self._ready = self._ready, []
        return ready


class Engine(Generic[C]):
    """Runs a core on a thread of its own.

    `generate`, `call` and `snapshot` may be used from any thread (`generate` from an event loop).
    """

    def __init__(self, core: C, *, num_threads: int | None = None) -> None:
        """Make the engine; `start` starts it.

        Args:
            core: what it runs.
            num_threads: threads of one operator on a CPU; None leaves torch's choice. Should be
                all there are, and other threads of the process should use one: OpenMP keeps a
                team of workers for each thread that calls torch, and once there are more workers
                than cores they sleep between operators instead of waiting for the next.
        """
        self._core = core
        self._num_threads = num_threads
        self._inbox: queue.SimpleQueue[_Command] = queue.SimpleQueue()
        self._streams: dict[str, _Stream] = {}
        self._held: list[Output] = []
        """Outputs of the last step, until the next one's computation begins."""
        core.before_forward = self._flush
        self._hand_over = HandOver()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._is_stopping = False
        self._is_draining = False

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def start(self) -> None:
        """Start the thread."""
        self._hand_over.start()
        self._thread.start()

    def stop(self) -> None:
        """End every request, then the thread; returns when it has ended."""
        self.begin_shutdown()
        self._post(self._stop)
        if self._thread.is_alive():
            self._thread.join()
        self._hand_over.stop()

    def begin_shutdown(self) -> None:
        """Refuse new requests and end the running ones, whose streams close with `abort`."""
        self._is_draining = True
        self._post(self._abort_all)

    def generate(self, request: GenerationRequest) -> AsyncGenerator[EngineOutput, None]:
        """Run a request and yield its outputs as they come.

        Tokens of a continuation that have come since the reader last looked are one output.

        Closing the iterator early aborts the request and frees its KV blocks and its lease.

        Raises:
            NotReadyError: the service is shutting down.
        """
        return cast("AsyncGenerator[EngineOutput, None]", self._outputs(request))

    async def _outputs(self, request: AnyRequest) -> AsyncGenerator[Output, None]:
        if self._is_draining:
            raise NotReadyError("the service is shutting down")
        stream = _Stream(asyncio.get_running_loop(), request.n)
        self._post(lambda: self._submit(request, stream))
        try:
            while stream.num_open:
                for output in _merged(await stream.take()):
                    stream.num_open -= _num_ended(output, stream.num_open)
                    yield output
        finally:
            if stream.num_open:
                self._post(lambda: self._abort(request.request_id))

    def call(self, function: Callable[[C], R]) -> Future[R]:
        """Run a function on the engine thread between two steps."""
        future: Future[R] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function(self._core))
            except BaseException as error:  # noqa: BLE001 - it is the caller's to handle
                future.set_exception(error)

        self._post(run)
        return future

    def snapshot(self) -> EngineStats:
        """Numbers of this moment, taken between two steps; blocks until then.

        Raises:
            TimeoutError: the engine did not answer, or has stopped.
        """
        return self.call(lambda core: core.stats()).result(timeout=_SNAPSHOT_TIMEOUT_S)

    def _post(self, command: _Command) -> None:
        self._inbox.put(command)

    # -- below: the engine thread ----------------------------------------------------------------

    def _run(self) -> None:
        if self._num_threads is not None:
            torch.set_num_threads(self._num_threads)
        with torch.inference_mode():
            while True:
                self._take_commands()
                if self._is_stopping:
                    return
                if self._core.has_work:
                    self._step()

    def _take_commands(self) -> None:
        """Run what was sent; sleep when there is nothing to compute."""
        if not self._core.has_work:
            while self._core.rest() and self._inbox.empty():
                pass  # a part at a time: a request that comes waits for no more than that
            self._inbox.get()()
        while not self._is_stopping:
            try:
                command = self._inbox.get_nowait()
            except queue.Empty:
                return
            self._flush()  # nobody knows how long the command takes
            command()

    def _step(self) -> None:
        try:
            outputs, is_idle = self._core.step()
        except Exception as error:  # noqa: BLE001 - the thread must outlive it
            # Nothing is known about which request is at fault: all end, none is left hanging.
            _log.exception("the engine failed outside a forward pass; ending all requests")
            self._flush()
            failed = EngineError(f"{type(error).__name__}: {error}")
            self._deliver(
                [RequestFailed(request_id=request_id, error=failed) for request_id in self._streams]
            )
            self._core.abort_all()
            return
        # Readers that woke now would stand in the way of the next step's preparation, which is
        # Python too; they have the time of its computation.
        self._held += outputs
        if is_idle or not self._core.has_work:
            self._flush()
        if is_idle:
            self._wait_for_command()

    def _flush(self) -> None:
        held, self._held = self._held, []
        if held:
            self._send(held)

    def _wait_for_command(self) -> None:
        try:
            self._inbox.get(timeout=_IDLE_WAIT_S)()
        except queue.Empty:
            return

    def _submit(self, request: AnyRequest, stream: _Stream) -> None:
        self._streams[request.request_id] = stream
        if self._is_draining:
            error = NotReadyError("the service is shutting down")
            self._deliver([RequestFailed(request_id=request.request_id, error=error)])
            return
        self._core.submit(request)

    def _abort(self, request_id: str) -> None:
        self._streams.pop(request_id, None)
        self._core.abort(request_id)

    def _abort_all(self) -> None:
        self._deliver(self._core.abort_all())

    def _stop(self) -> None:
        self._is_stopping = True

    def _deliver(self, outputs: Sequence[Output]) -> None:
        """Hand outputs to their event loops, after those that are held."""
        self._flush()
        self._send(outputs)

    def _send(self, outputs: Sequence[Output]) -> None:
        """Hand outputs to their event loops, one wake-up a loop."""
        by_loop: dict[asyncio.AbstractEventLoop, list[tuple[_Stream, Output]]] = {}
        streams = self._streams
        loop = batch = None
        for output in outputs:
            stream = streams.get(output.request_id)
            if stream is None:
                continue
            if batch is None or stream.loop is not loop:
                loop = stream.loop
                batch = by_loop.setdefault(loop, [])
            batch.append((stream, output))
        for loop, batch in by_loop.items():
            self._hand_over.put(loop, partial(_put_all, batch))
        self._forget_ended(outputs)

    def _forget_ended(self, outputs: Sequence[Output]) -> None:
        for output in outputs:
            if _may_be_last(output) and not self._core.is_known(output.request_id):
                self._streams.pop(output.request_id, None)


def _may_be_last(output: Output) -> bool:
    return type(output) is not SequenceOutput or output.finish_reason is not None


def _put_all(batch: Sequence[tuple[_Stream, Output]]) -> None:
    for stream, output in batch:
        stream.put(output)


def _merged(outputs: list[Output]) -> list[Output]:
    """Join the tokens of each continuation; nothing passes what is not tokens."""
    if len(outputs) == 1:
        return outputs
    joined: list[Output] = []
    place_of: dict[int, int] = {}
    for output in outputs:
        if not isinstance(output, SequenceOutput):
            place_of.clear()
            joined.append(output)
        elif output.index in place_of:
            earlier = joined[place_of[output.index]]
            assert isinstance(earlier, SequenceOutput)
            joined[place_of[output.index]] = merge_tokens(earlier, output)
        else:
            place_of[output.index] = len(joined)
            joined.append(output)
    return joined


def _num_ended(output: Output, num_open: int) -> int:
    """How many continuations of its request an output ends."""
    if isinstance(output, RequestFailed | PoolingOutput):
        return num_open
    return int(isinstance(output, SequenceOutput) and output.finish_reason is not None)
