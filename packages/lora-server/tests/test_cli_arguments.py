"""The flags of `serve`: every field has one, and every mistake on the command line has a name."""

from __future__ import annotations

import argparse
import dataclasses
from typing import TYPE_CHECKING

import pytest

from lora_server.cli.arguments import add_config_flags, help_text, read_config
from lora_server.config import ServerConfig
from lora_server.errors import StartupError
from lora_server.option_fields import OptionKind, flag_of, option_of
from lora_server.refused import REFUSED_FLAGS

if TYPE_CHECKING:
    from pathlib import Path

    from lora_server.options import ResolvedConfig


def read(*arguments: str) -> ResolvedConfig:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_config_flags(parser)
    parsed, extras = parser.parse_known_args(arguments)
    return read_config(parsed, extras, environ={})


def problems_of(*arguments: str) -> tuple[str, ...]:
    with pytest.raises(StartupError) as caught:
        read(*arguments)
    return caught.value.problems


SAMPLES = {
    OptionKind.TEXT: ("here",),
    OptionKind.INTEGER: ("64",),
    OptionKind.NUMBER: ("0.5",),
    OptionKind.BYTES: ("2GiB",),
    OptionKind.TEXTS: (".",),
    OptionKind.NAMES: ("one", "two"),
    OptionKind.MODULES: ("one=/p", "two=/q"),
}


@pytest.mark.parametrize(
    "name",
    [
        f.name
        for f in dataclasses.fields(ServerConfig)
        if option_of(f).kind in SAMPLES and not option_of(f).is_later and f.name != "model"
    ],
)
def test_every_field_can_be_set_by_its_flag(name: str, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "adapter_config.json").write_text("{}")
    kind = option_of(ServerConfig.__dataclass_fields__[name]).kind
    own = {"lora_dir": (str(tmp_path),), "otlp_traces_endpoint": ("http://here",)}
    words = own.get(name, SAMPLES[kind])

    config = read("m", flag_of(name), *words).config

    assert getattr(config, name) != ServerConfig.__dataclass_fields__[name].default or name in (
        "max_num_seqs",
        "max_lora_rank",
    )


def test_a_switch_has_both_directions() -> None:
    assert not read("m", "--no-enable-prefix-caching").config.enable_prefix_caching
    assert read("m", "--enable-prefix-caching").config.enable_prefix_caching
    assert not read("m", "--no-enable-lora").config.enable_lora


@pytest.mark.parametrize(
    "arguments",
    [
        ("m", "--port", "1", "--max-loras", "2"),
        ("--port", "1", "m", "--max-loras", "2"),
        ("--port=1", "--max-loras=2", "m"),
    ],
)
def test_the_model_may_stand_anywhere_among_flags_of_one_value(arguments: tuple[str, ...]) -> None:
    config = read(*arguments).config

    assert (config.model, config.port, config.max_loras) == ("m", 1, 2)


@pytest.mark.parametrize(
    "arguments",
    [
        ("--lora-modules", "a=/p", "b=/q"),
        ("--lora-modules", "a=/p,b=/q"),
        ("--lora-modules", "a=/p", "--lora-modules", "b=/q"),
        ("--lora-modules", '{"name": "a", "path": "/p"}', "--lora-modules=b=/q"),
    ],
)
def test_adapters_are_read_in_every_form_of_the_flag(arguments: tuple[str, ...]) -> None:
    config = read("m", *arguments).config

    assert [(module.name, module.path) for module in config.lora_modules] == [
        ("a", "/p"),
        ("b", "/q"),
    ]


def test_the_flag_for_adapters_without_any_is_refused() -> None:
    (problem,) = problems_of("m", "--lora-modules")

    assert "names no adapter" in problem


def test_a_model_after_the_adapters_is_pointed_at() -> None:
    problems = problems_of("--lora-modules", "a=/p", "model")

    assert any("the model comes before the flags" in problem for problem in problems)


def test_an_unknown_flag_is_refused_with_the_closest_one() -> None:
    (problem,) = problems_of("m", "--max-lora", "3")

    assert problem == "unknown option --max-lora, did you mean --max-loras?"


def test_a_flag_is_not_abbreviated() -> None:
    (problem,) = problems_of("m", "--max-lora-ran", "3")

    assert "unknown option" in problem


@pytest.mark.parametrize("name", sorted(REFUSED_FLAGS))
def test_a_flag_that_only_vllm_has_is_refused_with_one_sentence(name: str) -> None:
    (problem,) = problems_of("m", f"--{name}", "x")

    assert REFUSED_FLAGS[name] in problem
    assert problem.endswith(".")
    assert name not in [f.name.replace("_", "-") for f in dataclasses.fields(ServerConfig)][1:]


def test_a_second_model_is_refused() -> None:
    (problem,) = problems_of("m", "n")

    assert "unexpected arguments after MODEL: n" in problem


def test_mistakes_of_the_command_line_and_of_values_are_told_together() -> None:
    problems = problems_of("--max-loras", "0", "--what", "--port", "x")

    assert len(problems) == 4
    for text in ("--what", "--max-loras is 0", "--port: 'x'", "no model"):
        assert any(text in problem for problem in problems)


def test_help_says_unit_and_default() -> None:
    fields = ServerConfig.__dataclass_fields__
    wait = fields["max_adapter_wait"]
    later = fields["tensor_parallel_size"]

    assert help_text(option_of(wait), wait.default).endswith("(in seconds, default: 2.0)")
    assert help_text(option_of(later), later.default).endswith("Not available in this version.")
