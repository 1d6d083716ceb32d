"""`lora-server serve`: builds the service, listens, warms up, and ends without losing an answer.

Order: options, address, model and adapters, listening, warm-up. Knows nothing of what the service
is made of.
"""

from __future__ import annotations

import logging
import socket
import sys
import threading
from types import MappingProxyType
from typing import TYPE_CHECKING, Protocol

from lora_server.cli.arguments import add_config_flags, read_config
from lora_server.cli.libraries import loading_libraries, read_ahead, release_libraries
from lora_server.errors import StartupError
from lora_server.logs import log_fields, start_logging, take_over

if TYPE_CHECKING:
    import argparse
    from collections.abc import Callable, Mapping, Sequence

    from fastapi import FastAPI

    from lora_server.config import ServerConfig
    from lora_server.options import ResolvedConfig

_logger = logging.getLogger(__name__)
_DEAD_PEERS: Mapping[str, int] = MappingProxyType(
    # asked after a minute without a word, given up after three more
    {"TCP_KEEPIDLE": 60, "TCP_KEEPINTVL": 20, "TCP_KEEPCNT": 9}
)
_USAGE = "lora-server serve MODEL [--lora-modules NAME=PATH ...] [options]"
_EPILOG = (
    "Every option can also be set by a variable, LORA_SERVER_MAX_LORAS for --max-loras, or in the "
    "file of --config. The command line goes before variables, variables before the file."
)


class Service(Protocol):
    """What is run: built by `lora_server.cli.build`, or by a test."""

    @property
    def app(self) -> FastAPI:
        """The application; answers as soon as the server listens."""

    @property
    def num_running(self) -> int:
        """Requests that were taken and whose replies are not complete."""

    def warm_up(self) -> None:
        """Run the model once, then say that the service is ready. Called on its own thread."""

    def begin_drain(self) -> None:
        """Take no more requests; running ones go on. May be called in a signal handler."""

    def reload_keys(self) -> None:
        """Read the file of keys again, if there is one. Called on SIGHUP."""

    def begin_shutdown(self) -> None:
        """End all running requests, so that their streams end. Returns without waiting."""

    def close(self) -> None:
        """Free what the service holds, after the last answer. Called once."""


def add_parser(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Declare the command and its flags."""
    parser = commands.add_parser(
        "serve",
        help="serve a base model and its adapters",
        usage=_USAGE,
        description="Serve MODEL, a folder or a name in the local hub cache, and its adapters.",
        epilog=_EPILOG,
        allow_abbrev=False,
    )
    add_config_flags(parser)
    parser.set_defaults(run=run, takes_extras=True)


def run(parsed: argparse.Namespace, extras: Sequence[str]) -> int:
    """Serve until a signal and return 0; 1 when warm-up fails.

    Raises:
        StartupError: with everything that keeps the service from starting.
    """
    resolved = read_config(parsed, extras)

    def build(config: ServerConfig) -> Service:
        with loading_libraries():
            read_ahead(config.model)
            from lora_server.cli.build import build_service

        take_over("transformers")
        return build_service(config)

    try:
        return serve(resolved, build)
    finally:
        release_libraries()


def serve(resolved: ResolvedConfig, build: Callable[[ServerConfig], Service]) -> int:
    """Build the service and serve it until SIGINT or SIGTERM.

    Args:
        resolved: the options and who set them, for the table at start.
        build: makes the service; reports every problem in one `StartupError`.

    Returns:
        0 after a signal, 1 when warm-up failed.
    """
    config = resolved.config
    is_json = config.log_format == "json"
    start_logging(level=config.log_level, is_json=is_json)
    if _logger.isEnabledFor(logging.INFO) and not is_json:
        from lora_server.cli.config_table import print_table

        print_table(resolved)
    for folder in resolved.skipped_folders:
        _logger.warning("--lora-dir: %r has no adapter_config.json, skipped", folder)
    listener = bind_address(config.host, config.port)
    with listener:
        service = build(config)
        try:
            return _serve_until_signal(config, service, listener)
        finally:
            service.close()


def _serve_until_signal(config: ServerConfig, service: Service, listener: socket.socket) -> int:
    from lora_server.cli.connections import ConnectionLimits
    from lora_server.cli.listen import ServiceServer

    failures: list[BaseException] = []
    limits = ConnectionLimits(
        header_timeout_s=config.request_header_timeout,
        write_timeout_s=config.response_write_timeout,
        keep_alive_s=config.keep_alive_timeout,
    )
    server = ServiceServer(service, drain_timeout_s=config.drain_timeout, limits=limits)
    if config.api_key_file is not None:
        server.on_hangup = service.reload_keys

    def warm_up() -> None:
        try:
            service.warm_up()
        except Exception as error:
            # the edge of this thread: whatever it is, it ends the server
            _logger.exception("warm-up failed")
            failures.append(error)
            server.should_exit = True
            return
        _say_ready(config, listener)

    # a daemon: a second Ctrl-C does not wait for it
    server.on_listening = threading.Thread(target=warm_up, name="warm-up", daemon=True).start
    server.run(sockets=[listener])
    return 1 if failures else 0


def _say_ready(config: ServerConfig, listener: socket.socket) -> None:
    """Tell people the address in a line of its own, and programs in one of the log."""
    host, port = listener.getsockname()[:2]
    url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
    text = f"Serving {config.base_names[0]} on {url}"
    if config.log_format == "json":
        _logger.info(text, extra=log_fields(url=url))
    else:
        print(text, file=sys.stderr, flush=True)


def bind_address(host: str, port: int) -> socket.socket:
    """Take the address before the model is loaded; connections are refused until listening.

    Raises:
        StartupError: when there is no such address, or somebody has it.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP, flags=socket.AI_PASSIVE
        )[0]
        # asyncio sends small packets at once only where the protocol is spelled out; otherwise
        # every streamed token may wait 40 ms for the acknowledgement of the one before
        listener = socket.socket(family, kind, protocol)
    except OSError as error:
        raise StartupError([f"--host {host!r} --port {port}: {error}"]) from error
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _notice_dead_peers(listener)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise StartupError([f"cannot listen on {host}:{port}: {error.strerror}"]) from error
    return listener


def _notice_dead_peers(listener: socket.socket) -> None:
    """Close connections whose other end vanished without a word; they inherit these options."""
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in _DEAD_PEERS.items():
        if hasattr(socket, name):
            listener.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
