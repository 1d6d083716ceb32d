"""The files that put the server into operation: what they name exists, and their times fit."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from lora_server.cli.listen import _END_S
from lora_server.config import ServerConfig
from lora_server.option_fields import flag_of
from lora_server.options import CACHE_VARIABLE, CONFIG_VARIABLE, ENV_PREFIX, resolve

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "docs" / "how-to" / "deploy"
FLAGS = {flag_of(f.name) for f in dataclasses.fields(ServerConfig)} | {"--config"}
VARIABLES = {ENV_PREFIX + f.name.upper() for f in dataclasses.fields(ServerConfig)}
VARIABLES |= {CACHE_VARIABLE, CONFIG_VARIABLE}


def instructions() -> list[list[str]]:
    """Return the Dockerfile's instructions, each as its words."""
    text = (DEPLOY / "Dockerfile").read_text().replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [shlex.split(line) if "[" not in line else line.split(None, 1) for line in lines]


def objects() -> dict[str, Any]:
    loaded = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {found["kind"]: found for found in loaded}


def container() -> dict[str, Any]:
    (found,) = objects()["Deployment"]["spec"]["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def unit() -> dict[str, list[str]]:
    """Return the systemd unit's settings."""
    text = (DEPLOY / "lora-server.service").read_text().replace("\\\n", " ")
    found: dict[str, list[str]] = {}
    for line in text.splitlines():
        name, is_setting, value = line.partition("=")
        if is_setting and not line.startswith("#"):
            found.setdefault(name, []).append(value)
    return found


def options_of(arguments: list[str]) -> dict[str, str]:
    """Read `--flag value` and `--flag=value`; other words are left out."""
    found: dict[str, str] = {}
    for word, following in zip(arguments, [*arguments[1:], ""], strict=True):
        if word.startswith("--"):
            flag, has_value, value = word.partition("=")
            found[flag] = value if has_value else following
    return found


def test_everything_the_image_copies_is_in_the_repository() -> None:
    copies = [words[1:] for words in instructions() if words[0] == "COPY"]
    own = [words[:-1] for words in copies if not words[0].startswith("--from")]

    sources = [source for words in own for source in words]
    assert "packages" in sources
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_the_image_has_two_stages_runs_as_nobody_special_and_watches_itself() -> None:
    words = instructions()
    names = [one[0] for one in words]

    assert names.count("FROM") == 2
    assert names.index("USER") > max(i for i, name in enumerate(names) if name == "FROM")
    (user,) = [one[1] for one in words if one[0] == "USER"]
    assert user.isdecimal()
    assert int(user) > 0
    (check,) = [one for one in words if one[0] == "HEALTHCHECK"]
    assert "/health" in " ".join(check)
    (stop,) = [one[1] for one in words if one[0] == "STOPSIGNAL"]
    assert stop == "SIGTERM"


def test_the_image_runs_the_program_with_flags_that_exist() -> None:
    lists = {
        one[0]: json.loads(one[1]) for one in instructions() if one[0] in ("ENTRYPOINT", "CMD")
    }

    assert lists["ENTRYPOINT"] == ["lora-server", "serve"]
    assert options_of(lists["CMD"]).keys() <= FLAGS


@pytest.mark.parametrize("name", ["Dockerfile", "lora-server.service", "kubernetes.yaml"])
def test_every_variable_of_the_server_exists(name: str) -> None:
    text = (DEPLOY / name).read_text()
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]

    used = set(re.findall(rf"\b{ENV_PREFIX}[A-Z_]+", "\n".join(lines)))
    assert used <= VARIABLES


def test_systemds_unit_uses_flags_that_exist_and_waits_longer_than_the_drain() -> None:
    (start,) = unit()["ExecStart"]
    program, command, *arguments = shlex.split(start)
    options = options_of(arguments)

    assert (Path(program).name, command) == ("lora-server", "serve")
    assert options.keys() <= FLAGS
    assert unit()["KillSignal"] == ["SIGTERM"]
    (stop,) = unit()["TimeoutStopSec"]
    assert float(stop) >= float(options["--drain-timeout"]) + _END_S
    # SIGHUP would end a server without a file of keys
    assert "--api-key-file" in options
    assert unit()["ExecReload"] == ["/bin/kill -HUP $MAINPID"]


def test_kubernetes_uses_options_that_resolve(tmp_path: Path) -> None:
    arguments = container()["args"]
    options = options_of(arguments)
    adapter = tmp_path / "sql"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text("{}")

    assert options.keys() <= FLAGS
    named = {flag[2:].replace("-", "_"): value for flag, value in options.items()}
    named |= {"model": arguments[0], "lora_dir": str(tmp_path)}
    secrets = {entry["name"]: "k" for entry in container()["env"] if "valueFrom" in entry}
    secrets["LORA_SERVER_ADMIN_API_KEY"] = "m"
    config = resolve(named, environ=secrets).config
    assert config.drain_timeout == 60
    assert config.admin_api_key == "m"


def test_kubernetes_waits_longer_than_the_drain() -> None:
    spec = objects()["Deployment"]["spec"]["template"]["spec"]
    (pause,) = container()["lifecycle"]["preStop"]["exec"]["command"][1:]
    drain = options_of(container()["args"])["--drain-timeout"]

    assert spec["terminationGracePeriodSeconds"] >= float(pause) + float(drain) + _END_S


def test_kubernetes_asks_the_probes_that_there_are() -> None:
    paths = {
        kind: container()[f"{kind}Probe"]["httpGet"]["path"]
        for kind in ("startup", "readiness", "liveness")
    }

    assert paths == {
        "startup": "/health",
        "readiness": "/health",
        "liveness": "/health?live=true",
    }


def test_kubernetes_makes_no_variables_that_the_server_would_take_for_its_own() -> None:
    spec = objects()["Deployment"]["spec"]["template"]["spec"]

    assert spec["enableServiceLinks"] is False
    assert spec["securityContext"]["runAsNonRoot"] is True


def test_the_service_finds_the_pods() -> None:
    deployment, service = objects()["Deployment"], objects()["Service"]
    (port,) = service["spec"]["ports"]

    assert service["spec"]["selector"] == deployment["spec"]["template"]["metadata"]["labels"]
    assert port["targetPort"] in {found["name"] for found in container()["ports"]}


@pytest.mark.parametrize("name", ["deploy.md", "observe.md"])
def test_every_flag_that_the_pages_name_exists(name: str) -> None:
    text = (DEPLOY.parent / name).read_text()
    of_others = {"--gpus", "--stop-timeout", "--system", "--home-dir", "--now"}

    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - of_others
    assert len(named) > 3
    assert named <= FLAGS
