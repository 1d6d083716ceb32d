"""The configuration: its defaults, its limits, and that all problems are told at once."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from lora_server.config import Dtype, LoraModule, ServerConfig
from lora_server.errors import StartupError
from lora_server.option_fields import OptionKind, flag_of, option_of


def problems_of(**values: Any) -> tuple[str, ...]:
    with pytest.raises(StartupError) as caught:
        ServerConfig(**{"model": "m", **values})
    return caught.value.problems


def test_defaults_are_those_of_the_reference() -> None:
    config = ServerConfig(model="m")

    assert (config.max_loras, config.max_lora_rank, config.host_capacity) == (8, 64, 32)
    assert (config.port, config.max_num_seqs, config.max_num_batched_tokens) == (8000, 64, 512)
    assert config.enable_lora
    assert config.enable_prefix_caching
    assert config.max_adapter_wait == 2.0
    assert config.adapter_roots == ()


def test_every_field_has_an_option_that_explains_it() -> None:
    for config_field in dataclasses.fields(ServerConfig):
        option = option_of(config_field)

        assert option.help.endswith(".")
        assert option.group
        if config_field.default in (None, ()) and not option.is_later:
            assert option.unset, config_field.name


def test_every_choice_of_an_enumeration_is_an_accepted_value() -> None:
    for config_field in dataclasses.fields(ServerConfig):
        option = option_of(config_field)
        if option.kind is OptionKind.CHOICE:
            for choice in option.choices:
                values: dict[str, Any] = {"model": "m", config_field.name: choice}
                ServerConfig(**values)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_loras", 0),
        ("max_loras", -1),
        ("max_lora_rank", 0),
        ("max_cpu_loras", -1),
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 0),
        ("block_size", 0),
        ("max_model_len", 0),
        ("num_threads", 0),
        ("port", 65536),
        ("port", -1),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.5),
        ("kv_cache_memory", 0),
        ("max_adapter_wait", -0.1),
        ("max_adapter_wait", float("nan")),
        ("max_adapter_wait", float("inf")),
        ("dtype", "float8"),
        ("lora_dtype", "float32"),
        ("host", ""),
        ("admin_api_key", ""),
        ("api_key", ("",)),
        ("served_model_name", ("a", "")),
        ("lora_target_modules", ("",)),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_flag(name: str, value: Any) -> None:
    (problem,) = problems_of(**{name: value})

    assert flag_of(name) in problem


@pytest.mark.parametrize("rank", [1, 3, 24, 133, 1000])
def test_any_positive_rank_is_accepted(rank: int) -> None:
    assert ServerConfig(model="m", max_lora_rank=rank).max_lora_rank == rank


def test_a_host_tier_smaller_than_the_slots_is_refused_with_both_numbers() -> None:
    (problem,) = problems_of(max_cpu_loras=3, max_loras=5)

    assert "3" in problem
    assert "5" in problem


def test_a_host_tier_of_zero_is_the_default_and_the_default_grows_with_the_slots() -> None:
    assert ServerConfig(model="m", max_cpu_loras=0).host_capacity == 32
    assert ServerConfig(model="m", max_loras=40).host_capacity == 40
    assert ServerConfig(model="m", max_loras=2, max_cpu_loras=2).host_capacity == 2


def test_all_problems_are_told_at_once() -> None:
    problems = problems_of(model="", max_loras=0, max_lora_rank=-1, port=-2, dtype="int3")

    assert len(problems) == 5


@pytest.mark.parametrize(
    "name",
    [f.name for f in dataclasses.fields(ServerConfig) if option_of(f).is_later],
)
def test_a_flag_of_a_later_version_is_accepted_at_its_default_only(name: str) -> None:
    (problem,) = problems_of(**{name: 2})

    assert flag_of(name) in problem
    assert "not available" in problem


def test_names_of_the_base_are_the_served_ones_or_the_model() -> None:
    assert ServerConfig(model="org/m").base_names == ("org/m",)
    assert ServerConfig(model="m", served_model_name=("a", "b")).base_names == ("a", "b")


def test_a_served_name_given_twice_is_refused() -> None:
    (problem,) = problems_of(served_model_name=("a", "a"))

    assert "twice" in problem


def test_an_adapter_cannot_have_a_name_of_the_base() -> None:
    modules = (LoraModule(name="b", path="/p"),)

    (problem,) = problems_of(served_model_name=("a", "b"), lora_modules=modules)

    assert "'b' is a name of the base model" in problem


@pytest.mark.parametrize("name", ["", " a", "a ", "a\nb", "base"])
def test_an_adapter_cannot_have_a_name_that_no_request_could_use(name: str) -> None:
    (problem,) = problems_of(lora_modules=(LoraModule(name=name, path="/p"),))

    assert repr(name) in problem


def test_an_adapter_name_given_twice_is_refused_with_both_paths() -> None:
    modules = (LoraModule(name="a", path="/p"), LoraModule(name="a", path="/q"))

    (problem,) = problems_of(lora_modules=modules)

    assert "/p" in problem
    assert "/q" in problem


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("lora_modules", (LoraModule(name="a", path="/p"),)),
        ("lora_dir", "/d"),
        ("adapter_root", ("/d",)),
    ],
)
def test_adapters_together_with_no_enable_lora_are_refused(name: str, value: Any) -> None:
    (problem,) = problems_of(enable_lora=False, **{name: value})

    assert flag_of(name) in problem
    assert "--no-enable-lora" in problem


def test_the_folder_of_adapters_counts_as_a_root() -> None:
    config = ServerConfig(model="m", lora_dir="/d", adapter_root=("/r",))

    assert config.adapter_roots == ("/r", "/d")


def test_a_remote_root_is_refused() -> None:
    (problem,) = problems_of(adapter_root=("s3://bucket/team/",))

    assert "s3://bucket/team/" in problem


def test_traces_go_to_a_web_address_only() -> None:
    (problem,) = problems_of(otlp_traces_endpoint="collector:4317")

    assert "'collector:4317', expected http://" in problem


def test_a_config_does_not_change() -> None:
    config = ServerConfig(model="m", dtype=Dtype.FLOAT32)

    with pytest.raises(dataclasses.FrozenInstanceError):
        config.dtype = Dtype.AUTO  # type: ignore[misc]


def test_keys_that_cannot_be_sent_or_mean_two_things_are_refused() -> None:
    problems = problems_of(
        api_key=("secret", "secret", "secret\n"), admin_api_key="secret", max_body_bytes=0
    )

    assert any("--api-key has a key twice" in problem for problem in problems)
    assert any("--admin-api-key is one of --api-key" in problem for problem in problems)
    assert any("--api-key: expected printable characters" in problem for problem in problems)
    assert any("--max-body-bytes is 0" in problem for problem in problems)
    assert "secret" not in "".join(problems)
    ServerConfig(model="m", api_key=("sk-schl\u00fcssel", "two words"), admin_api_key="M")
