"""The options in force and who set each of them, as a table on stderr."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lora_server.cli.arguments import default_text
from lora_server.config import LoraModule, ServerConfig
from lora_server.option_fields import flag_of, option_of

if TYPE_CHECKING:
    from lora_server.option_fields import Option
    from lora_server.options import ResolvedConfig


def print_table(resolved: ResolvedConfig, console: Console | None = None) -> None:
    """Print every option of this version with its value and its origin; secrets are hidden."""
    table = Table("option", "value", "set by", box=box.SIMPLE_HEAD, pad_edge=False)
    for config_field in dataclasses.fields(ServerConfig):
        option = option_of(config_field)
        if option.is_later:
            continue
        value = getattr(resolved.config, config_field.name)
        origin = resolved.origins[config_field.name]
        # as Text, since markup would swallow names in square brackets
        cells = (flag_of(config_field.name), value_text(option, value), origin)
        table.add_row(*(Text(cell) for cell in cells))
    (console if console is not None else Console(stderr=True)).print(table)


def value_text(option: Option, value: object) -> str:
    """Return a value for people: secrets hidden, absent ones explained, sizes with their unit."""
    if value in (None, ()):
        return option.unset or "none"
    if option.is_secret:
        return "(set, not shown)"
    if isinstance(value, tuple):
        return " ".join(_item_text(item) for item in value)
    return default_text(value) + (f" {option.unit}" if option.unit else "")


def _item_text(item: object) -> str:
    return f"{item.name}={item.path}" if isinstance(item, LoraModule) else str(item)
