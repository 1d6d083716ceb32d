"""Where options come from: precedence, origins, unknown names, and everything told at once."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from lora_server.config import LoraModule, ServerConfig
from lora_server.errors import StartupError
from lora_server.options import (
    Origin,
    cache_folder,
    environment_without_options,
    resolve,
    static_modules,
)

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path


def problems_of(
    arguments: dict[str, object] | None = None,
    *,
    config_file: str | None = None,
    environ: dict[str, str] | None = None,
) -> tuple[str, ...]:
    with pytest.raises(StartupError) as caught:
        resolve(
            {"model": "m"} if arguments is None else arguments,
            config_file=config_file,
            environ=environ or {},
        )
    return caught.value.problems


@pytest.fixture
def write_file(tmp_path: Path) -> Callable[[str], str]:
    def write(text: str) -> str:
        path = tmp_path / "config.yaml"
        path.write_text(text)
        return str(path)

    return write


@pytest.fixture
def adapters(tmp_path: Path) -> str:
    for name in ("ant", "bee"):
        (tmp_path / "adapters" / name).mkdir(parents=True)
        (tmp_path / "adapters" / name / "adapter_config.json").write_text("{}")
    return str(tmp_path / "adapters")


def test_the_command_line_goes_before_variables_before_the_file(
    write_file: Callable[[str], str],
) -> None:
    path = write_file("max_loras: 2\nmax_lora_rank: 2\nport: 2\n")
    environ = {"LORA_SERVER_MAX_LORAS": "3", "LORA_SERVER_MAX_LORA_RANK": "3"}

    resolved = resolve({"model": "m", "max_loras": "4"}, config_file=path, environ=environ)

    config = resolved.config
    assert (config.max_loras, config.max_lora_rank, config.port) == (4, 3, 2)
    assert resolved.origins["max_loras"] is Origin.COMMAND_LINE
    assert resolved.origins["max_lora_rank"] is Origin.ENVIRONMENT
    assert resolved.origins["port"] is Origin.FILE
    assert resolved.origins["host"] is Origin.DEFAULT


def test_every_field_has_an_origin() -> None:
    resolved = resolve({"model": "m"}, environ={})

    assert set(resolved.origins) == set(ServerConfig.__dataclass_fields__)


def test_a_weaker_source_is_not_read_where_a_stronger_one_decides() -> None:
    resolved = resolve({"model": "m", "port": "1"}, environ={"LORA_SERVER_PORT": "much"})

    assert resolved.config.port == 1


def test_all_kinds_of_options_are_read_from_a_file(write_file: Callable[[str], str]) -> None:
    path = write_file(
        "model: m\n"
        "enable-prefix-caching: false\n"
        "kv_cache_memory: 2GiB\n"
        "served-model-name: [a, b]\n"
        "max_model_len: null\n"
        "lora_target_modules: []\n"
        "lora_modules:\n"
        "  - x=/p\n"
        "  - {name: y, path: '/q,r', base_model_name: parent}\n"
    )

    config = resolve({}, config_file=path, environ={}).config

    assert not config.enable_prefix_caching
    assert config.kv_cache_memory == 2 * 2**30
    assert config.served_model_name == ("a", "b")
    assert config.max_model_len is None
    assert config.lora_target_modules == ()
    assert config.lora_modules == (
        LoraModule(name="x", path="/p"),
        LoraModule(name="y", path="/q,r", base_model_name="parent"),
    )


def test_all_kinds_of_options_are_read_from_variables(write_file: Callable[[str], str]) -> None:
    environ = {
        "LORA_SERVER_CONFIG": write_file("port: 9\n"),
        "LORA_SERVER_MODEL": "m",
        "LORA_SERVER_ENABLE_PREFIX_CACHING": "false",
        "LORA_SERVER_API_KEY": "one two",
        "LORA_SERVER_LORA_MODULES": 'x=/p \'{"name": "y", "path": "/q"}\'',
        "LORA_SERVER_MAX_LORAS": "",
        "LORA_SERVER_CACHE_DIR": "/c",
        "UNRELATED": "x",
    }

    config = resolve({}, environ=environ).config

    assert (config.model, config.port, config.max_loras) == ("m", 9, 8)
    assert not config.enable_prefix_caching
    assert config.api_key == ("one", "two")
    assert [module.name for module in config.lora_modules] == ["x", "y"]


def test_a_missing_model_says_how_to_name_it() -> None:
    (problem,) = problems_of({})

    assert "lora-server serve MODEL" in problem


def test_an_unknown_variable_is_refused_with_the_closest_name() -> None:
    (problem,) = problems_of(environ={"LORA_SERVER_MAX_LORA": "4"})

    assert "did you mean LORA_SERVER_MAX_LORAS?" in problem


def test_an_unknown_key_is_refused_with_the_closest_name(write_file: Callable[[str], str]) -> None:
    (problem,) = problems_of(config_file=write_file("max_lora: 4\n"))

    assert "'max_lora', did you mean max_loras?" in problem


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a: [", "cannot be read"),
        ("- a\n", "expected a mapping"),
        ("max-loras: 1\nmax_loras: 2\n", "set twice"),
        ("max_loras: 1\nmax_loras: 2\n", "set twice"),
        ("port: null\n", "not one value"),
    ],
)
def test_a_file_that_cannot_be_understood_is_refused(
    write_file: Callable[[str], str], text: str, expected: str
) -> None:
    (problem,) = problems_of(config_file=write_file(text))

    assert expected in problem


def test_an_empty_file_sets_nothing(write_file: Callable[[str], str]) -> None:
    assert resolve({"model": "m"}, config_file=write_file(""), environ={}).config.port == 8000


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    (problem,) = problems_of(config_file=str(tmp_path / "absent.yaml"))

    assert "absent.yaml" in problem


def test_variables_of_a_kubernetes_service_are_ignored_and_its_port_is_explained() -> None:
    environ = {
        "LORA_SERVER_SERVICE_HOST": "10.0.0.1",
        "LORA_SERVER_SERVICE_PORT": "8000",
        "LORA_SERVER_PORT_8000_TCP_ADDR": "10.0.0.1",
        "LORA_SERVER_PORT": "tcp://10.0.0.1:8000",
    }

    (problem,) = problems_of(environ=environ)

    assert "enableServiceLinks" in problem


def test_the_problems_of_all_sources_are_told_at_once(
    write_file: Callable[[str], str], tmp_path: Path
) -> None:
    problems = problems_of(
        {"lora_dir": str(tmp_path / "absent"), "adapter_root": [str(tmp_path / "none")]},
        environ={"LORA_SERVER_PORT": "much", "LORA_SERVER_LORA_MODULES": "a"},
        config_file=write_file("max_loras: 0\nwhat: 1\n"),
    )

    for text in (
        "absent",
        "none",
        "LORA_SERVER_PORT: 'much'",
        "LORA_SERVER_LORA_MODULES: 'a'",
        "--max-loras is 0",
        "unknown key 'what'",
        "no model",
    ):
        assert sum(text in problem for problem in problems) == 1, text
    assert len(problems) == 7


def test_adapters_of_both_sources_are_loaded_at_start(adapters: str) -> None:
    arguments = {"model": "m", "lora_modules": ["x=/p"], "lora_dir": adapters}

    resolved = resolve(arguments, environ={})

    assert [module.name for module in resolved.modules] == ["x", "ant", "bee"]
    assert static_modules(resolved.config) == resolved.modules


def test_a_name_that_both_sources_have_is_refused_once(adapters: str) -> None:
    (problem,) = problems_of({"model": "m", "lora_modules": ["ant=/p"], "lora_dir": adapters})

    assert "'ant' is given twice" in problem


def test_a_sub_folder_named_like_the_base_is_refused(adapters: str) -> None:
    (problem,) = problems_of({"model": "ant", "lora_dir": adapters})

    assert "'ant' is a name of the base model" in problem


def test_static_modules_tells_a_missing_folder(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="absent"):
        static_modules(ServerConfig(model="m", lora_dir=str(tmp_path / "absent")))


def test_the_cache_folder_follows_its_variable_then_the_desktop_standard(tmp_path: Path) -> None:
    assert str(cache_folder({"LORA_SERVER_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x"})) == "/c"
    assert str(cache_folder({"XDG_CACHE_HOME": "/x"})) == "/x/lora-server"
    assert cache_folder({}).parts[-2:] == (".cache", "lora-server")


def test_a_child_process_gets_all_variables_but_the_options() -> None:
    environ = {"PATH": "/bin", "LORA_SERVER_PORT": "1"}

    assert environment_without_options(environ) == {"PATH": "/bin"}
