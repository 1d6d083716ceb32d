"""The catalog as one key sees it: what the key may not use is not there.

Every answer is the one that is given to a name that nobody has loaded, down to the names that its
message lists.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from lora_server.errors import AdapterNotLoadedError, ModelNotFoundError, NameNotAllowedError
from lora_server.http.keys import ApiKey
from lora_server.http.service import AdapterCard, AdapterEntry, Catalog


class VisibleCatalog:
    """A catalog without what a key may not use. Its methods are those of `Catalog`."""

    def __init__(self, catalog: Catalog, key: ApiKey) -> None:
        self._catalog = catalog
        self._key = key

    @property
    def base_names(self) -> Sequence[str]:
        """Names of the base model, for replies; `is_base` says whether the key may use it."""
        return self._catalog.base_names

    @property
    def names(self) -> Sequence[str]:
        """What exists for the key."""
        return self._visible(self._catalog.names)

    def is_base(self, name: str) -> bool:
        """Whether `name` is one of the base model's, and the key may use it."""
        return self._key.may_use_base and self._catalog.is_base(name)

    def resolve(self, name: str) -> AdapterEntry:
        """Return the adapter, or raise `ModelNotFoundError`."""
        if self._catalog.is_base(name) or not self._key.sees(name):
            raise ModelNotFoundError(name, self.names)
        with self._hiding():
            return self._catalog.resolve(name)

    def hold(self, digests: Iterable[str]) -> AbstractContextManager[None]:
        """Keep versions from being freed."""
        return self._catalog.hold(digests)

    async def load(
        self,
        *,
        name: str,
        path: str,
        load_inplace: bool = False,
        pinned: bool = False,
        expected_digest: str | None = None,
        check: Callable[[str], Awaitable[None]] | None = None,
    ) -> AdapterCard:
        """Load an adapter under a name of the key's."""
        if not self._key.sees(name):
            raise NameNotAllowedError(
                f"the key {self._key.name!r} may not load an adapter named {name!r}",
                param="lora_name",
            )
        with self._hiding():
            return await self._catalog.load(
                name=name,
                path=path,
                load_inplace=load_inplace,
                pinned=pinned,
                expected_digest=expected_digest,
                check=check,
            )

    async def unload(self, name: str) -> None:
        """Forget the name at once, or raise `UnknownAdapterError`."""
        self._check(name)
        with self._hiding():
            await self._catalog.unload(name)

    async def pin(self, name: str) -> AdapterCard:
        """Keep the adapter in its slot, or raise `UnknownAdapterError`."""
        self._check(name)
        with self._hiding():
            return await self._catalog.pin(name)

    async def unpin(self, name: str) -> AdapterCard:
        """Let the adapter be evicted again, or raise `UnknownAdapterError`."""
        self._check(name)
        with self._hiding():
            return await self._catalog.unpin(name)

    async def cards(self) -> Sequence[AdapterCard]:
        """Return the cards of the adapters that exist for the key."""
        return [card for card in await self._catalog.cards() if self._key.sees(card.name)]

    async def card(self, name: str) -> AdapterCard:
        """Return one adapter's card, or raise `UnknownAdapterError`."""
        self._check(name)
        with self._hiding():
            return await self._catalog.card(name)

    def _check(self, name: str) -> None:
        if not self._key.sees(name):
            loaded = [n for n in self.names if not self._catalog.is_base(n)]
            raise AdapterNotLoadedError(name, loaded)

    def _visible(self, names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name for name in names if self.is_base(name) or self._sees_adapter(name))

    def _sees_adapter(self, name: str) -> bool:
        return not self._catalog.is_base(name) and self._key.sees(name)

    @contextmanager
    def _hiding(self) -> Iterator[None]:
        """Leave out of errors what the key may not know of."""
        try:
            yield
        except ModelNotFoundError as error:
            served = self._visible(error.served)
            raise ModelNotFoundError(error.name, served, param=error.param or "model") from None
        except AdapterNotLoadedError as error:
            raise AdapterNotLoadedError(error.name, self._visible(error.loaded)) from None
