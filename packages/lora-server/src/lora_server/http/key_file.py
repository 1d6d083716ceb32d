"""The file of `--api-key-file`: keys with rights and limits of their own.

Checked as a whole at start, and read again when it changes; a new file with a mistake in it is
logged, and the keys stay those of the last good one.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lora_server.errors import StartupError
from lora_server.http.keys import ApiKey, digest_of
from lora_server.http.limits import Clock

logger = logging.getLogger(__name__)

_CHECK_EVERY_S: Final = 1.0
"""How often the file's time stamp is looked at, at most."""

_Secret = Annotated[str, Field(pattern=r"^[!-~]+$")]
_PerMinute = Annotated[int, Field(ge=1)]


class KeyEntry(BaseModel):
    """One key as the file has it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, hide_input_in_errors=True)

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,64}$")]
    """Shown in the audit log and in errors."""
    key: Annotated[_Secret | None, Field(repr=False)] = None
    """The key itself: printable ASCII without spaces."""
    key_sha256: Annotated[str, Field(pattern=r"^[0-9a-fA-F]{64}$")] | None = None
    """Or its SHA-256 in hexadecimal, so that the file holds no secret."""
    adapters: Literal["*"] | list[Annotated[str, Field(min_length=1)]]
    """Names and patterns of the adapters it may use; `*` is all."""
    may_use_base: bool = False
    """Whether it may use the base model alone."""
    is_admin: bool = False
    """Whether it opens management routes."""
    requests_per_minute: _PerMinute | None = None
    tokens_per_minute: _PerMinute | None = None

    @model_validator(mode="after")
    def check_key(self) -> Self:
        """Refuse an entry without a key, or with two."""
        if (self.key is None) == (self.key_sha256 is None):
            msg = "expected either key or key_sha256"
            raise ValueError(msg)
        return self

    def as_key(self) -> ApiKey:
        """Return the key without its secret."""
        secret = bytes.fromhex(self.key_sha256) if self.key_sha256 else digest_of(self.key or "")
        return ApiKey(
            name=self.name,
            digest=secret,
            adapters=("*",) if self.adapters == "*" else tuple(self.adapters),
            may_use_base=self.may_use_base,
            is_admin=self.is_admin,
            requests_per_minute=self.requests_per_minute,
            tokens_per_minute=self.tokens_per_minute,
        )


class KeyFile:
    """The keys of a file, kept up to date. Use from one thread."""

    def __init__(
        self, path: str, *, taken: Sequence[ApiKey] = (), clock: Clock = time.monotonic
    ) -> None:
        """Read the file.

        Args:
            path: YAML or JSON: a list of entries.
            taken: keys from elsewhere, whose names and values the file may not repeat.
            clock: tells the time, in seconds.

        Raises:
            StartupError: with every problem of the file.
        """
        self._path = Path(path)
        self._taken = tuple(taken)
        self._clock = clock
        self._stamp = _stamp(self._path)
        self._checked_at = clock()
        self._keys = read_keys(self._path, taken=self._taken)

    def current(self) -> tuple[ApiKey, ...]:
        """Return the keys of the file as it is, or as it last was without a mistake."""
        now = self._clock()
        if now - self._checked_at >= _CHECK_EVERY_S:
            self._checked_at = now
            if _stamp(self._path) != self._stamp:
                self.reload()
        return self._keys

    def reload(self) -> None:
        """Read the file again; one with a mistake changes nothing but the log."""
        # Taken before the file is read: what is written meanwhile is read the next time.
        self._stamp = _stamp(self._path)
        try:
            self._keys = read_keys(self._path, taken=self._taken)
        except StartupError as error:
            problems = "; ".join(error.problems)
            logger.error("The keys stay as they were: %s", problems)  # noqa: TRY400 - a caller's
            return
        logger.info("Read %d keys from %s", len(self._keys), self._path)


def read_keys(path: Path, *, taken: Collection[ApiKey] = ()) -> tuple[ApiKey, ...]:
    """Read and check a file of keys.

    Args:
        path: YAML or JSON.
        taken: keys from elsewhere.

    Raises:
        StartupError: with every problem; none shows a key.
    """
    where = f"--api-key-file {str(path)!r}"
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise StartupError([f"{where} cannot be read: {error.strerror}"]) from error
    except UnicodeDecodeError as error:
        raise StartupError([f"{where} is no UTF-8: byte {error.start}"]) from None
    except yaml.YAMLError as error:
        # The error's own text quotes the line, which may be a key.
        mark = getattr(error, "problem_mark", None)
        place = "" if mark is None else f" at line {mark.line + 1}, column {mark.column + 1}"
        raise StartupError([f"{where} is neither YAML nor JSON{place}"]) from None
    if not isinstance(content, list) or not content:
        found = "nothing" if content in (None, []) else f"a {type(content).__name__}"
        raise StartupError([f"{where} holds {found}, expected a list of keys"])
    entries, problems = _parse(content)
    keys = [entry.as_key() for entry in entries]
    problems += _repeated(keys, taken)
    if problems:
        raise StartupError([f"{where}: {problem}" for problem in problems])
    return tuple(keys)


def _parse(content: list[Any]) -> tuple[list[KeyEntry], list[str]]:
    """Return the entries without mistakes, and the mistakes of the others."""
    entries, problems = [], []
    for number, item in enumerate(content, 1):
        try:
            entries.append(KeyEntry.model_validate(item))
        except ValidationError as error:
            problems += [f"{_shown(number, item)}: {_problem(detail)}" for detail in error.errors()]
    return entries, problems


def _shown(number: int, item: object) -> str:
    name = item.get("name") if isinstance(item, dict) else None
    return f"entry {number} ({name!r})" if isinstance(name, str) else f"entry {number}"


def _problem(detail: Any) -> str:
    place = ".".join(str(part) for part in detail["loc"])
    text = detail["msg"].removeprefix("Value error, ")
    return f"{place}: {text}" if place else text


def _repeated(keys: Sequence[ApiKey], taken: Collection[ApiKey]) -> list[str]:
    """Say which names and which keys stand for two: their rights would be anybody's guess."""
    names = Counter(key.name for key in (*keys, *taken))
    problems = [f"the name {name!r} occurs twice" for name, count in names.items() if count > 1]
    by_digest: dict[bytes, list[str]] = {}
    for key in (*keys, *taken):
        by_digest.setdefault(key.digest, []).append(key.name)
    return problems + [
        f"{' and '.join(map(repr, owners))} have the same key"
        for owners in by_digest.values()
        if len(owners) > 1
    ]


def _stamp(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when the file does; links are followed, as mounted secrets have them."""
    try:
        state = path.stat()
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino
