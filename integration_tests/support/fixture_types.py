"""Types of the fixtures that are functions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from contextlib import AbstractContextManager

    from support.server import Server
    from support.worlds import World


class MakeWorld(Protocol):
    """Returns the world of a family."""

    def __call__(self, family: str) -> World:
        """Make it when it is first asked for."""


class StartServer(Protocol):
    """Serves a world while a `with` block lasts."""

    def __call__(self, world: World, *flags: str) -> AbstractContextManager[Server]:
        """Start the program with these flags."""
