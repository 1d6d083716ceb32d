"""The demo's parts: its child process, its batch over HTTP, its table and its verdict."""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import shlex
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from rich.console import Console
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lora_server.cli.arguments import add_config_flags, read_config
from lora_server.cli.demo_batch import (
    PROMPTS,
    Answers,
    ask_all,
    curl_lines,
    print_answers,
    same_answers,
)
from lora_server.cli.demo_child import free_port, run_child, serve_command
from lora_server.cli.serve import bind_address
from lora_server.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.requests import Request

MODELS = ("base", "support", "contract", "sql")

SLOW_START = """
import sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    count = 0
    def do_GET(self):
        Handler.count += 1
        self.send_response(200 if Handler.count > 2 else 503)
        self.end_headers()
    def log_message(self, *args):
        pass

HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""

PARENT = """
import sys
from lora_server.cli.demo_child import run_child
try:
    with run_child([sys.executable, "-c", "import time; time.sleep(60)"]) as child:
        print(child._process.pid, flush=True)
        child.wait()
except KeyboardInterrupt:
    sys.exit(0)
"""


def answers_of(**changed: str) -> Answers:
    texts = {(p, m): f"{m} says something about it" for p in PROMPTS for m in MODELS}
    texts.update({(PROMPTS[1], model): text for model, text in changed.items()})
    return Answers(texts=texts, seconds=1.5)


class Chat:
    """Answers once all the requests it waits for are there."""

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.bodies: list[dict[str, Any]] = []
        self.all_are_there = asyncio.Event()
        self.app = Starlette(routes=[Route("/v1/chat/completions", self.chat, methods=["POST"])])

    async def chat(self, request: Request) -> Response:
        body = await request.json()
        self.bodies.append(body)
        if body["model"] == "sql":
            return JSONResponse({"error": {"message": "no sql"}}, status_code=404)
        if len(self.bodies) >= self.expected:
            self.all_are_there.set()
        await self.all_are_there.wait()
        text = f" {body['model']}: {body['messages'][0]['content']}\n"
        return JSONResponse({"choices": [{"message": {"role": "assistant", "content": text}}]})


@contextmanager
def running(app: Starlette) -> Iterator[str]:
    listener = bind_address("127.0.0.1", 0)
    runner = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", ws="none"))
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


def test_every_prompt_is_asked_of_every_model_at_the_same_time() -> None:
    chat = Chat(expected=4)
    with running(chat.app) as url:
        answers = asyncio.run(ask_all(url, ("base", "support"), ("one?", "two?")))

    assert answers.texts["two?", "support"] == "support: two?"
    assert len(answers.texts) == 4
    for body in chat.bodies:
        assert body["temperature"] == 0
        assert body["max_tokens"] == 48


def test_requests_that_fail_are_all_named() -> None:
    chat = Chat(expected=0)
    with running(chat.app) as url, pytest.raises(StartupError) as caught:
        asyncio.run(ask_all(url, ("base", "sql"), ("one?", "two?")))

    assert len(caught.value.problems) == 2
    for problem, prompt in zip(caught.value.problems, ("one?", "two?"), strict=True):
        assert problem.startswith(f"'sql', '{prompt}'")
        assert "no sql" in problem


def test_answers_that_all_differ_are_no_problem() -> None:
    assert same_answers(answers_of(), MODELS) == []


def test_an_adapter_that_answers_like_the_base_or_another_is_named() -> None:
    like_base = same_answers(answers_of(sql="base says something about it"), MODELS)
    like_another = same_answers(answers_of(sql="x", contract="x"), MODELS)

    assert like_base == [f"'sql' answers like 'base': {PROMPTS[1]!r}"]
    assert like_another == [f"'sql' answers like 'contract': {PROMPTS[1]!r}"]


@pytest.mark.parametrize("width", [80, 200])
def test_answers_stand_side_by_side_in_the_width_there_is(width: int) -> None:
    stream = io.StringIO()
    answers = answers_of(sql="SELECT [bold]name[/bold] FROM a_table_with_a_very_long_name_indeed;")

    print_answers(answers, MODELS, console=Console(file=stream, width=width))

    lines = stream.getvalue().splitlines()
    assert max(map(len, lines)) <= width
    headers = [line for line in lines if line.replace("┃", " ").split() == list(MODELS)]
    assert len(headers) == len(PROMPTS)
    assert "[bold]" in stream.getvalue()
    assert lines[-1] == "12 answers in one mixed batch, 1.5 s"


def test_the_commands_to_go_on_with_are_valid_for_a_shell() -> None:
    lines = [line for line in curl_lines("http://h:1", MODELS) if line.startswith("curl")]

    bodies = []
    for line in lines[1:]:
        words = shlex.split(line)
        assert words[2] == "http://h:1/v1/chat/completions"
        bodies.append(json.loads(words[words.index("-d") + 1]))
    assert [body.get("model") for body in bodies] == [*MODELS, "support", None]
    assert bodies[-2]["stream"] is True
    assert "X-Use-LoRA: sql" in lines[-1]


def test_the_child_is_started_with_flags_that_serve_understands(tmp_path: Path) -> None:
    model = tmp_path / "a model"
    adapters = {"x": tmp_path / "with, comma", "y": tmp_path / "b"}
    command = serve_command(model, adapters, port=5)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_config_flags(parser)

    assert command[:4] == [sys.executable, "-m", "lora_server.cli.main", "serve"]
    config = read_config(*parser.parse_known_args(command[4:]), environ={}).config

    assert (config.model, config.port, config.base_names) == (str(model), 5, ("a model",))
    assert {m.name: Path(m.path) for m in config.lora_modules} == adapters


def test_the_child_is_awaited_until_it_is_healthy_and_ended_with_the_block() -> None:
    port = free_port()
    with run_child([sys.executable, "-c", SLOW_START, str(port)]) as child:
        child.wait_until_ready(f"http://127.0.0.1:{port}")
        process = child._process
        assert process.poll() is None

    assert process.poll() == -signal.SIGTERM


def test_a_child_that_ends_while_it_starts_is_told_with_its_status() -> None:
    with (
        run_child([sys.executable, "-c", "import sys; sys.exit(3)"]) as child,
        pytest.raises(StartupError, match="status 3"),
    ):
        child.wait_until_ready("http://127.0.0.1:9")


def test_a_child_that_never_is_ready_is_given_up() -> None:
    with (
        run_child([sys.executable, "-c", "import time; time.sleep(60)"]) as child,
        pytest.raises(StartupError, match="not ready after 0"),
    ):
        child.wait_until_ready(f"http://127.0.0.1:{free_port()}", timeout_s=0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_the_demo_ends_its_child_too(number: signal.Signals) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())

    parent.send_signal(number)

    assert parent.wait(20) == 0
    assert not Path(f"/proc/{child}").exists()
    parent.stdout.close()
