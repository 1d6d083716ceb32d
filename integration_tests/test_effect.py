"""Proof of effect: norms and shifts in an adapter's card are PEFT's and float64's."""

from __future__ import annotations

import json
import math
import warnings
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import pytest
import torch
from peft import PeftModel
from peft.tuners.lora import LoraLayer
from safetensors.torch import load_file, save_file
from support.adapters import CONFIG, WEIGHTS, Recipe, save_adapter
from support.checkpoints import FAMILIES
from support.pooling import BASE_LABELS, build_world
from support.pooling import FAMILIES as POOLING_FAMILIES
from support.requests import complete, load, refusal, served
from support.server import BASE_NAME, running
from transformers import AutoModelForCausalLM, AutoTokenizer

from lora_server.engine.probe import MAX_PROBE_TOKENS, PROBE_TEXT

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import httpx
    from support.fixture_types import StartServer
    from support.pooling import PoolingWorld
    from support.worlds import World

TOLERANCE = 1e-4


def effect_of(client: httpx.Client, name: str) -> dict[str, Any]:
    """Return what an adapter's card tells of its effect."""
    card = client.get(f"/v1/adapters/{name}").raise_for_status().json()
    effect: dict[str, Any] = card["lora"]["effect"]
    return effect


def probe_ids(base: Path) -> list[int]:
    """Return the tokens of the probe, by transformers' tokenizer."""
    ids: list[int] = AutoTokenizer.from_pretrained(base)(PROBE_TEXT)["input_ids"]
    return ids[:MAX_PROBE_TOKENS]


class Oracle:
    """PEFT's logits of the probe, and norms of its own dense updates."""

    def __init__(self, world: World, adapter: Path) -> None:
        def read() -> Any:
            return AutoModelForCausalLM.from_pretrained(
                world.base, dtype=torch.float32, attn_implementation="eager"
            )

        ids = torch.tensor([probe_ids(world.base)])
        with torch.inference_mode(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # PEFT comments on tied heads
            base = read()(input_ids=ids).logits[0].double().log_softmax(-1)
            model = PeftModel.from_pretrained(read(), str(adapter)).eval()
            own = model(input_ids=ids).logits[0].double().log_softmax(-1)
        self.shift = (own - base).abs()
        self.kl = float((base[-1].exp() * (base[-1] - own[-1])).sum())
        self.norms = {
            path.removeprefix("base_model.model."): float(torch.linalg.matrix_norm(dense(layer)))
            for path, layer in model.named_modules()
            if isinstance(layer, LoraLayer)
        }


def dense(layer: Any) -> torch.Tensor:
    """Return a layer's whole update in float64."""
    if layer.lora_A:
        a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    else:
        a, b = layer.lora_embedding_A["default"], layer.lora_embedding_B["default"]
    update: torch.Tensor = b.detach().double() @ a.detach().double()
    return update * float(layer.scaling["default"])


def change(source: Path, folder: Path, edit: Callable[[dict[str, torch.Tensor]], None]) -> Path:
    """Copy an adapter with other numbers in it."""
    folder.mkdir()
    (folder / CONFIG).write_text((source / CONFIG).read_text())
    tensors = load_file(source / WEIGHTS)
    edit(tensors)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / WEIGHTS)
    return folder


def test_shift_and_norms_equal_those_of_peft_and_of_dense_updates(
    llama: World, start_server: StartServer
) -> None:
    names = ("a01", "a05", "a07", "a11")  # a head, an embedding, ranks and alphas of their own

    with start_server(llama, *llama.lora_modules(*names), "--max-lora-rank", "32") as server:
        effects = {name: effect_of(server.http, name) for name in names}

    for name, found in effects.items():
        oracle = Oracle(llama, llama.adapters[name])
        stored = load_file(llama.adapters[name] / WEIGHTS)
        assert found["probe"] == "done"
        assert found["logit_shift"]["max"] == pytest.approx(
            float(oracle.shift.max()), abs=TOLERANCE
        )
        assert found["logit_shift"]["mean"] == pytest.approx(
            float(oracle.shift.mean()), abs=TOLERANCE
        )
        assert found["logit_shift"]["kl"] == pytest.approx(oracle.kl, abs=TOLERANCE)
        assert found["update_norm"] == pytest.approx(math.hypot(*oracle.norms.values()), rel=1e-5)
        assert found["largest_module"] == max(oracle.norms, key=oracle.norms.__getitem__)
        # what PEFT saves beside the pairs is a copy of the base's own table
        applied = sum("lora_" in key for key in stored)
        assert (found["applied_tensors"], found["total_tensors"]) == (applied, len(stored))
        assert not found["is_weak"]


def test_what_cannot_change_anything_is_refused_and_what_changes_little_is_flagged(
    llama: World, start_server: StartServer, tmp_path: Path
) -> None:
    def cancel(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            if "lora_A" in key:
                tensor[1] = tensor[0]
            else:
                tensor[:, 1] = -tensor[:, 0]

    def weaken(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            if "lora_B" in key:
                tensor.mul_(1e-5)

    cancelled = change(llama.adapters["a01"], tmp_path / "cancelled", cancel)
    weak = change(llama.adapters["a01"], tmp_path / "weak", weaken)

    with start_server(llama, "--adapter-root", str(tmp_path)) as server:
        refused = load(server.http, "cancelled", cancelled)
        card = load(server.http, "weak", weak).raise_for_status().json()
        names = served(server.http)
        log = server.log.read_text()

    error = refusal(refused, 400, "invalid_adapter")
    assert "norm of the update: 0" in error["message"]
    assert names == [BASE_NAME, "weak"]
    effect = card["lora"]["effect"]
    assert effect["is_weak"]
    assert 0 < effect["logit_shift"]["max"] < 0.02
    assert effect["update_norm"] > 0
    (line,) = [text for text in log.splitlines() if "hardly changes" in text]
    assert "WARNING" in line
    assert "weak" in line


def test_an_adapter_for_a_token_that_the_probe_lacks_is_served_and_flagged(
    llama: World, start_server: StartServer, tmp_path: Path
) -> None:
    base = AutoModelForCausalLM.from_pretrained(llama.base, dtype=torch.float32)
    rare = next(i for i in range(40, 200) if i not in probe_ids(llama.base))
    recipe = Recipe(rank=2, targets=("embedding",), save_embeddings=False)
    save_adapter(base, FAMILIES["llama"], recipe, tmp_path / "whole", seed=5)

    def keep_one(tensors: dict[str, torch.Tensor]) -> None:
        for key, tensor in tensors.items():
            if "lora_embedding_A" in key:
                kept = tensor[:, rare].clone()
                tensor.zero_()
                tensor[:, rare] = kept * 20

    adapter = change(tmp_path / "whole", tmp_path / "rare", keep_one)
    with start_server(llama, "--adapter-root", str(tmp_path)) as server:
        effect = load(server.http, "rare", adapter).raise_for_status().json()["lora"]["effect"]
        asked: dict[str, Any] = {"prompt": [rare] * 6, "max_tokens": 4}
        own, plain = complete(server.http, "rare", **asked), complete(server.http, **asked)

    assert effect["logit_shift"]["max"] == 0
    assert effect["is_weak"]
    assert effect["update_norm"] > 0
    assert own != plain


def test_where_no_slot_is_free_the_proof_comes_with_the_first_request(
    llama: World, start_server: StartServer
) -> None:
    flags = ["--adapter-root", str(llama.folder), "--max-loras", "1", "--max-lora-rank", "32"]

    with start_server(llama, *llama.lora_modules("a00"), *flags) as server:
        complete(server.http, "a00")  # stays in the one slot
        loaded = load(server.http, "a01", llama.adapters["a01"]).raise_for_status().json()
        waiting = loaded["lora"]["effect"]
        evicted_before = server.http.get("/v1/adapters/a00").json()["lora"]["residency"]
        complete(server.http, "a01")
        done = effect_of(server.http, "a01")

    assert (waiting["probe"], waiting["logit_shift"], waiting["is_weak"]) == (
        "waiting",
        None,
        False,
    )
    assert waiting["update_norm"] > 0
    assert evicted_before == "device"
    assert done["probe"] == "done"
    assert done["logit_shift"]["max"] == pytest.approx(
        float(Oracle(llama, llama.adapters["a01"]).shift.max()), abs=TOLERANCE
    )


def test_beside_running_requests_the_proof_is_the_same_and_so_are_their_answers(
    llama: World, start_server: StartServer
) -> None:
    names = ("a01", "a05", "a07")
    flags = ["--adapter-root", str(llama.folder), "--max-loras", "2", "--max-lora-rank", "32"]
    asked: dict[str, Any] = {"prompt": [5, 9, 2, 40], "max_tokens": 100, "ignore_eos": True}

    with start_server(llama, *llama.lora_modules("a00"), *flags) as server:
        alone = [complete(server.http, model, **asked) for model in (BASE_NAME, "a00")]
        with ThreadPoolExecutor(2) as pool:
            running = [pool.submit(complete, server.http, m, **asked) for m in (BASE_NAME, "a00")]
            for name in names:
                load(server.http, name, llama.adapters[name]).raise_for_status()
            beside = [answer.result() for answer in running]
        effects = {name: effect_of(server.http, name) for name in names}

    assert beside == alone
    for name, effect in effects.items():
        shift = Oracle(llama, llama.adapters[name]).shift
        assert effect["probe"] == "done"
        assert effect["logit_shift"]["max"] == pytest.approx(float(shift.max()), abs=TOLERANCE)
        assert effect["logit_shift"]["mean"] == pytest.approx(float(shift.mean()), abs=TOLERANCE)


def test_switched_off_it_runs_nothing_and_still_tells_the_norms(
    llama: World, start_server: StartServer
) -> None:
    with start_server(llama, *llama.lora_modules("a01"), "--effect-probe", "off") as server:
        effect = effect_of(server.http, "a01")
        text = server.http.get("/metrics").text

    assert (effect["probe"], effect["logit_shift"]) == ("off", None)
    assert effect["update_norm"] > 0
    assert 'adapter="a01"' in text


def test_the_proof_changes_no_answer_and_leaves_no_adapter_in_a_slot(
    llama: World, start_server: StartServer
) -> None:
    names = ("a00", "a01", "a03")
    flags = [*llama.lora_modules(*names), "--max-loras", "2", "--max-lora-rank", "32"]

    answers = []
    for probe in ("on", "off"):
        with start_server(llama, *flags, "--effect-probe", probe) as server:
            cards = server.http.get("/v1/adapters").json()["data"]
            answers.append([complete(server.http, name) for name in (*names, BASE_NAME)])

        assert {card["lora"]["residency"] for card in cards} == {"host"}
    assert answers[0] == answers[1]


@pytest.mark.parametrize("family", ["bert", "llama"])
def test_a_classifier_is_proved_by_its_labels_or_else_by_its_embedding(
    family: str, tmp_path: Path
) -> None:
    labels = {"same": BASE_LABELS, "other": 5, "plain": None}
    world = build_world(POOLING_FAMILIES[family], tmp_path, "classify", labels)
    arguments = ["serve", str(world.base), "--served-model-name", BASE_NAME, "--port", "0"]
    arguments += ["--dtype", "float32", "--num-threads", "1", *world.flags]
    arguments += ["--max-lora-cls-labels", "5"]

    with running(arguments, tmp_path / "log") as server:
        effects = {name: effect_of(server.http, name) for name in labels}

    for name in ("same", "plain"):
        shift = effects[name]["logit_shift"]
        base, own = probe_labels(world, None), probe_labels(world, name)
        assert shift["of"] == "log_probabilities"
        assert shift["max"] == pytest.approx(float((own - base).abs().max()), abs=TOLERANCE)
        kl = float((base.exp() * (base - own)).sum())
        assert shift["kl"] == pytest.approx(kl, abs=TOLERANCE)
    assert effects["other"]["logit_shift"]["of"] == "embedding"
    assert effects["other"]["logit_shift"]["max"] > 0
    assert not any(effect["is_weak"] for effect in effects.values())


def probe_labels(world: PoolingWorld, name: str | None) -> torch.Tensor:
    """Return PEFT's log-probabilities of the labels for the probe."""
    tokenizer = AutoTokenizer.from_pretrained(world.base)
    ids = tokenizer(PROBE_TEXT, truncation=True, max_length=MAX_PROBE_TOKENS)["input_ids"]
    return world.output(name, ids).log_softmax(-1)


def test_what_is_told_is_json_without_names_of_ours(
    llama: World, start_server: StartServer
) -> None:
    with start_server(llama, *llama.lora_modules("a00")) as server:
        effect = effect_of(server.http, "a00")

    assert effect.keys() == {
        *("applied_tensors", "total_tensors", "update_norm", "largest_module"),
        *("logit_shift", "probe", "is_weak"),
    }
    assert json.loads(json.dumps(effect)) == effect
