"""The engine thread of a pooling model."""

from __future__ import annotations

from contextlib import aclosing
from typing import TYPE_CHECKING

from .driver import Engine
from .messages import RequestFailed
from .pooling_core import PoolingCore
from .pooling_request import PoolingOutput

if TYPE_CHECKING:
    from .pooling_request import PoolingRequest


class PoolingEngine(Engine[PoolingCore]):
    """Runs a `PoolingCore` on a thread of its own."""

    async def pool(self, request: PoolingRequest) -> PoolingOutput:
        """Run a request; cancelling it ends the request.

        Raises:
            NotReadyError: the service is shutting down.
            ServerError: the engine could not answer.
        """
        async with aclosing(self._outputs(request)) as outputs:
            async for output in outputs:
                if isinstance(output, RequestFailed):
                    raise output.error
                assert isinstance(output, PoolingOutput), "a pooling core says nothing else"
                return output
        raise AssertionError("a request ends with an answer or with a failure")
