"""Adapters come, change and go while the server runs; mistakes are named and cost nothing."""

from __future__ import annotations

import json
import shutil
from typing import TYPE_CHECKING, Any

import httpx
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.requests import NUM_TOKENS, PROMPT, body, complete, refusal
from support.server import BASE_NAME, fail_to_start

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from support.fixture_types import StartServer
    from support.server import Server
    from support.worlds import World

WEIGHTS = "adapter_model.safetensors"
CONFIG = "adapter_config.json"


@pytest.fixture(scope="module")
def server(llama: World, start_server: StartServer) -> Iterator[Server]:
    flags = ["--adapter-root", str(llama.folder), "--max-loras", "4", "--max-lora-rank", "32"]
    with start_server(llama, *llama.lora_modules("a00", "a01"), *flags) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=60) as http:
        yield http


@pytest.fixture
def live(llama: World, client: httpx.Client) -> Iterator[Path]:
    """A folder that holds a copy of a03 and is served as `live`."""
    folder = llama.folder / "live"
    shutil.copytree(llama.adapters["a03"], folder)
    load(client, "live", folder).raise_for_status()
    yield folder
    client.post("/v1/unload_lora_adapter", json={"lora_name": "live"})
    shutil.rmtree(folder)


def load(client: httpx.Client, name: str, path: Path | str, **fields: Any) -> httpx.Response:
    body = {"lora_name": name, "lora_path": str(path), **fields}
    return client.post("/v1/load_lora_adapter", json=body)


def unload(client: httpx.Client, name: str) -> httpx.Response:
    return client.post("/v1/unload_lora_adapter", json={"lora_name": name})


def served(client: httpx.Client) -> list[str]:
    return [card["id"] for card in client.get("/v1/models").raise_for_status().json()["data"]]


def expected(world: World, adapter: str | None, num_tokens: int = NUM_TOKENS) -> tuple[int, ...]:
    return world.oracle.greedy(adapter, PROMPT, num_tokens).token_ids


def replace_content(folder: Path, source: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        shutil.copyfile(source / name, folder / name)


def test_a_loaded_adapter_answers_as_under_peft_and_shows_its_card(
    llama: World, client: httpx.Client
) -> None:
    reply = load(client, "sql", llama.adapters["a07"])

    card = reply.raise_for_status().json()
    assert card["id"] == "sql"
    assert card["root"] == str(llama.adapters["a07"])
    assert card["parent"] == BASE_NAME
    assert card["lora"]["rank"] == 12
    assert len(card["lora"]["digest"]) == 64
    assert card["lora"]["residency"] in {"device", "host"}
    assert card["lora"]["pinned"] is False
    assert complete(client, "sql") == expected(llama, "a07")
    assert served(client) == [BASE_NAME, "a00", "a01", "sql"]
    unload(client, "sql").raise_for_status()


def test_an_unloaded_adapter_is_gone_at_once_and_comes_back_the_same(
    llama: World, client: httpx.Client
) -> None:
    first = load(client, "again", llama.adapters["a09"]).raise_for_status().json()
    answer = complete(client, "again")

    unload(client, "again").raise_for_status()

    refusal(client.post("/v1/completions", json=body("again")), 404, "model_not_found")
    refusal(unload(client, "again"), 404, "adapter_not_found")
    assert "again" not in served(client)
    second = load(client, "again", llama.adapters["a09"]).raise_for_status().json()
    assert second["lora"]["digest"] == first["lora"]["digest"]
    assert complete(client, "again") == answer == expected(llama, "a09")
    unload(client, "again").raise_for_status()


def test_a_name_that_is_taken_needs_load_inplace(
    llama: World, client: httpx.Client, live: Path
) -> None:
    replace_content(live, llama.adapters["a09"])

    error = refusal(load(client, "live", live), 400, "adapter_already_loaded")

    assert "live" in error["message"]
    assert complete(client, "live") == expected(llama, "a03")


def test_the_base_name_cannot_be_taken(llama: World, client: httpx.Client) -> None:
    reply = load(client, BASE_NAME, llama.adapters["a09"], load_inplace=True)

    assert reply.status_code == 400, reply.text
    assert complete(client) == expected(llama, None)


def test_new_content_under_the_same_path_and_name_answers_from_the_next_request_on(
    llama: World, client: httpx.Client, live: Path
) -> None:
    before = complete(client, "live")
    old = client.get("/v1/adapters/live").json()["lora"]["digest"]
    replace_content(live, llama.adapters["a09"])

    new = load(client, "live", live, load_inplace=True).raise_for_status().json()

    assert before == expected(llama, "a03")
    assert new["lora"]["digest"] != old
    assert complete(client, "live") == expected(llama, "a09")


def test_a_running_stream_ends_on_the_version_it_began_with(
    llama: World, client: httpx.Client, live: Path
) -> None:
    num_tokens = 160
    fields = {"stream": True, "max_tokens": num_tokens}

    with client.stream("POST", "/v1/completions", json=body("live", **fields)) as stream:
        chunks = (json.loads(line[6:]) for line in stream.iter_lines() if line[:7] == "data: {")
        token_ids = list(next(chunks)["choices"][0]["token_ids"])
        replace_content(live, llama.adapters["a09"])
        load(client, "live", live, load_inplace=True).raise_for_status()
        meanwhile = complete(client, "live")
        for chunk in chunks:
            token_ids += chunk["choices"][0]["token_ids"]

    assert meanwhile == expected(llama, "a09")
    assert tuple(token_ids) == expected(llama, "a03", num_tokens)


def test_a_running_stream_survives_the_unloading_of_its_adapter(
    llama: World, client: httpx.Client
) -> None:
    num_tokens = 160
    load(client, "short-lived", llama.adapters["a08"]).raise_for_status()

    fields = {"stream": True, "max_tokens": num_tokens}
    with client.stream("POST", "/v1/completions", json=body("short-lived", **fields)) as stream:
        chunks = (json.loads(line[6:]) for line in stream.iter_lines() if line[:7] == "data: {")
        token_ids = list(next(chunks)["choices"][0]["token_ids"])
        unload(client, "short-lived").raise_for_status()
        late = client.post("/v1/completions", json=body("short-lived"))
        for chunk in chunks:
            token_ids += chunk["choices"][0]["token_ids"]

    refusal(late, 404, "model_not_found")
    assert tuple(token_ids) == expected(llama, "a08", num_tokens)


def test_a_replacement_that_fails_leaves_the_old_version_serving(
    llama: World, client: httpx.Client, live: Path
) -> None:
    (live / WEIGHTS).write_bytes((live / WEIGHTS).read_bytes()[:200])

    refusal(load(client, "live", live, load_inplace=True), 400, "invalid_adapter")

    assert complete(client, "live") == expected(llama, "a03")


def test_an_unexpected_version_is_not_replaced(
    llama: World, client: httpx.Client, live: Path
) -> None:
    fields = {"load_inplace": True, "expected_digest": "0" * 64}

    reply = load(client, "live", llama.adapters["a09"], **fields)

    refusal(reply, 409, "digest_mismatch")
    assert complete(client, "live") == expected(llama, "a03")


def test_pinning_shows_in_the_card(client: httpx.Client) -> None:
    pinned = client.post("/v1/adapters/a00/pin").raise_for_status().json()
    unpinned = client.post("/v1/adapters/a00/unpin").raise_for_status().json()

    assert (pinned["lora"]["pinned"], pinned["lora"]["residency"]) == (True, "device")
    assert unpinned["lora"]["pinned"] is False
    refusal(client.post("/v1/adapters/nobody/pin"), 404, "adapter_not_found")


@pytest.mark.parametrize("name", ["nobody", "A00", " a00", "a00 ", "a0"])
@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_an_unknown_name_is_404_and_never_the_base(
    route: str, name: str, client: httpx.Client
) -> None:
    content = {"messages": [{"role": "user", "content": "hi"}], "prompt": "hi"}
    key = "messages" if "chat" in route else "prompt"

    reply = client.post(route, json={"model": name, key: content[key]})

    error = refusal(reply, 404, "model_not_found")
    assert error["param"] == "model"
    assert all(repr(known)[1:-1] in error["message"] for known in (BASE_NAME, "a00", "a01"))


def test_the_header_chooses_when_the_body_does_not(llama: World, client: httpx.Client) -> None:
    def ask(header: str, model: str | None) -> tuple[tuple[int, ...], str]:
        content = {key: value for key, value in body(model).items() if value is not None}
        reply = client.post("/v1/completions", json=content, headers={"X-Use-LoRA": header})
        tokens = tuple(reply.raise_for_status().json()["choices"][0]["token_ids"])
        return tokens, reply.headers["X-LoRA-Adapter"].split("@")[0]

    assert ask("a01", None) == (expected(llama, "a01"), "a01")
    assert ask("a01", "a01") == (expected(llama, "a01"), "a01")
    assert ask("base", None) == (expected(llama, None), "base")
    assert ask("base", BASE_NAME) == (expected(llama, None), "base")


@pytest.mark.parametrize(("header", "model"), [("a01", "a00"), ("base", "a00"), ("a01", BASE_NAME)])
def test_header_and_model_that_disagree_are_a_conflict(
    header: str, model: str, client: httpx.Client
) -> None:
    reply = client.post("/v1/completions", json=body(model), headers={"X-Use-LoRA": header})

    refusal(reply, 400, "adapter_conflict")


def test_an_unknown_header_is_404(client: httpx.Client) -> None:
    reply = client.post("/v1/completions", json=body(None), headers={"X-Use-LoRA": "nobody"})

    refusal(reply, 404, "model_not_found")


# broken folders: each entry damages a copy of a09 and names a word that the error must contain


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
    damage: str, llama: World, client: httpx.Client
) -> None:
    break_, status, code, words = BROKEN[damage]
    folder = llama.folder / "broken"
    shutil.copytree(llama.adapters["a09"], folder)
    break_(folder)

    reply = load(client, "broken", folder)

    shutil.rmtree(folder, ignore_errors=True)
    error = refusal(reply, status, code)
    said = " ".join([error["message"], *error.get("details", ())])
    assert [word for word in words if word not in said] == [], said
    assert "broken" not in served(client)
    assert complete(client, "a01") == expected(llama, "a01")


def test_all_problems_are_told_at_once(llama: World, client: httpx.Client) -> None:
    folder = llama.folder / "many-problems"
    shutil.copytree(llama.adapters["a09"], folder)
    change_tensors(widen_two)(folder)

    error = refusal(load(client, "many", folder), 400, "invalid_adapter")

    shutil.rmtree(folder)
    assert len(error["details"]) >= 2


@pytest.mark.parametrize("path", ["/etc", "../..", "a00/../../..", "link-out"])
def test_paths_outside_the_roots_are_refused_also_through_links(
    path: str, llama: World, client: httpx.Client, tmp_path: Path
) -> None:
    link = llama.folder / "link-out"
    link.symlink_to(tmp_path)

    reply = load(client, "outside", path)

    link.unlink()
    refusal(reply, 403, "path_not_allowed")


def test_fifty_refused_loads_disturb_no_running_request(llama: World, client: httpx.Client) -> None:
    num_tokens = 160
    fields = {"stream": True, "max_tokens": num_tokens}

    with client.stream("POST", "/v1/completions", json=body("a00", **fields)) as stream:
        chunks = (json.loads(line[6:]) for line in stream.iter_lines() if line[:7] == "data: {")
        token_ids = list(next(chunks)["choices"][0]["token_ids"])
        replies = [load(client, "none", llama.folder / "nothing") for _ in range(50)]
        for chunk in chunks:
            token_ids += chunk["choices"][0]["token_ids"]

    assert {reply.status_code for reply in replies} == {404}
    assert tuple(token_ids) == expected(llama, "a00", num_tokens)


# requests that cannot be answered


def test_a_prompt_longer_than_the_context_is_refused_with_both_numbers(
    client: httpx.Client,
) -> None:
    reply = client.post("/v1/completions", json=body(prompt=[5] * 300))

    error = refusal(reply, 400, "context_length_exceeded")
    assert "300" in error["message"]
    assert "256" in error["message"]


@pytest.mark.parametrize(
    "content", ['{"model": "tiny", "prompt": ', "[1, 2]", "", '"text"', "\xff\xfe"]
)
@pytest.mark.parametrize(
    "route", ["/v1/completions", "/v1/chat/completions", "/v1/load_lora_adapter"]
)
def test_malformed_json_is_400(route: str, content: str, client: httpx.Client) -> None:
    headers = {"Content-Type": "application/json"}

    reply = client.post(route, content=content.encode("latin-1"), headers=headers)

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
    fields: dict[str, Any], param: str, client: httpx.Client
) -> None:
    reply = client.post("/v1/completions", json=body(**fields))

    assert reply.status_code in {400, 404}, reply.text
    assert reply.json()["error"]["param"].startswith(param)


# the start


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
