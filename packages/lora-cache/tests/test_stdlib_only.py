"""The package needs the standard library and nothing else."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import lora_cache

if TYPE_CHECKING:
    from collections.abc import Iterator

SOURCE = Path(lora_cache.__file__).parent
FILES = sorted(SOURCE.rglob("*.py"))


def imported_names(path: Path) -> Iterator[str]:
    """Yield the top-level name of every import in the file, wherever it stands."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield (node.module or "").partition(".")[0]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_import_is_of_the_standard_library_or_of_the_package(path: Path) -> None:
    names = set(imported_names(path))

    assert "__future__" in names
    assert names - sys.stdlib_module_names <= {"lora_cache"}


def test_it_is_imported_without_any_installed_package() -> None:
    code = (
        f"import sys; sys.path.insert(0, {str(SOURCE.parent)!r}); "
        "import lora_cache, lora_cache.testing; print(lora_cache.__file__)"
    )

    done = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == lora_cache.__file__
