"""What can go wrong in the server, and which of it is the caller's doing.

ServerError
    StartupError (ValueError)
    NotReadyError
    EngineError
    RequestError
        InvalidRequestError
        InvalidAdapterRequestError
        AdapterAlreadyLoadedError
        AdapterConflictError
        AuthenticationError
        RateLimitError
        PathNotAllowedError
        NameNotAllowedError
        RuntimeLoadingDisabledError
        ModelNotFoundError
        UnknownAdapterError
            AdapterNotLoadedError
        DigestMismatchError
        GateFailedError
        RequestTooLargeError
        RequestTimeoutError

HTTP statuses and OpenAI's error shape are known to `lora_server.http.errors` only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence


class ServerError(Exception):
    """Base of every error this package raises."""


class StartupError(ServerError, ValueError):
    """The service cannot start; `problems` lists every reason found."""

    def __init__(self, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(self.problems))


class NotReadyError(ServerError):
    """The service is still starting, or is already draining."""


class EngineError(ServerError):
    """A step failed for a reason that is not the caller's."""


class RequestError(ServerError):
    """The caller's mistake. `param` names the field at fault, `details` lists all reasons."""

    code = "invalid_request"

    def __init__(
        self, message: str, *, param: str | None = None, details: Sequence[str] = ()
    ) -> None:
        self.message = message
        self.param = param
        self.details = tuple(details)
        super().__init__(message)


class InvalidRequestError(RequestError):
    """A field is missing, of the wrong type, or out of range."""


class InvalidAdapterRequestError(RequestError):
    """The adapter that was to be loaded cannot be served; `details` has every reason."""

    code = "invalid_adapter"


class AdapterAlreadyLoadedError(RequestError):
    """The name is taken and `load_inplace` was not asked for."""

    code = "adapter_already_loaded"


class AdapterConflictError(RequestError):
    """Two parts of one request name different adapters."""

    code = "adapter_conflict"


class AuthenticationError(RequestError):
    """No key, or a wrong one."""

    code = "invalid_api_key"


class RateLimitError(RequestError):
    """The key has used up its requests or its tokens for now."""

    code = "rate_limit_exceeded"

    def __init__(self, message: str, *, what: str, retry_after_s: float) -> None:
        self.what = what
        """`requests` or `tokens`; the error's `type` in the reply, as in the OpenAI API."""
        self.retry_after_s = retry_after_s
        """After so many seconds the same request is admitted, if nothing else is sent."""
        super().__init__(message)


class PathNotAllowedError(RequestError):
    """The path, or a file in it, lies outside every adapter root."""

    code = "path_not_allowed"


class NameNotAllowedError(RequestError):
    """The key may not give an adapter this name."""

    code = "name_not_allowed"


class RuntimeLoadingDisabledError(RequestError):
    """No adapter root was configured, so nothing may be loaded over HTTP."""

    code = "runtime_loading_disabled"


class ModelNotFoundError(RequestError):
    """`model` (or the header, or a member of a weighted set) names nothing that is served."""

    code = "model_not_found"

    def __init__(self, name: str, served: Sequence[str], *, param: str = "model") -> None:
        self.name = name
        self.served = tuple(served)
        listed = ", ".join(self.served) or "none"
        super().__init__(f"model {name!r} does not exist; served are: {listed}", param=param)


class UnknownAdapterError(RequestError):
    """No adapter is registered, or none lies on the disk, under this name."""

    code = "adapter_not_found"


class AdapterNotLoadedError(UnknownAdapterError):
    """A management route names an adapter that is not loaded."""

    def __init__(self, name: str, loaded: Sequence[str]) -> None:
        self.name = name
        self.loaded = tuple(loaded)
        listed = ", ".join(self.loaded) or "none"
        super().__init__(f"adapter {name!r} is not loaded; loaded are: {listed}", param="lora_name")


class DigestMismatchError(RequestError):
    """`expected_digest` is not the digest of the version that is loaded."""

    code = "digest_mismatch"


class GateFailedError(RequestError):
    """The new version of an adapter did not pass its gate; `details` names prompts and tokens."""

    code = "gate_failed"


class RequestTooLargeError(RequestError):
    """The body has more bytes than the server takes."""

    code = "request_too_large"


class RequestTimeoutError(RequestError):
    """The body did not arrive in time."""

    code = "request_timeout"
