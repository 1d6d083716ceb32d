"""Heads, labels and embeddings of a mixed batch equal PEFT's for each text and adapter alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.pooling import BASE_LABELS, FAMILIES, build_world, post_all, texts
from support.server import BASE_NAME, running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager
    from pathlib import Path

    from support.pooling import PoolingWorld
    from support.server import Server

LABELS = {"one": 1, "two": 2, "five": 5, "nine": 9, "plain": None}
TOLERANCE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-5}


def serve(world: PoolingWorld, folder: Path, *flags: str) -> AbstractContextManager[Server]:
    """Serve a world in float32."""
    arguments = ["serve", str(world.base), "--served-model-name", BASE_NAME, "--port", "0"]
    arguments += ["--dtype", "float32", "--num-threads", "1", *world.flags, *flags]
    return running(arguments, folder / "server.log")


def activated(logits: torch.Tensor) -> torch.Tensor:
    """Return probabilities as transformers' pipelines do."""
    return logits.sigmoid() if logits.shape[-1] == 1 else logits.softmax(dim=-1)


def assert_in_batches(server: Server) -> None:
    """The engine repeats a failed step text by text, which would hide mixed batches."""
    log = server.log.read_text()
    assert "running each alone" not in log, log


@pytest.mark.parametrize("family", FAMILIES)
def test_heads_of_unequal_width_in_one_batch_equal_peft(family: str, tmp_path: Path) -> None:
    world = build_world(FAMILIES[family], tmp_path, "classify", LABELS)
    plan = [(name, ids) for ids in texts(4) for name in (*LABELS, None)]

    with serve(world, tmp_path, "--max-lora-cls-labels", "9") as server:
        bodies = [{"model": name or BASE_NAME, "input": ids} for name, ids in plan]
        replies = post_all(server.url, [("/classify", body) for body in bodies])
        assert_in_batches(server)

    for (name, ids), reply in zip(plan, replies, strict=True):
        (found,) = reply["data"]
        expected = activated(world.output(name, ids))
        probs = torch.tensor(found["probs"], dtype=torch.float64)
        assert found["num_classes"] == (LABELS[name] if name else None) or BASE_LABELS
        assert len(probs) == len(expected)
        torch.testing.assert_close(probs, expected, **TOLERANCE)
        assert found["label"] == f"LABEL_{int(expected.argmax())}"
        assert reply["usage"]["prompt_tokens"] == len(ids)


@pytest.mark.parametrize("family", ["bert", "roberta", "distilbert", "modernbert", "llama"])
def test_token_classification_equals_peft_token_by_token(family: str, tmp_path: Path) -> None:
    labels = {"two": 2, "five": 5, "plain": None}
    world = build_world(FAMILIES[family], tmp_path, "token_classify", labels)
    plan = [(name, ids) for ids in texts(3, seed=1) for name in (*labels, None)]

    with serve(world, tmp_path, "--max-lora-cls-labels", "5") as server:
        bodies = [{"model": name or BASE_NAME, "input": ids} for name, ids in plan]
        replies = post_all(server.url, [("/pooling", body) for body in bodies])
        assert_in_batches(server)

    for (name, ids), reply in zip(plan, replies, strict=True):
        (found,) = reply["data"]
        probs = torch.tensor(found["data"], dtype=torch.float64)
        expected = activated(world.output(name, ids))
        assert probs.shape == expected.shape == (len(ids), len(found["labels"]))
        torch.testing.assert_close(probs, expected, **TOLERANCE)
        assert len(found["tokens"]) == len(ids)


@pytest.mark.parametrize("family", ["bert", "modernbert", "llama", "mpnet"])
def test_embeddings_of_adapters_equal_peft_and_differ_from_the_base(
    family: str, tmp_path: Path
) -> None:
    world = build_world(FAMILIES[family], tmp_path, "embed", {"a": None, "b": None})
    keys = safetensors_keys(world.adapters["a"])
    plan = [(name, ids) for ids in texts(4, seed=2) for name in ("a", "b", None)]

    with serve(world, tmp_path) as server:
        bodies = [{"model": name or BASE_NAME, "input": ids} for name, ids in plan]
        replies = post_all(server.url, [("/v1/embeddings", body) for body in bodies])
        assert_in_batches(server)

    assert all(key.startswith("base_model.model.") for key in keys)
    assert not any(key.startswith("base_model.model.model.") for key in keys)
    by_text: dict[tuple[int, ...], list[torch.Tensor]] = {}
    for (name, ids), reply in zip(plan, replies, strict=True):
        found = torch.tensor(reply["data"][0]["embedding"], dtype=torch.float64)
        hidden = world.output(name, ids)
        pooled = hidden[-1] if family == "llama" else hidden.mean(dim=0)
        torch.testing.assert_close(found, pooled / pooled.norm(), **TOLERANCE)
        by_text.setdefault(tuple(ids), []).append(found)
    for vectors in by_text.values():
        gram = torch.stack(vectors) @ torch.stack(vectors).T
        assert gram.fill_diagonal_(0).max() < 0.999


def safetensors_keys(folder: Path) -> list[str]:
    """Return the tensor names of an adapter."""
    from safetensors import safe_open

    with safe_open(folder / "adapter_model.safetensors", "pt") as file:
        return list(file.keys())


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> PoolingWorld:
    """Return a BERT with adapters of several widths."""
    return build_world(FAMILIES["bert"], tmp_path_factory.mktemp("bert"), "classify", LABELS)


def classify(server: Server, name: str, ids: list[int]) -> list[float]:
    """Return the probabilities of one text."""
    (reply,) = post_all(server.url, [("/classify", {"model": name, "input": ids})])
    probs: list[float] = reply["data"][0]["probs"]
    return probs


def test_a_head_is_removed_and_a_narrower_one_takes_its_only_slot(
    bert: PoolingWorld, tmp_path: Path
) -> None:
    (ids,) = texts(1, seed=3)
    flags = ("--max-lora-cls-labels", "9", "--max-loras", "1")

    with serve(bert, tmp_path, *flags, "--adapter-root", str(bert.base.parent)) as server:
        wide = classify(server, "nine", ids)
        server.http.post("/v1/unload_lora_adapter", json={"lora_name": "nine"}).raise_for_status()
        narrow = classify(server, "two", ids)
        again = {"lora_name": "nine", "lora_path": str(bert.adapters["nine"])}
        server.http.post("/v1/load_lora_adapter", json=again).raise_for_status()
        back = classify(server, "nine", ids)
        base = classify(server, BASE_NAME, ids)

    assert wide == back
    for name, probs in {"nine": wide, "two": narrow, None: base}.items():
        expected = activated(bert.output(name, ids))
        torch.testing.assert_close(torch.tensor(probs, dtype=torch.float64), expected, **TOLERANCE)


@pytest.fixture(scope="module")
def strict(bert: PoolingWorld, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve without adapters, with at most eight labels."""
    folder = tmp_path_factory.mktemp("strict")
    arguments = ["serve", str(bert.base), "--served-model-name", BASE_NAME, "--port", "0"]
    arguments += ["--task", "classify", "--max-lora-cls-labels", "8", "--num-threads", "1"]
    with running(
        [*arguments, "--adapter-root", str(bert.base.parent)], folder / "server.log"
    ) as server:
        yield server


def refused(server: Server, path: Path) -> dict[str, Any]:
    """Try to load an adapter and return the refusal."""
    reply = server.http.post(
        "/v1/load_lora_adapter", json={"lora_name": "x", "lora_path": str(path)}
    )
    assert reply.status_code == 400, reply.text
    error: dict[str, Any] = reply.json()["error"]
    assert error["code"] == "invalid_adapter"
    return error


def test_too_many_labels_are_refused_with_both_numbers(bert: PoolingWorld, strict: Server) -> None:
    error = refused(strict, bert.adapters["nine"])

    assert "classifier weight is [9, 32], expected [at most 8, 32]" in error["message"]


def test_a_head_with_nothing_in_the_file_or_under_an_unknown_name_is_refused(
    bert: PoolingWorld, strict: Server, tmp_path_factory: pytest.TempPathFactory
) -> None:
    from safetensors.torch import load_file, save_file

    changes: dict[str, Callable[[Any], Any]] = {
        "missing": lambda tensors: drop(tensors, "classifier"),
        "unknown": lambda tensors: tensors | {"base_model.model.extra.weight": torch.ones(2, 32)},
    }
    for name, change in changes.items():
        folder = bert.base.parent / name
        folder.mkdir()
        config = (bert.adapters["two"] / "adapter_config.json").read_text()
        (folder / "adapter_config.json").write_text(config)
        tensors = load_file(bert.adapters["two"] / "adapter_model.safetensors")
        save_file(change(tensors), folder / "adapter_model.safetensors")

    missing = refused(strict, bert.base.parent / "missing")
    unknown = refused(strict, bert.base.parent / "unknown")

    assert "classifier weight is listed in modules_to_save" in missing["message"]
    assert "base_model.model.extra.weight is a whole weight of extra" in unknown["message"]


def drop(tensors: dict[str, torch.Tensor], part: str) -> dict[str, torch.Tensor]:
    """Return the tensors without those of a module."""
    return {key: value for key, value in tensors.items() if f".{part}." not in key}


def test_a_head_for_tokens_has_no_place_on_a_server_for_texts(
    bert: PoolingWorld, strict: Server
) -> None:
    other = build_world(FAMILIES["bert"], bert.base.parent / "tokens", "token_classify", {"ner": 2})

    error = refused(strict, other.adapters["ner"])

    assert "classifier is the head of an adapter for task_type TOKEN_CLS" in error["message"]
    assert "expected SEQ_CLS" in error["message"]
