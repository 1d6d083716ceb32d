"""`lora-server smoke` against servers of several kinds on loopback: files, words and statuses."""

from __future__ import annotations

import json
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lora_server.cli.main import main
from lora_server.cli.serve import bind_address
from lora_server.smoke.baseline import read_baseline

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from starlette.requests import Request


class Server:
    """Answers every prompt of a model with the model's own words."""

    def __init__(self, **words: str) -> None:
        self.words = {"base": "the base says", **words}
        self.digests: dict[str, str] = {}
        self.has_parents = True
        self.gives_logprobs = True
        self.takes_ids = True
        self.failing: set[str] = set()
        self.swaps_after: int | None = None
        """Number of answers after which another version of every adapter answers."""
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def models(self, request: Request) -> Response:
        parents = {
            name: "base" if self.has_parents and name != "base" else None for name in self.words
        }
        return JSONResponse({"data": [{"id": n, "parent": p} for n, p in parents.items()]})

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.keys.add(request.headers.get("authorization"))
        if "return_token_ids" in body and not self.takes_ids:
            return JSONResponse({"error": {"message": "unknown field"}}, status_code=400)
        if body["model"] in self.failing:
            return JSONResponse({"error": {"message": "it broke"}}, status_code=500)
        self.bodies.append(body)
        words = self.words[body["model"]].split()[: body["max_tokens"]]
        logprobs = {
            "tokens": words,
            "token_logprobs": [-0.1 * (i + 1) for i in range(len(words))],
            "top_logprobs": [{word: -0.1 * (i + 1)} for i, word in enumerate(words)],
        }
        choice: dict[str, Any] = {"text": " ".join(words), "logprobs": None}
        if self.gives_logprobs:
            choice["logprobs"] = logprobs
        if body.get("return_token_ids"):
            choice["token_ids"] = [len(word) for word in words]
        digest = self.digests.get(body["model"])
        if digest is not None and self.swaps_after is not None:
            digest = digest if len(self.bodies) <= self.swaps_after else "eeeeeeeeeeee"
        headers = {} if digest is None else {"X-LoRA-Adapter": f"{body['model']}@{digest}"}
        return JSONResponse({"choices": [choice]}, headers=headers)


@contextmanager
def running(server: Server) -> Iterator[str]:
    listener = bind_address("127.0.0.1", 0)
    config = uvicorn.Config(server.app, log_config=None, lifespan="off", ws="none")
    runner = uvicorn.Server(config)
    thread = threading.Thread(target=runner.run, kwargs={"sockets": [listener]}, daemon=True)
    thread.start()
    try:
        while not runner.started:
            time.sleep(0.005)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        runner.force_exit = runner.should_exit = True
        thread.join(10)
        listener.close()


def smoke(action: str, url: str, file: Path, *flags: str) -> int:
    return main(["smoke", action, "--base-url", url, "--file", str(file), *flags])


def test_record_keeps_base_and_adapters_with_tokens_ids_and_digests(tmp_path: Path) -> None:
    server = Server(sql="select it all", chat="hello")
    server.digests = {"sql": "0123456789ab"}
    (tmp_path / "prompts.txt").write_text("one\ntwo\n")
    with running(server) as url:
        status = smoke(
            "record",
            f"{url}/v1",
            tmp_path / "b.json",
            *("--prompts", str(tmp_path / "prompts.txt"), "--max-tokens", "2", "--api-key", "K"),
        )

    assert status == 0
    baseline = read_baseline(tmp_path / "b.json")
    assert list(baseline.models) == ["base", "sql", "chat"]
    assert (baseline.base_name, baseline.max_tokens, baseline.version) == ("base", 2, 1)
    sql = baseline.models["sql"]
    assert (sql.digest, baseline.models["chat"].digest) == ("0123456789ab", None)
    assert [prompt.prompt for prompt in sql.prompts] == ["one", "two"]
    assert sql.prompts[0].text == "select it"
    assert sql.prompts[0].tokens is not None
    assert [(t.text, t.id, t.logprob) for t in sql.prompts[0].tokens] == [
        ("select", 6, -0.1),
        ("it", 2, -0.2),
    ]
    assert server.keys == {"Bearer K"}
    assert {(b["temperature"], b["max_tokens"], b["logprobs"]) for b in server.bodies} == {
        (0, 2, 5)
    }


def test_check_passes_then_names_adapter_prompt_and_token_after_an_update(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(sql="select it all", chat="hello")
    server.digests = {"sql": "0123456789ab", "chat": "aaaaaaaaaaaa"}
    file = tmp_path / "b.json"
    with running(server) as url:
        assert smoke("record", url, file) == 0
        before = smoke("check", url, file)
        passed = capsys.readouterr().out
        server.words["sql"] = "select from all"
        server.digests["sql"] = "ffffffffffff"
        after = smoke("check", url, file)
        moved = capsys.readouterr().out
        only_chat = smoke("check", url, file, "--adapter", "chat")

    assert (before, after, only_chat) == (0, 1, 0)
    assert passed.count("ok ") == 3
    assert "digest 0123456789ab as recorded" in passed
    assert "FAILED sql: 8 moved of 8 prompts" in moved
    assert "the digest changed from 0123456789ab to ffffffffffff" in moved
    assert "moved at token 2: recorded 'it' (-0.2000), found 'from' (-0.2000)" in moved
    assert "ok     chat" in moved


def test_the_result_as_json_stands_alone_on_stdout(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(sql="select it all", old="x")
    file = tmp_path / "b.json"
    with running(server) as url:
        smoke("record", url, file)
        del server.words["old"]
        server.words["new"] = "y"
        server.words["sql"] = "select"
        capsys.readouterr()
        status = smoke("check", url, file, "--json")

    result = json.loads(capsys.readouterr().out)
    assert (status, result["passed"]) == (1, False)
    assert (result["not_served"], result["not_recorded"]) == (["old"], ["new"])
    first = result["models"]["sql"]["prompts"][0]
    assert (first["verdict"], first["position"], first["found"]) == ("moved", 1, None)
    assert first["recorded"]["text"] == "it"


def test_a_tolerance_on_the_command_line_goes_before_the_files(tmp_path: Path) -> None:
    file = tmp_path / "b.json"
    with running(Server()) as url:
        smoke("record", url, file)
        content = json.loads(file.read_text())
        for prompt in content["models"]["base"]["prompts"]:
            prompt["tokens"][0]["logprob"] += 0.08
        file.write_text(json.dumps(content))
        strict = smoke("check", url, file)
        wide = smoke("check", url, file, "--tolerance", "0.1")
        content["rules"]["tolerance"] = 0.2
        file.write_text(json.dumps(content))
        by_file = smoke("check", url, file)

    assert (strict, wide, by_file) == (1, 0, 0)


def test_a_server_without_ids_parents_and_digests_will_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(other="something else")
    server.takes_ids = server.has_parents = False
    file = tmp_path / "b.json"
    with running(server) as url:
        status = smoke("record", url, file, "--adapter", "base", "other")
        again = smoke("check", url, file)

    assert (status, again) == (0, 0)
    baseline = read_baseline(file)
    assert list(baseline.models) == ["base", "other"]
    assert baseline.models["other"].prompts[0].tokens is not None
    assert baseline.models["other"].prompts[0].tokens[0].id is None
    assert "; no digest" in capsys.readouterr().out


def test_nothing_is_written_when_an_adapter_does_not_answer_or_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(sql="select")
    server.failing = {"sql"}
    with running(server) as url:
        status = smoke("record", url, tmp_path / "b.json")

    assert status == 1
    assert not (tmp_path / "b.json").exists()
    error = capsys.readouterr().err
    assert error.count("'sql': prompt ") == 8
    assert "500: it broke" in error


def test_an_adapter_that_no_longer_answers_fails_the_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(sql="select")
    file = tmp_path / "b.json"
    with running(server) as url:
        smoke("record", url, file)
        server.failing = {"sql"}
        status = smoke("check", url, file)

    assert status == 1
    assert "500: it broke" in capsys.readouterr().out


def test_a_server_without_logprobs_has_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server()
    server.gives_logprobs = False
    with running(server) as url:
        status = smoke("record", url, tmp_path / "b.json")

    assert status == 2
    assert "without log-probabilities" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("action", "flags", "words"),
    [
        ("record", ["--adapter", "nobody"], "not served: 'nobody'"),
        ("record", ["--prompts", "/absent"], "/absent"),
        ("check", ["--adapter", "nobody"], "not recorded: 'nobody'"),
    ],
)
def test_names_and_files_that_do_not_exist_have_status_2(
    action: str, flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "b.json"
    with running(Server()) as url:
        smoke("record", url, file)
        status = smoke(action, url, file, *flags)

    assert status == 2
    assert words in capsys.readouterr().err


def test_a_missing_baseline_folder_or_server_has_status_2(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    listener = bind_address("127.0.0.1", 0)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    listener.close()

    statuses = [
        smoke("check", url, tmp_path / "absent.json"),
        smoke("record", url, tmp_path / "no" / "b.json"),
        smoke("record", url, tmp_path / "b.json"),
    ]

    assert statuses == [2, 2, 2]
    error = capsys.readouterr().err
    for words in ("No such file", "the folder does not exist", "cannot be reached"):
        assert words in error


@pytest.mark.parametrize("flags", [["--tolerance", "-1"], ["--tolerance", "x"], ["--what"]])
def test_flags_that_are_not_understood_have_status_2(flags: list[str], tmp_path: Path) -> None:
    with pytest.raises(SystemExit) as caught:
        smoke("check", "http://127.0.0.1:9", tmp_path / "b.json", *flags)

    assert caught.value.code == 2


def test_a_version_that_changes_meanwhile_is_neither_recorded_nor_passed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = Server(sql="select")
    server.digests = {"sql": "0123456789ab"}
    file = tmp_path / "b.json"
    with running(server) as url:
        smoke("record", url, file)
        server.swaps_after = len(server.bodies) + 5
        statuses = [smoke("record", url, tmp_path / "other.json", "--adapter", "sql")]
        recorded = capsys.readouterr().err
        server.swaps_after = len(server.bodies) + 5
        statuses.append(smoke("check", url, file, "--adapter", "sql"))
        checked = capsys.readouterr().out

    assert statuses == [1, 1]
    assert "the version changed while it was recorded" in recorded
    assert not (tmp_path / "other.json").exists()
    assert "5 same, 3 failed of 8 prompts" in checked
    assert "the version changed meanwhile, from sql@0123456789ab to sql@eeeeeeeeeeee" in checked
