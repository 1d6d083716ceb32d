"""The doctor: one verdict, every reason, advice for each, in text and in JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from lora_server.cli.advice import ADVICE
from lora_server.cli.main import main
from lora_weights import ProblemCode
from lora_weights.testing import llama_modules, write_adapter

if TYPE_CHECKING:
    from pathlib import Path

MODULES = llama_modules(num_layers=1, hidden=32, inter=48, kv=16)
CONFIG = LlamaConfig(
    vocab_size=32,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    eos_token_id=1,
    bos_token_id=None,
    pad_token_id=None,
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Write a small Llama."""
    folder = tmp_path_factory.mktemp("base")
    torch.manual_seed(0)
    create: Any = AutoModelForCausalLM.from_config
    create(CONFIG).save_pretrained(folder)
    words = {str(number): number for number in range(32)}
    wrap: Any = PreTrainedTokenizerFast
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="0"))
    wrap(tokenizer_object=tokenizer, eos_token="1").save_pretrained(folder)
    return str(folder)


def examine(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any]]:
    """Return the exit status and the JSON."""
    status = main(["doctor", *arguments, "--json"])
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return status, found


def test_every_kind_of_problem_has_advice() -> None:
    assert set(ADVICE) == set(ProblemCode)


def test_an_adapter_that_loads_is_described(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_adapter(tmp_path / "a", MODULES, r=4, base_model_name_or_path="some/base")

    status, found = examine(capsys, str(folder))

    assert status == 0
    assert found["loads"]
    assert found["problems"] == []
    assert (found["rank"], found["base_model"], found["peft_type"]) == (4, "some/base", "LORA")
    assert len(found["modules"]) == len(MODULES)
    assert found["modules"][0]["kinds"] == ["pair"]
    assert found["modules"][0]["norms"]["pair"] > 0


def test_all_reasons_come_at_once_each_with_advice(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_adapter(
        tmp_path / "a", MODULES, r=4, use_something_new=True, layer_replication=[[0, 1]]
    )

    status, found = examine(capsys, str(folder), "--max-lora-rank", "2")

    assert status == 1
    assert not found["loads"]
    codes = {problem["code"] for problem in found["problems"]}
    assert codes == {"unknown_field", "unsupported_field", "rank_too_large"}
    assert all(problem["advice"] for problem in found["problems"])
    rank = next(p for p in found["problems"] if p["code"] == "rank_too_large")
    assert "4" in rank["found"]
    assert "2" in rank["expected"]


def test_a_missing_folder_is_a_finding_not_a_crash(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, found = examine(capsys, str(tmp_path / "nowhere"))

    assert status == 1
    assert [problem["code"] for problem in found["problems"]] == ["not_found"]


def test_with_a_model_the_modules_and_shapes_are_those_of_the_base(
    tmp_path: Path, base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    fits = write_adapter(tmp_path / "fits", MODULES, r=4)
    others = {"model.layers.7.self_attn.q_proj": (32, 32), "model.layers.0.mlp.up_proj": (32, 49)}
    lost = write_adapter(tmp_path / "lost", others, r=4)

    assert examine(capsys, str(fits), "--model", base)[0] == 0
    assert examine(capsys, str(lost))[0] == 0
    status, found = examine(capsys, str(lost), "--model", base)

    assert status == 1
    messages = sorted(problem["message"] for problem in found["problems"])
    assert "model.layers.0.mlp.up_proj" in messages[0]
    assert "[49, 4]" in messages[0]
    assert "model.layers.7.self_attn.q_proj" in messages[1]


def test_modules_that_will_not_carry_adapters_are_named(
    tmp_path: Path, base: str, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_adapter(tmp_path / "a", MODULES, r=4)

    status, found = examine(
        capsys, str(folder), "--model", base, "--lora-target-modules", "q_proj", "o_proj"
    )

    assert status == 1
    named = {problem["module"].rpartition(".")[2] for problem in found["problems"]}
    assert named == {"k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"}


def test_the_text_says_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = write_adapter(tmp_path / "good", MODULES, r=4)
    bad = write_adapter(tmp_path / "bad", MODULES, r=4, peft_type="PROMPT_TUNING")

    assert main(["doctor", str(good)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("loads")
    assert "down_proj" in text
    assert main(["doctor", str(bad)]) == 1
    text = capsys.readouterr().out
    assert "does not load" in text
    assert "PROMPT_TUNING" in text
    assert "->" in text
