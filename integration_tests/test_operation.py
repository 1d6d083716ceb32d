"""A real server as its operators see it: metrics, log lines, traces, and its end on SIGTERM."""

from __future__ import annotations

import json
import re
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from support.collector import Collector, attributes, collecting
from support.requests import body, complete, load, refusal, unload
from support.server import BASE_NAME, END_WITHIN_S

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.fixture_types import StartServer
    from support.server import Server
    from support.worlds import World

DASHBOARD = Path(__file__).parents[1] / "docs" / "how-to" / "grafana-dashboard.json"
SECRET = "the diary of a stranger"
TRACE_ID, SPAN_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = {"traceparent": f"00-{TRACE_ID}-{SPAN_ID}-01"}
MANY: dict[str, Any] = {"max_tokens": 200, "n": 32, "temperature": 1, "seed": 1}
"""Far more work than what the tests do while it runs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Day:
    """One life of a server, all of it told afterwards."""

    text: str
    """Its metrics, shortly before its end."""
    lines: list[dict[str, Any]]
    log: str
    collector: Collector
    digests: dict[str, str]


@pytest.fixture(scope="module")
def day(llama: World, start_server: StartServer) -> Iterator[Day]:
    """Two adapters in one slot, an update, an unload, a failed load, and an unhappy request."""
    flags = ["--max-loras", "1", "--max-cpu-loras", "2", "--max-lora-rank", "32"]
    flags += ["--adapter-root", str(llama.folder), "--log-format", "json", "--log-level", "debug"]
    flags += ["--thrash-window", "2"]
    with collecting() as collector:
        flags += ["--otlp-traces-endpoint", collector.url]
        with start_server(llama, *llama.lora_modules("a03", "a09"), *flags) as server:
            digests = live_through(server, llama)
            text = server.http.get("/metrics").text
        log = server.log.read_text()
        yield Day(
            text=text,
            lines=[json.loads(line) for line in log.splitlines()],
            log=log,
            collector=collector,
            digests=digests,
        )


def live_through(server: Server, llama: World) -> dict[str, str]:
    http = server.http
    headers = {"X-Request-Id": "load-1", **PARENT}
    content: dict[str, Any] = {"lora_name": "new", "lora_path": str(llama.adapters["a05"])}
    first = http.post("/v1/load_lora_adapter", json=content, headers=headers).raise_for_status()
    content |= {"lora_path": str(llama.adapters["a07"]), "load_inplace": True}
    second = http.post("/v1/load_lora_adapter", json=content).raise_for_status()
    http.post(
        "/v1/completions",
        json=body("new", prompt=SECRET),
        headers={"X-Request-Id": "ask-1", **PARENT},
    ).raise_for_status()
    unload(http, "new").raise_for_status()
    refusal(load(http, "none", llama.folder / "nothing"), 404, "adapter_not_found")
    refusal(
        http.post("/v1/completions", json=body("nobody", prompt=SECRET)), 404, "model_not_found"
    )
    assert (
        http.post("/v1/completions", json=body(prompt=SECRET, max_tokens=9999)).status_code == 400
    )
    complete(http, prompt=list(range(20, 70)))
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: complete(http, ("a03", "a09")[i % 2]), range(16)))
    deadline = time.monotonic() + 20
    while "evict each other" not in server.log.read_text() and time.monotonic() < deadline:
        for name in ("a03", "a09"):
            complete(http, name, max_tokens=1)
    cards = {"first": first.json(), "second": second.json()}
    return {name: card["lora"]["digest"] for name, card in cards.items()}


def values(day: Day, name: str, **labels: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(day.text)
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


def lines_of(day: Day, message: str, **fields: object) -> list[dict[str, Any]]:
    found = [line for line in day.lines if line["message"] == message]
    return [line for line in found if fields.items() <= line.items()]


def test_loads_waits_evictions_and_tokens_are_counted(day: Day) -> None:
    assert values(day, "lora_server_adapter_load_time_seconds_count", stage="disk") >= 4
    assert values(day, "lora_server_adapter_load_time_seconds_count", stage="slot") >= 8
    assert values(day, "lora_server_adapter_slot_wait_seconds_count") > 0
    assert values(day, "lora_server_adapter_cache_evictions_total", tier="device") > 8
    assert values(day, "lora_server_adapter_cache_misses_total", tier="device") > 8
    for name in ("a03", "a09"):
        requests = values(day, "lora_server_requests_total", adapter=name, outcome="ok")
        assert requests >= 8
        assert values(day, "lora_server_generation_tokens_total", adapter=name) >= 8 * requests / 9
        for histogram in ("time_to_first_token", "queue_time", "request_duration"):
            count = values(day, f"lora_server_{histogram}_seconds_count", adapter=name)
            assert count == requests
        assert values(day, "lora_server_prompt_tokens_cached_total", adapter=name) >= 0
    assert values(day, "lora_server_adapter_info", adapter="a03") == 1
    assert 'adapter="new"' not in day.text


def test_too_few_slots_are_told_with_the_remedy(day: Day) -> None:
    (line,) = [line for line in day.lines if "evict each other" in line["message"]]

    assert line["level"] == "warning"
    assert "start with --max-loras 2 --max-cpu-loras" not in line["message"]
    assert "start with --max-loras 2 (" in line["message"]
    assert values(day, "lora_server_adapter_evictions_per_request") > 0.5
    assert values(day, "lora_server_adapter_thrash") == 1


def expressions_of(board: dict[str, Any]) -> list[str]:
    targets = [target for panel in board["panels"] for target in panel.get("targets", [])]
    variables = [variable["query"] for variable in board["templating"]["list"]]
    return [
        *(target["expr"] for target in targets),
        *(query["query"] for query in variables if isinstance(query, dict)),
    ]


def test_every_metric_of_the_dashboard_is_exported_with_the_labels_it_asks_for(day: Day) -> None:
    expressions = expressions_of(json.loads(DASHBOARD.read_text()))
    labels: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(day.text):
        for sample in family.samples:
            labels.setdefault(sample.name, {"job", "instance"}).update(sample.labels)

    asked = [re.findall(r"\b((?:lora_server_|vllm:)\w+)(?:{(.*?)})?", e) for e in expressions]

    assert len(expressions) > 30
    assert all(asked), [e for e, found in zip(expressions, asked, strict=True) if not found]
    for name, matchers in (pair for found in asked for pair in found):
        assert name in labels
        assert set(re.findall(r"(\w+)=~|(\w+)!=", matchers)) <= {
            *((label, "") for label in labels[name]),
            *(("", label) for label in labels[name]),
        }


def test_every_move_of_an_adapter_is_a_line_with_name_digest_time_and_size(day: Day) -> None:
    old, new = (day.digests[name][:12] for name in ("first", "second"))
    moves = [
        lines_of(day, "Loaded LoRA adapter", adapter="new", digest=old, request_id="load-1"),
        lines_of(day, "Updated LoRA adapter", adapter="new", digest=new, replaced=old),
        lines_of(day, "Placed LoRA adapter in a slot", adapter="new", digest=new),
        lines_of(day, "Unloaded LoRA adapter", adapter="new", digest=new),
        lines_of(day, "Evicted LoRA adapter", adapter="a03", tier="device"),
        lines_of(day, "Loaded LoRA adapter", adapter="a09"),
    ]

    for lines in moves:
        assert lines
        assert all(line["ms"] >= 0 and line["bytes"] > 0 for line in lines)
        assert all(len(line["digest"]) == 12 for line in lines)
    assert [len(lines) for lines in moves[:4]] == [1, 1, 1, 1]
    (failed,) = lines_of(day, "Could not load LoRA adapter", adapter="none")
    assert "nothing" in failed["reason"]


def test_every_request_is_a_line_with_its_id_and_no_line_has_a_prompt(day: Day) -> None:
    done = lines_of(day, "Request done", method="POST")

    assert all(line["request_id"] and line["ms"] > 0 for line in done)
    (ask,) = [line for line in done if line["request_id"] == "ask-1"]
    assert (ask["path"], ask["status"]) == ("/v1/completions", 200)
    assert ask["adapter"] == f"new@{day.digests['second'][:12]}"
    assert {line["status"] for line in done} == {200, 400, 404}
    assert SECRET not in day.log
    assert "diary" not in day.log


def test_requests_and_loads_are_spans_below_the_callers(day: Day) -> None:
    spans = [(span, attributes(span)) for span in day.collector.spans]

    (ask,) = [pair for pair in spans if pair[1].get("gen_ai.request.id") == "ask-1"]
    span, told = ask
    assert span.name == "text_completion new"
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE_ID, SPAN_ID)
    assert told["lora.adapter.digest"] == day.digests["second"]
    assert told["gen_ai.usage.output_tokens"] == 8
    assert 0 <= told["gen_ai.latency.time_in_queue"] <= told["gen_ai.latency.time_to_first_token"]
    assert span.end_time_unix_nano > span.start_time_unix_nano
    (loaded,) = [pair for pair in spans if pair[1].get("gen_ai.request.id") == "load-1"]
    assert loaded[0].name == "load_adapter new"
    assert loaded[0].parent_span_id.hex() == SPAN_ID
    assert {told.get("lora.load.stage") for _, told in spans} == {None, "disk", "slot"}
    assert SECRET.encode() not in b"".join(span.SerializeToString() for span, _ in spans)


def finish_reasons(lines: list[str]) -> list[str]:
    chunks = [
        json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")
    ]
    reasons = [choice["finish_reason"] for chunk in chunks for choice in chunk["choices"]]
    return [reason for reason in reasons if reason is not None]


def test_after_sigterm_a_running_stream_finishes_wholly_and_others_are_refused(
    llama: World, start_server: StartServer
) -> None:
    with (
        start_server(llama, *llama.lora_modules("a05"), "--drain-timeout", "60") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body("a05", stream=True, **MANY)) as stream,
    ):
        lines = stream.iter_lines()
        first = next(lines)
        server.signal(signal.SIGTERM)
        assert server.wait_for(lambda: server.http.get("/health").status_code == 503)
        health = server.http.get("/health")
        alive = server.http.get("/health?live=true")
        late = server.http.post("/v1/completions", json=body(BASE_NAME))
        rest = [line for line in lines if line]
        server.process.join(END_WITHIN_S)

    assert "draining" in health.json()["error"]["message"]
    assert (alive.status_code, alive.json()) == (200, {"status": "draining"})
    assert (late.status_code, late.headers["retry-after"]) == (503, "2")
    assert rest[-1] == "data: [DONE]"
    assert finish_reasons([first, *rest]) == ["length"] * 32
    assert server.process.exitcode == 0
    log = server.log.read_text()
    assert "Drained" in log
    assert "Traceback" not in log


def test_a_stream_that_is_too_long_is_cut_at_the_deadline(
    llama: World, start_server: StartServer
) -> None:
    with (
        start_server(llama, *llama.lora_modules("a05"), "--drain-timeout", "0.2") as server,
        httpx.Client(base_url=server.url, timeout=60) as client,
        client.stream("POST", "/v1/completions", json=body("a05", stream=True, **MANY)) as stream,
    ):
        lines = stream.iter_lines()
        next(lines)
        server.signal(signal.SIGTERM)
        rest = [line for line in lines if line]
        server.process.join(END_WITHIN_S)

    assert rest[-1] == "data: [DONE]"
    assert finish_reasons(rest) == ["abort"] * 32
    assert server.process.exitcode == 0
    assert "still run" in server.log.read_text()
