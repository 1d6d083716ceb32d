"""Weight files as broken runs and hostile hands leave them, loaded over HTTP.

The cases carry the numbers of `docs/explanation/cases.md`.
"""

from __future__ import annotations

import json
import pickle
import shutil
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import WEIGHTS
from support.requests import complete, expected, load, refusal, served, unload
from support.server import BASE_NAME

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.fixture_types import StartServer
    from support.server import Server
    from support.worlds import World

NAME = "a03"
PICKLE = "adapter_model.bin"
MAX_GROWTH_BYTES = 256 * 2**20
"""Far below what the headers below claim, far above what reading them takes."""


@pytest.fixture(scope="module")
def server(
    llama: World, start_server: StartServer, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Server]:
    root = tmp_path_factory.getbasetemp()
    flags = ["--adapter-root", str(root), "--max-loras", "4", "--max-lora-rank", "32"]
    flags += ["--served-model-name", "second"]
    with start_server(llama, *llama.lora_modules("a00"), *flags) as running:
        yield running


@pytest.fixture
def folder(llama: World, tmp_path: Path) -> Path:
    return Path(shutil.copytree(llama.adapters[NAME], tmp_path / "adapter"))


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = load_file(folder / WEIGHTS)
    return found


def changed(change: Callable[[str, torch.Tensor], torch.Tensor]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = tensors_of(folder)
        save_file({key: change(key, value) for key, value in tensors.items()}, folder / WEIGHTS)

    return apply


def without_tensors(folder: Path) -> None:
    save_file({}, folder / WEIGHTS)


def truncated(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) * 2 // 3])


def header_of_an_exabyte(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(struct.pack("<Q", 2**60) + content[8:])


def with_header(change: Callable[[dict[str, Any]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        content = (folder / WEIGHTS).read_bytes()
        (length,) = struct.unpack("<Q", content[:8])
        header = json.loads(content[8 : 8 + length])
        change(header)
        written = json.dumps(header).encode()
        head = struct.pack("<Q", len(written)) + written
        (folder / WEIGHTS).write_bytes(head + content[8 + length :])

    return apply


def overlap(header: dict[str, Any]) -> None:
    first, second = [key for key in header if key.endswith("lora_A.weight")][:2]
    header[second]["data_offsets"] = header[first]["data_offsets"]


def claim_terabytes(header: dict[str, Any]) -> None:
    first = next(key for key in header if key.endswith("lora_A.weight"))
    header[first]["shape"] = [2**20, 2**20]
    header[first]["data_offsets"] = [0, 2**42]


def is_b(key: str) -> bool:
    return key.endswith("lora_B.weight")


BROKEN: dict[str, Callable[[Path], None]] = {
    "no tensors": without_tensors,
    "all empty": changed(lambda _, value: value.new_zeros(0)),
    "every B empty": changed(lambda key, value: value.new_zeros(0) if is_b(key) else value),
    "every B zero": changed(lambda key, value: value * (not is_b(key))),
    "truncated": truncated,
    "header of an exabyte": header_of_an_exabyte,
    "tensor of terabytes": with_header(claim_terabytes),
    "overlapping": with_header(overlap),
    "NaN": changed(lambda key, value: value * float("nan") if is_b(key) else value),
    "Inf": changed(lambda key, value: value / 0 if is_b(key) else value),
}


def resident_bytes(server: Server) -> int:
    return int(Path(f"/proc/{server.process.pid}/statm").read_text().split()[1]) * 4096


@pytest.mark.parametrize("kind", BROKEN)
def test_c48_a_file_that_holds_no_adapter_is_refused(
    kind: str, folder: Path, server: Server, llama: World
) -> None:
    BROKEN[kind](folder)
    before = resident_bytes(server)

    error = refusal(load(server.http, "broken", folder), 400, "invalid_adapter")

    assert error["details"]
    assert str(folder) in error["message"]
    assert "broken" not in served(server.http)
    assert resident_bytes(server) - before < MAX_GROWTH_BYTES
    assert complete(server.http, "a00") == expected(llama, "a00")


def test_c48_one_module_of_zeros_among_others_is_loaded(folder: Path, server: Server) -> None:
    first = next(key for key in tensors_of(folder) if is_b(key))
    changed(lambda key, value: value * (key != first))(folder)

    load(server.http, "part", folder).raise_for_status()

    assert complete(server.http, "part") != complete(server.http)
    unload(server.http, "part").raise_for_status()


class Marker:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


@pytest.mark.parametrize("is_hostile", [False, True], ids=["tensors only", "hostile"])
def test_c49_a_pickle_is_never_read_over_http(
    folder: Path, server: Server, tmp_path: Path, is_hostile: bool
) -> None:
    marker = tmp_path / "marker"
    if is_hostile:
        (folder / PICKLE).write_bytes(pickle.dumps(Marker(marker)))
    else:
        torch.save(tensors_of(folder), folder / PICKLE)
    (folder / WEIGHTS).unlink()

    error = refusal(load(server.http, "pickled", folder), 400, "invalid_adapter")

    assert PICKLE in error["message"]
    assert not marker.exists()
    assert "pickled" not in served(server.http)


def test_c49_safetensors_go_before_a_pickle_beside_them(
    folder: Path, server: Server, llama: World, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    (folder / PICKLE).write_bytes(pickle.dumps(Marker(marker)))

    load(server.http, "both", folder).raise_for_status()

    assert complete(server.http, "both") == expected(llama, NAME)
    assert not marker.exists()
    unload(server.http, "both").raise_for_status()


def test_c52_ids_are_unique_and_follow_every_change(
    folder: Path, server: Server, llama: World
) -> None:
    def cards() -> list[tuple[str, str | None, str]]:
        found = server.http.get("/v1/models").raise_for_status().json()["data"]
        return [(card["id"], card["parent"], card["root"]) for card in found]

    first = [
        (BASE_NAME, None, str(llama.base)),
        ("second", None, str(llama.base)),
        ("a00", BASE_NAME, str(llama.adapters["a00"])),
    ]
    assert cards() == first

    load(server.http, "new", folder).raise_for_status()
    assert cards() == [*first, ("new", BASE_NAME, str(folder))]

    replacing = str(llama.adapters["a09"])
    load(server.http, "new", replacing, load_inplace=True).raise_for_status()
    assert cards() == [*first, ("new", BASE_NAME, replacing)]

    truncated(folder)
    refusal(load(server.http, "new", folder, load_inplace=True), 400, "invalid_adapter")
    refusal(load(server.http, "second", replacing), 400, "invalid_request")
    assert cards() == [*first, ("new", BASE_NAME, replacing)]
    assert complete(server.http, "new") == expected(llama, "a09")

    unload(server.http, "new").raise_for_status()
    assert cards() == first


def test_a_link_to_a_file_outside_the_roots_is_refused_over_http(
    server: Server, folder: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    outside = Path("/usr/share/secret.safetensors")
    (folder / WEIGHTS).unlink()
    (folder / WEIGHTS).symlink_to(outside)

    for path in (folder, f"{folder}/../adapter", "/usr/share", f"{folder}/../../../../../usr"):
        error = refusal(load(server.http, "linked", path), 403, "path_not_allowed")
        assert str(outside) not in error["message"]
