"""Which adapter answers: the body's `model`, the header `X-Use-LoRA`, or the body's `lora` set.

The right adapter or an error: a name that is not served is never answered by the base.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from urllib.parse import quote

from lora_server.engine.request import AdapterUse
from lora_server.errors import AdapterConflictError, InvalidRequestError, ModelNotFoundError
from lora_server.http.schemas.openai import WeightedAdapter
from lora_server.http.service import AdapterEntry, Catalog
from lora_server.metrics import BASE_LABEL, WEIGHTED_LABEL

HEADER: Final = "X-Use-LoRA"
_NO_ADAPTER: Final = "base"
"""Value of the header that asks for no adapter, and the reply's label for it."""

_DIGEST_CHARS: Final = 12
# Kept as they are in the reply's header; anything else could end the header line or split it.
_SAFE_CHARS: Final = " !#$&'()*+./:;=?@[]^_`{|}~-"


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What answers one request."""

    model: str
    """The name that was asked for; the reply's `model`."""
    label: str
    """`NAME@DIGEST12`, `base`, or the members of a weighted set with their scales."""
    metrics_label: str
    """Adapter name, `base` or `weighted_set`."""
    adapters: tuple[AdapterUse, ...] = ()


def select(
    catalog: Catalog,
    *,
    model: str | None,
    header_values: Sequence[str],
    weighted: Sequence[WeightedAdapter] | None,
    max_loras: int,
) -> Selection:
    """Decide what answers a request.

    Args:
        catalog: the names that are served.
        model: the body's `model`; None and "" name nothing.
        header_values: values of `X-Use-LoRA`, one for each time it was sent.
        weighted: the body's `lora`.
        max_loras: the most adapters that one request may combine.

    Raises:
        ModelNotFoundError: a name is not served.
        AdapterConflictError: two parts of the request ask for different things.
        InvalidRequestError: the weighted set is empty, too large, or names an adapter twice.
    """
    by_model = _resolve(catalog, model, "model") if model else None
    by_header = _header_choice(catalog, header_values)
    if weighted is not None:
        return _weighted(catalog, weighted, max_loras, model=model, by=(by_model, by_header))
    if by_model is not None and by_header is not None and not _agree(by_model, by_header):
        raise AdapterConflictError(
            f"model asks for {by_model.shown}, the header {HEADER} for {by_header.shown}",
            param="model",
        )
    choice = by_model or by_header or _resolve(catalog, catalog.base_names[0], "model")
    if choice.entry is None:
        asked = model or catalog.base_names[0]
        return Selection(model=asked, label=_NO_ADAPTER, metrics_label=BASE_LABEL)
    entry = choice.entry
    return Selection(
        model=entry.name,
        label=_label(entry),
        metrics_label=entry.name,
        adapters=(AdapterUse(digest=entry.digest),),
    )


@dataclass(frozen=True, slots=True)
class _Choice:
    """One part's answer; `entry` None is the base."""

    entry: AdapterEntry | None

    @property
    def shown(self) -> str:
        return "the base model" if self.entry is None else f"the adapter {self.entry.name!r}"


def _agree(one: _Choice, other: _Choice) -> bool:
    if one.entry is None or other.entry is None:
        return one.entry is other.entry
    return one.entry.name == other.entry.name


def _resolve(catalog: Catalog, name: str, param: str) -> _Choice:
    if catalog.is_base(name):
        return _Choice(None)
    return _Choice(_resolve_adapter(catalog, name, param))


def _resolve_adapter(catalog: Catalog, name: str, param: str) -> AdapterEntry:
    try:
        return catalog.resolve(name)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(error.name, error.served, param=param) from None


def _header_choice(catalog: Catalog, values: Sequence[str]) -> _Choice | None:
    """Read the header; an empty value decides nothing, as when it is absent."""
    names = list(dict.fromkeys(_decoded(value) for value in values if value))
    if len(names) > 1:
        raise AdapterConflictError(
            f"the header {HEADER} was sent with different values: {', '.join(names)}", param=HEADER
        )
    if not names:
        return None
    if names[0] == _NO_ADAPTER:
        if not catalog.is_base(catalog.base_names[0]):
            raise ModelNotFoundError(names[0], catalog.names, param=HEADER)
        return _Choice(None)
    return _resolve(catalog, names[0], HEADER)


def _decoded(value: str) -> str:
    """Read a header value as UTF-8, which ASGI hands over as Latin-1."""
    try:
        return value.encode("latin-1").decode("utf-8")
    except UnicodeError:
        return value


def _weighted(
    catalog: Catalog,
    weighted: Sequence[WeightedAdapter],
    max_loras: int,
    *,
    model: str | None,
    by: tuple[_Choice | None, _Choice | None],
) -> Selection:
    by_model, by_header = by
    if by_header is not None or (by_model is not None and by_model.entry is not None):
        raise AdapterConflictError(
            f"lora names a weighted set, and model or the header {HEADER} chooses as well",
            param="lora",
        )
    if not weighted:
        raise InvalidRequestError("lora: the set names no adapter", param="lora")
    names = [member.name for member in weighted]
    if len(names) > max_loras:
        raise InvalidRequestError(
            f"lora: {len(names)} adapters in one request, and the server has {max_loras} slots",
            param="lora",
        )
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise InvalidRequestError(f"lora: named twice: {', '.join(twice)}", param="lora")
    bases = [name for name in names if catalog.is_base(name)]
    if bases:
        raise InvalidRequestError(f"lora: {bases[0]!r} is the base model", param="lora")
    entries = [_resolve_adapter(catalog, name, "lora") for name in names]
    return _weighted_selection(entries, weighted, model or catalog.base_names[0])


def _weighted_selection(
    entries: Sequence[AdapterEntry], weighted: Sequence[WeightedAdapter], model: str
) -> Selection:
    scales: dict[str, float] = {}
    for entry, member in zip(entries, weighted, strict=True):
        # Two names may stand for the same content, which sits in one slot: the scales add up.
        scales[entry.digest] = scales.get(entry.digest, 0.0) + member.scale
    fixed = [entry.name for entry in entries if not entry.is_linear]
    if fixed and list(scales.values()) != [1.0]:
        raise InvalidRequestError(
            f"lora: {', '.join(map(repr, fixed))} can neither be scaled nor combined: a DoRA "
            "magnitude, an output gain or a whole module is there as it is or not at all",
            param="lora",
        )
    is_plain = len(entries) == 1 and weighted[0].scale == 1.0
    labels = [
        _label(entry) if is_plain else f"{_label(entry)}*{member.scale:g}"
        for entry, member in zip(entries, weighted, strict=True)
    ]
    return Selection(
        model=model,
        label=",".join(labels),
        metrics_label=entries[0].name if len(entries) == 1 else WEIGHTED_LABEL,
        adapters=tuple(AdapterUse(digest=digest, scale=scale) for digest, scale in scales.items()),
    )


def _label(entry: AdapterEntry) -> str:
    return f"{quote(entry.name, safe=_SAFE_CHARS)}@{entry.digest[:_DIGEST_CHARS]}"
