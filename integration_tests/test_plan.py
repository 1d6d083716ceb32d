"""Planned and measured memory agree: weights, slots and KV cache each, for every kind of model.

The plan has seen no number of the model; the measurement goes by the storages of a running server's
tensors. Neither is the other's oracle alone: sizes of weights are also compared with the files.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
from parity.moe import MOE_BASES, make_all
from safetensors import safe_open
from support.checkpoints import build_tokenizer
from support.pooling import FAMILIES, build_world
from support.requests import complete
from support.server import BASE_NAME, running
from support.wide import save_wide_adapter, save_wide_model

from lora_server.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from support.fixture_types import MakeWorld

TOLERANCE = 0.03
SERVE = ("--port", "0", "--num-threads", "1", "--served-model-name", BASE_NAME)
SAME = ("--dtype", "float32", "--max-loras", "4", "--max-lora-rank", "16")
KV = ("--kv-cache-memory", "4MiB", "--max-num-seqs", "8")


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Plan:
    """Return a function that plans a command line."""
    return Plan(capsys)


class Plan:
    """Runs the command in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys

    def __call__(self, *arguments: str) -> dict[str, Any]:
        status = main(["plan", *arguments, "--json"])
        out, err = self._capsys.readouterr()
        assert status == 0, err
        ledger: dict[str, Any] = json.loads(out)
        return ledger


def measure(
    base: Path, log: Path, flags: Sequence[str], *, asks: Sequence[str] = ()
) -> dict[str, Any]:
    """Serve, use the named adapters once, and return what the server measures."""
    with running(["serve", str(base), *SERVE, *flags], log) as server:
        for name in asks:
            complete(server.http, name, max_tokens=2)
        ledger: dict[str, Any] = server.http.get("/v1/memory").raise_for_status().json()
    return ledger


def compare(planned: dict[str, Any], measured: dict[str, Any]) -> None:
    """Check every part that both know."""
    assert planned.keys() - {"problems", "traffic"} == measured.keys()
    assert (planned["kind"], measured["kind"]) == ("planned", "measured")
    assert planned["weights"]["size_bytes"] == pytest.approx(
        measured["weights"]["size_bytes"], rel=TOLERANCE
    )
    assert planned["weights"]["tied_bytes"] == measured["weights"]["tied_bytes"]
    assert planned["weights"]["prepacked_bytes"] == measured["weights"]["prepacked_bytes"]
    assert planned["kv_cache"] == measured["kv_cache"]
    assert planned["slots"]["total"]["size_bytes"] == pytest.approx(
        measured["slots"]["total"]["size_bytes"], rel=TOLERANCE
    )
    for kind, part in measured["slots"]["by_kind"].items():
        assert planned["slots"]["by_kind"][kind]["size_bytes"] == pytest.approx(
            part["size_bytes"], rel=TOLERANCE
        )
    assert planned["slots"]["by_kind"].keys() == measured["slots"]["by_kind"].keys()
    assert planned["host_tier"]["size_bytes"] == pytest.approx(
        measured["host_tier"]["size_bytes"], rel=TOLERANCE
    )
    assert planned["host_tier"]["num_adapters"] == measured["host_tier"]["num_adapters"]
    for mine, theirs in zip(planned["adapters"], measured["adapters"], strict=True):
        assert (mine["name"], mine["rank"]) == (theirs["name"], theirs["rank"])
        assert mine["size_bytes"] == pytest.approx(theirs["size_bytes"], rel=TOLERANCE)
    assert planned["workspace"] == measured["workspace"]


def stored_bytes(folder: Path) -> int:
    """Return the bytes of the numbers in a checkpoint."""
    total = 0
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as stored:
            total += sum(stored.get_tensor(key).nbytes for key in stored.keys())  # noqa: SIM118
    return total


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_a_decoder_takes_what_was_planned(
    make_world: MakeWorld, family: str, plan: Plan, tmp_path: Path
) -> None:
    world = make_world(family)
    names = tuple(world.adapters)[:3]
    flags = [*SAME, *KV, "--max-lora-rank", "32", *world.lora_modules(*names)]

    planned = plan(str(world.base), *flags)
    measured = measure(world.base, tmp_path / "log", flags, asks=names)

    compare(planned, measured)
    assert measured["weights"]["size_bytes"] == pytest.approx(stored_bytes(world.base), rel=0.01)
    assert (measured["weights"]["tied_bytes"] > 0) == (family == "llama-tied")
    slots = measured["slots"]
    assert planned["slots"]["total"]["used_bytes"] == slots["total"]["used_bytes"] > 0
    assert slots["by_kind"].keys() >= {"attention", "mlp", "embeddings", "lm_head"}
    process = measured["process"]
    assert process["rss_bytes"] == process["resident_bytes"] + process["unaccounted_bytes"]


@pytest.mark.parametrize("name", ["Mixtral", "gpt-oss"])
def test_experts_take_what_was_planned(name: str, plan: Plan, tmp_path: Path) -> None:
    base = MOE_BASES[name]
    adapters = make_all(base, tmp_path / "adapters")
    base.build().save_pretrained(tmp_path / "base")  # type: ignore[operator]
    build_tokenizer().save_pretrained(tmp_path / "base")
    modules = [f"{name}={made.folder}" for name, made in adapters.items()]
    flags = [*SAME, *KV, "--lora-modules", *modules]

    planned = plan(str(tmp_path / "base"), *flags)
    measured = measure(tmp_path / "base", tmp_path / "log", flags, asks=list(adapters)[:4])

    compare(planned, measured)
    experts = measured["slots"]["by_kind"]["experts"]
    assert 0 < experts["used_bytes"] < experts["size_bytes"]


def test_an_encoder_with_heads_takes_what_was_planned(plan: Plan, tmp_path: Path) -> None:
    world = build_world(
        FAMILIES["bert"], tmp_path, "classify", {"two": 2, "three": 3, "none": None}
    )
    flags = [*SAME, *world.flags]

    planned = plan(str(world.base), *flags)
    measured = measure(world.base, tmp_path / "log", flags)

    compare(planned, measured)
    assert measured["kv_cache"] is None
    assert measured["slots"]["by_kind"].keys() >= {"attention", "mlp", "embeddings", "heads"}


def test_a_process_of_half_a_gigabyte_is_explained_by_its_ledger(
    plan: Plan, tmp_path: Path
) -> None:
    save_wide_model(tmp_path / "base")
    save_wide_adapter(tmp_path / "a", rank=16, seed=1)
    flags = [
        *("--dtype", "float32", "--max-loras", "2", "--max-lora-rank", "16"),
        *("--kv-cache-memory", "256MiB", "--lora-modules", f"a={tmp_path / 'a'}"),
    ]

    planned = plan(str(tmp_path / "base"), *flags)
    measured = measure(tmp_path / "base", tmp_path / "log", flags, asks=["a"])

    compare(planned, measured)
    process = measured["process"]
    # Untouched pages of the KV cache take nothing; all else that was planned is there.
    kv = planned["kv_cache"]["size_bytes"]
    tensors = planned["weights"]["size_bytes"] + planned["slots"]["total"]["size_bytes"]
    assert tensors * 0.95 < process["resident_bytes"] < (tensors + kv) * 1.1
    # What the interpreter and its libraries take was planned from what planning took itself.
    assert process["rss_bytes"] < planned["total_bytes"] * 1.1
    assert process["rss_bytes"] > (planned["total_bytes"] - kv) * 0.7
