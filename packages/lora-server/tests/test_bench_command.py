"""The load test against a real server on loopback: what it sends, counts, reports and survives."""

from __future__ import annotations

import asyncio
import json
import socket
import sys
import threading
import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from lora_server.cli.bench.command import adapter_names
from lora_server.cli.main import main
from lora_server.cli.serve import bind_address

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator
    from pathlib import Path

    from starlette.requests import Request

BASE, ADAPTERS = "base-model", ("a", "b")


class Server:
    """Streams as many one-token events as it is asked for, and remembers what was asked."""

    def __init__(self, mode: str = "plain") -> None:
        self.mode = mode
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self.in_flight = 0
        self.most_in_flight = 0
        routes = [
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
        ]
        self.app = Starlette(routes=routes)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"data": [{"id": BASE}, *({"id": name} for name in ADAPTERS)]})

    async def completions(self, request: Request) -> Response:
        body = await request.json()
        self.keys.add(request.headers.get("authorization"))
        if body["model"] not in (BASE, *ADAPTERS):
            message = f"model '{body['model']}' does not exist"
            return JSONResponse({"error": {"message": message}}, status_code=404)
        self.bodies.append(body)
        return StreamingResponse(self.events(body), media_type="text/event-stream")

    async def events(self, body: dict[str, Any]) -> AsyncIterator[str]:
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            count = body["max_tokens"]
            is_late = self.mode == "slow" and count > 4
            for _ in range(count):
                await asyncio.sleep(60 if is_late else 0.002)
                yield 'data: {"id": "x", "choices": [{"index": 0, "text": "é"}], "usage": null}\n\n'
            if self.mode == "broken" and count > 4:
                yield 'data: {"error": {"message": "the step failed"}}\n\n'
                return
            if self.mode != "silent":
                usage = json.dumps({"completion_tokens": count})
                yield f'data: {{"id": "x", "choices": [], "usage": {usage}}}\r\n\r\n'
            yield "data: [DONE]\n\n"
        finally:
            self.in_flight -= 1


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


def bench(url: str, *flags: str) -> int:
    base = ["bench", "--base-url", url, "--num-prompts", "12", "--max-concurrency", "3"]
    return main([*base, "--random-input-len", "9", "--random-output-len", "6", *flags])


def test_a_load_test_of_adapters_reports_its_figures_in_a_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "figures.json"
    server = Server()
    with running(server) as url:
        status = bench(
            f"{url}/v1",
            *("--model", BASE, "--lora-modules", "a=/some/path", "b"),
            *("--popularity", "distinct", "--output", str(output), "--api-key", "K"),
        )

    assert status == 0
    figures = json.loads(output.read_text())
    assert (figures["completed"], figures["failed"], figures["errors"]) == (12, 0, [])
    assert figures["output_tokens"] == 72
    assert figures["output_tokens_per_s"] == pytest.approx(72 / figures["duration_s"])
    assert figures["requests_per_model"] == {"a": 6, "b": 6}
    assert figures["tokens_counted_by"] == "server"
    for latency in ("ttft_ms", "tpot_ms", "itl_ms"):
        assert set(figures[latency]) == {"mean", "p50", "p90", "p99"}
        assert set(figures["runs"][0][latency]) == {"mean", "p50", "p90", "p99"}
        assert figures[latency]["mean"] >= 1
    assert figures["config"]["popularity"] == "distinct"
    assert figures["config"]["request_rate"] == "inf"
    assert "K" not in json.dumps(figures["config"]).split('"')
    assert set(figures["machine"]) == {"cpu", "cores", "python", "platform"}
    assert "output tokens/s" in capsys.readouterr().out
    assert server.keys == {"Bearer K"}


def test_each_model_is_warmed_up_once_and_then_asked_within_the_concurrency() -> None:
    server = Server()
    with running(server) as url:
        status = bench(url, "--lora-modules", "a,b", "--include-base", "--popularity", "distinct")

    assert status == 0
    warm_ups, requests = server.bodies[:3], server.bodies[3:]
    assert [
        (body["model"], body["max_tokens"])
        for body in sorted(warm_ups, key=lambda body: body["model"])
    ] == [("a", 4), ("b", 4), (BASE, 4)]
    assert len(requests) == 12
    for body in requests:
        assert len(body["prompt"]) == 9
        assert all(isinstance(token, int) for token in body["prompt"])
        assert body["max_tokens"] == 6
        assert body["temperature"] == 0
        assert body["ignore_eos"] is True
        assert body["stream"] is True
        assert body["stream_options"] == {"include_usage": True}
    assert server.most_in_flight == 3


def test_the_base_is_found_and_asked_when_no_adapter_is_named() -> None:
    server = Server()
    with running(server) as url:
        assert bench(url, "--no-ignore-eos") == 0

    assert {body["model"] for body in server.bodies} == {BASE}
    assert not any("ignore_eos" in body for body in server.bodies)


def test_events_are_counted_where_the_server_reports_no_usage(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    with running(Server("silent")) as url:
        assert bench(url, "--output", str(output)) == 0

    figures = json.loads(output.read_text())
    assert figures["output_tokens"] == 72
    assert figures["tokens_counted_by"] == "events"


def test_an_unknown_adapter_ends_the_test_with_the_servers_words(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with running(Server()) as url:
        status = bench(url, "--lora-modules", "a", "c", "--popularity", "distinct")

    assert status == 1
    assert "warm-up of 'c' failed: 404: model 'c' does not exist" in capsys.readouterr().err


def test_a_failure_in_a_stream_is_an_error_of_its_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "figures.json"
    with running(Server("broken")) as url:
        status = bench(url, "--output", str(output))

    assert status == 1
    figures = json.loads(output.read_text())
    assert figures["errors"] == [{"message": "the step failed", "count": 12}]
    assert "12 x the step failed" in capsys.readouterr().err


def test_the_test_is_bounded_in_time(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    begin = time.monotonic()
    with running(Server("slow")) as url:
        status = bench(url, "--timeout", "1", "--output", str(output))

    assert status == 1
    assert time.monotonic() - begin < 10
    (error,) = json.loads(output.read_text())["errors"]
    assert error["count"] == 12
    assert "--timeout" in error["message"]


def test_a_server_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

    assert bench(f"http://127.0.0.1:{port}") == 1
    assert "cannot be reached" in capsys.readouterr().err


def test_a_missing_folder_for_the_figures_is_told_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench("http://127.0.0.1:9", "--output", str(tmp_path / "no" / "f.json")) == 1
    assert "the folder does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("item", "names"), [("a", ["a"]), ("a=/p", ["a"]), ("a,b=/q,", ["a", "b"])]
)
def test_names_are_read_from_every_form(item: str, names: list[str]) -> None:
    assert adapter_names(item) == names


def test_a_warm_up_and_every_run_bring_prompts_that_the_server_has_not_seen(
    tmp_path: Path,
) -> None:
    output = tmp_path / "figures.json"
    server = Server()
    with running(server) as url:
        status = bench(url, "--warmup", "5", "--repeat", "3", "--output", str(output))

    assert status == 0
    assert len(server.bodies) == 1 + 5 + 3 * 12
    assert [body["max_tokens"] for body in server.bodies[:2]] == [4, 6]
    prompts = [tuple(body["prompt"]) for body in server.bodies[1:]]
    assert len(set(prompts)) == len(prompts)
    figures = json.loads(output.read_text())
    assert (figures["completed"], len(figures["runs"])) == (36, 3)
    assert [run["completed"] for run in figures["runs"]] == [12, 12, 12]


def test_more_warm_ups_than_requests_begin_again() -> None:
    server = Server()
    with running(server) as url:
        assert bench(url, "--num-warmups", "30") == 0

    assert len(server.bodies) == 1 + 30 + 12


def test_a_saved_trace_is_replayed_with_the_same_models_and_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    first, second = Server(), Server()
    flags = ["--lora-modules", "a", "b", "--popularity", "zipf", "--include-base", "--zipf-s", "1"]
    with running(first) as url:
        rate = ["--request-rate", "400", "--burstiness", "0.5"]
        assert bench(url, *flags, *rate, "--save-trace", str(trace)) == 0
    with running(second) as url:
        assert bench(url, "--trace", str(trace), "--random-output-len", "2") == 0

    def shape(server: Server) -> list[tuple[str, int, int]]:
        sent = server.bodies[-12:]
        return sorted((b["model"], len(b["prompt"]), b["max_tokens"]) for b in sent)

    assert len(trace.read_text().splitlines()) == 12
    assert shape(first) == shape(second)


def test_a_trace_keeps_its_times_and_is_cut_where_fewer_are_asked_for(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    lines = [{"at": 100 + 0.3 * i, "adapter": "a", "output_tokens": 1} for i in range(4)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    output = tmp_path / "figures.json"
    server = Server()
    with running(server) as url:
        base = ["bench", "--base-url", url, "--trace", str(trace), "--num-prompts", "3"]
        assert main([*base, "--output", str(output)]) == 0

    figures = json.loads(output.read_text())
    assert figures["completed"] == 3
    assert figures["duration_s"] >= 0.6


def test_goodput_is_counted_where_it_is_asked_for(tmp_path: Path) -> None:
    output = tmp_path / "figures.json"
    with running(Server()) as url:
        assert bench(url, "--goodput", "ttft:60000", "e2el:0.001", "--output", str(output)) == 0
        none = json.loads(output.read_text())["goodput"]
        assert bench(url, "--goodput", "ttft:60000", "--output", str(output)) == 0
        all_of_them = json.loads(output.read_text())["goodput"]

    assert (none["good"], all_of_them["good"]) == (0, 12)
    assert all_of_them["objectives_ms"] == {"ttft": 60000}


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--trace", "TRACE", "--request-rate", "3"], "--request-rate: the trace"),
        (["--trace", "TRACE", "--lora-modules", "a"], "--lora-modules: the trace"),
        (["--burstiness", "2"], "--burstiness needs a finite --request-rate"),
        (["--save-trace", "/no/such/folder/t"], "--save-trace '/no/such/folder/t'"),
        (["--report", "/no/such/folder/r.md"], "--report '/no/such/folder/r.md'"),
        (["--trace", "/absent.jsonl"], "--trace /absent.jsonl"),
    ],
)
def test_flags_that_contradict_each_other_are_told_before_anything_is_sent(
    flags: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "t").write_text('{"at": 0}\n')

    status = bench(
        "http://127.0.0.1:9", *(str(tmp_path / "t") if f == "TRACE" else f for f in flags)
    )

    assert status == 1
    assert words in capsys.readouterr().err


def test_a_report_without_matplotlib_is_told_before_anything_is_sent(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)

    status = bench("http://127.0.0.1:9", "--report", str(tmp_path / "r.md"))

    assert status == 1
    assert "lora-server[bench]" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["ttft", "ttft:", "ttft:x", "ttft:0", "ttft:inf", "other:5"])
def test_what_is_no_objective_is_refused(text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        bench("http://127.0.0.1:9", "--goodput", text)

    assert caught.value.code == 2
    assert "such as ttft:500" in capsys.readouterr().err
