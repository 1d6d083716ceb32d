"""Broken folders, requests that cannot be answered, and starts that must not happen.

Every mistake is named by what was found, and the adapters that are served go on answering.
"""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.adapters import CONFIG, WEIGHTS
from support.requests import body, complete, expected, load, refusal, served, streamed
from support.server import fail_to_start

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import httpx
    from support.worlds import World


def truncate(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) // 2])


def drop_weights(folder: Path) -> None:
    (folder / WEIGHTS).unlink()


def empty(folder: Path) -> None:
    for path in folder.iterdir():
        path.unlink()


def drop_config(folder: Path) -> None:
    (folder / CONFIG).unlink()


def cut_config(folder: Path) -> None:
    text = (folder / CONFIG).read_text()
    (folder / CONFIG).write_text(text[: len(text) // 2])


def change_config(**fields: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        config = json.loads((folder / CONFIG).read_text())
        (folder / CONFIG).write_text(json.dumps(config | fields))

    return change


def change_tensors(change: Callable[[dict[str, torch.Tensor]], None]) -> Callable[[Path], None]:
    def apply(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        change(tensors)
        save_file({key: value.contiguous() for key, value in tensors.items()}, folder / WEIGHTS)

    return apply


Q_PROJ = "base_model.model.model.layers.0.self_attn.q_proj"
V_PROJ = "base_model.model.model.layers.1.self_attn.v_proj"


def widen_two(tensors: dict[str, torch.Tensor]) -> None:
    for module in (Q_PROJ, V_PROJ):
        tensors[f"{module}.lora_B.weight"] = torch.ones(999, 16)


def poison(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q_PROJ}.lora_A.weight"][0, 0] = float("nan")


def orphan(tensors: dict[str, torch.Tensor]) -> None:
    del tensors[f"{Q_PROJ}.lora_B.weight"]


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors[f"{Q_PROJ.replace('q_proj', 'qq_proj')}.lora_A.weight"] = torch.ones(16, 64)
    tensors[f"{Q_PROJ.replace('q_proj', 'qq_proj')}.lora_B.weight"] = torch.ones(64, 16)


def silence(tensors: dict[str, torch.Tensor]) -> None:
    for key, tensor in tensors.items():
        if "lora_B" in key:
            tensor.zero_()


def raise_ranks(tensors: dict[str, torch.Tensor]) -> None:
    for key, tensor in tensors.items():
        tensors[key] = torch.cat([tensor] * 4, dim=0 if "lora_A" in key else 1)


def make_rank_64(folder: Path) -> None:
    change_config(r=64)(folder)
    change_tensors(raise_ranks)(folder)


# What is done to a copy of a09, and what the refusal must say.
BROKEN: dict[str, tuple[Callable[[Path], None], int, str, tuple[str, ...]]] = {
    "missing": (shutil.rmtree, 404, "adapter_not_found", ("broken",)),
    "empty": (empty, 404, "adapter_not_found", (CONFIG,)),
    "no weights": (drop_weights, 400, "invalid_adapter", (WEIGHTS,)),
    "no config": (drop_config, 404, "adapter_not_found", (CONFIG,)),
    "half-written weights": (truncate, 400, "invalid_adapter", (WEIGHTS,)),
    "half-written config": (cut_config, 400, "invalid_adapter", (CONFIG,)),
    "not LoRA": (
        change_config(peft_type="PREFIX_TUNING"),
        400,
        "invalid_adapter",
        ("PREFIX_TUNING",),
    ),
    "rank too large": (make_rank_64, 400, "invalid_adapter", ("64", "32")),
    "wrong shapes": (
        change_tensors(widen_two),
        400,
        "invalid_adapter",
        ("layers.0.self_attn.q_proj", "layers.1.self_attn.v_proj", "999", "64", "32"),
    ),
    "not a number": (
        change_tensors(poison),
        400,
        "invalid_adapter",
        ("layers.0.self_attn.q_proj",),
    ),
    "half a pair": (change_tensors(orphan), 400, "invalid_adapter", ("layers.0.self_attn.q_proj",)),
    "unknown module": (change_tensors(rename), 400, "invalid_adapter", ("qq_proj",)),
    "no effect": (change_tensors(silence), 400, "invalid_adapter", ()),
    "rank of the config": (change_config(r=8), 400, "invalid_adapter", ("16", "8")),
}


@pytest.mark.parametrize("damage", BROKEN)
def test_a_broken_folder_is_refused_with_what_was_found_and_costs_nothing(
    damage: str, llama: World, managed: httpx.Client
) -> None:
    break_, status, code, words = BROKEN[damage]
    folder = llama.folder / "broken"
    shutil.copytree(llama.adapters["a09"], folder)
    break_(folder)

    reply = load(managed, "broken", folder)

    shutil.rmtree(folder, ignore_errors=True)
    error = refusal(reply, status, code)
    said = " ".join([error["message"], *error.get("details", ())])
    assert [word for word in words if word not in said] == [], said
    assert "broken" not in served(managed)
    assert complete(managed, "a01") == expected(llama, "a01")


def test_all_problems_are_told_at_once(llama: World, managed: httpx.Client) -> None:
    folder = llama.folder / "many-problems"
    shutil.copytree(llama.adapters["a09"], folder)
    change_tensors(widen_two)(folder)

    error = refusal(load(managed, "many", folder), 400, "invalid_adapter")

    shutil.rmtree(folder)
    assert len(error["details"]) >= 2


@pytest.mark.parametrize("path", ["/etc", "../..", "a00/../../..", "link-out"])
def test_paths_outside_the_roots_are_refused_also_through_links(
    path: str, llama: World, managed: httpx.Client, tmp_path: Path
) -> None:
    link = llama.folder / "link-out"
    link.symlink_to(tmp_path)

    reply = load(managed, "outside", path)

    link.unlink()
    refusal(reply, 403, "path_not_allowed")


def test_fifty_refused_loads_disturb_no_running_request(
    llama: World, managed: httpx.Client
) -> None:
    num_tokens = 160
    fields = {"stream": True, "max_tokens": num_tokens}

    with managed.stream("POST", "/v1/completions", json=body("a00", **fields)) as stream:
        chunks = streamed(stream)
        token_ids = next(chunks)
        replies = [load(managed, "none", llama.folder / "nothing") for _ in range(50)]
        for chunk in chunks:
            token_ids += chunk

    assert {reply.status_code for reply in replies} == {404}
    assert tuple(token_ids) == expected(llama, "a00", num_tokens)


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(
    managed: httpx.Client,
) -> None:
    reply = managed.post("/v1/completions", json=body(prompt=[5] * 300))

    error = refusal(reply, 400, "context_length_exceeded")
    assert "300" in error["message"]
    assert "256" in error["message"]


@pytest.mark.parametrize(
    "content", ['{"model": "tiny", "prompt": ', "[1, 2]", "", '"text"', "\xff\xfe"]
)
@pytest.mark.parametrize(
    "route", ["/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter"]
)
def test_malformed_json_is_400(route: str, content: str, managed: httpx.Client) -> None:
    headers = {"Content-Type": "application/json"}

    reply = managed.post(route, content=content.encode("latin-1"), headers=headers)

    refusal(reply, 400, "invalid_request")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": [9999]}, "prompt"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": "many"}, "max_tokens"),
        ({"temperature": -0.1}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"logit_bias": {"9999": 1}}, "logit_bias"),
        ({"lora": [{"name": "nobody", "scale": 1}]}, "lora"),
        ({"tempersture": 1}, "tempersture"),
    ],
    ids=str,
)
def test_values_that_cannot_be_honoured_are_refused_by_name(
    fields: dict[str, Any], param: str, managed: httpx.Client
) -> None:
    reply = managed.post("/v1/completions", json=body(**fields))

    assert reply.status_code in {400, 404}, reply.text
    assert reply.json()["error"]["param"].startswith(param)


def test_every_folder_that_cannot_be_served_stops_the_start_and_is_named(
    llama: World, tmp_path: Path
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    half = tmp_path / "half"
    shutil.copytree(llama.adapters["a09"], half)
    truncate(half)
    modules = [f"gone={tmp_path / 'gone'}", f"bare={empty}", f"torn={half}"]

    status, text = fail_to_start(
        ["serve", str(llama.base), "--port", "0", "--lora-modules", *modules],
        tmp_path / "start.log",
    )

    assert status == 1
    assert [name for name in ("'gone'", "'bare'", "'torn'") if name not in text] == [], text


def test_a_missing_model_stops_the_start(tmp_path: Path) -> None:
    status, text = fail_to_start(
        ["serve", str(tmp_path / "nothing"), "--port", "0"], tmp_path / "start.log"
    )

    assert status == 1
    assert "nothing" in text
    assert "Traceback" not in text
