"""Object stores (``s3://``, ``gs://``) through fsspec. Knows no cache and no adapter."""

from __future__ import annotations

from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lora_weights.errors import SourceError
from lora_weights.fields import CONFIG_FILE
from lora_weights.sources.store import ChangedError, RemoteStream

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

_BLOCK_BYTES = 8 * 2**20
"""Bytes of one request: large enough that the wait for its answer does not count."""


class ObjectStore:
    """A prefix of a bucket."""

    def __init__(self, location: str, storage_options: Mapping[str, object]) -> None:
        """Build the file system; nothing is asked of it yet.

        Args:
            location: ``s3://bucket/prefix`` or ``gs://bucket/prefix``.
            storage_options: arguments of ``s3fs.S3FileSystem`` or ``gcsfs.GCSFileSystem``.

        Raises:
            SourceError: fsspec, or the package for this scheme, is not installed.
        """
        scheme, _, self._prefix = location.partition("://")
        try:
            # By name, as the extra may be absent and has no types where it is not.
            fsspec = import_module("fsspec")
            # A shared instance would keep credentials of others; listings grow old.
            own = {"skip_instance_cache": True, "use_listings_cache": False}
            self._files: Any = fsspec.filesystem(scheme, **{**own, **storage_options})
        except ImportError as error:
            reason = f"{scheme}:// needs the extra 'remote' (lora-weights[remote]): {error}"
            raise SourceError(source=location, reason=reason) from error

    def list_names(self) -> tuple[str, ...]:
        """Return the names below the prefix, and where adapters lie one level deeper."""
        start = len(self._prefix) + 1
        found = self._files.ls(self._prefix, detail=True, refresh=True)
        names = {item["name"][start:] for item in found if item["type"] == "file"}
        if CONFIG_FILE not in names:
            deeper = self._files.glob(f"{_literal(self._prefix)}/*/{CONFIG_FILE}")
            names |= {path[start:] for path in deeper}
        return tuple(sorted(names - {""}))

    @contextmanager
    def open(
        self,
        name: str,
        *,
        start: int = 0,
        version: str | None = None,
        length: int | None = None,
        known: str | None = None,
    ) -> Iterator[RemoteStream]:
        """Open an object; as `RemoteStore.open`."""
        del known  # content is transferred only when it is iterated
        path = f"{self._prefix}/{name}"
        info = self._files.info(path, refresh=True)
        found = _version(info)
        begin = start if version is not None and found == version else 0
        block = min(_BLOCK_BYTES, length or _BLOCK_BYTES)
        with self._files.open(path, "rb", block_size=block, cache_type="none") as stream:
            if _version(stream.details) != found:
                raise ChangedError(f"{name} was replaced while it was opened")
            stream.seek(begin)
            yield RemoteStream(
                size=info["size"],
                version=found,
                start=begin,
                chunks=self._chunks(stream, path, found, block),
            )

    def _chunks(self, stream: Any, path: str, version: str | None, block: int) -> Iterator[bytes]:
        """Yield the content, a request each; whether it was of one version shows at the end."""
        while chunk := stream.read(block):
            yield chunk
        if _version(self._files.info(path, refresh=True)) != version:
            raise ChangedError(f"{path.rpartition('/')[2]} was replaced while it was read")


def _version(info: Mapping[str, object]) -> str | None:
    """Return an object's generation (GCS) or ETag (S3)."""
    value = info.get("generation") or info.get("ETag") or info.get("etag")
    return None if value is None else str(value)


def _literal(prefix: str) -> str:
    """Return a prefix in which no character is a pattern."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in prefix)
