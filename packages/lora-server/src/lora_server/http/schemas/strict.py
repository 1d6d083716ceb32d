"""The base of all request bodies: exact types, and no field that would be ignored silently."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

from pydantic import BaseModel, ConfigDict, model_validator


class StrictBody(BaseModel):
    """A request body whose unknown fields are refused by name, unless they ask for nothing.

    A field asks for nothing when it is null, or when its value is in `harmless`.
    """

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    harmless: ClassVar[Mapping[str, tuple[Any, ...]]] = MappingProxyType({})
    """Unsupported fields with the values that mean the default."""

    @model_validator(mode="before")
    @classmethod
    def drop_fields_that_ask_for_nothing(cls, data: Any) -> Any:
        """Remove nulls and defaults of unsupported fields; what is left of them is refused."""
        if not isinstance(data, dict):
            return data
        return {name: value for name, value in data.items() if not cls._asks_nothing(name, value)}

    @classmethod
    def _asks_nothing(cls, name: str, value: Any) -> bool:
        if name in cls.model_fields:
            return False
        # Types are compared as well: False and 0 are equal in Python.
        return value is None or any(
            type(value) is type(default) and value == default
            for default in cls.harmless.get(name, ())
        )
