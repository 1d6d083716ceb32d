"""`lora-server bench` against a real server: who was asked, what came back, what is written."""

from __future__ import annotations

import json
import re
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from support.server import BASE_NAME

from lora_server.cli.bench.client import Answer
from lora_server.cli.bench.plots import in_flight
from lora_server.cli.main import main

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.fixture_types import StartServer
    from support.server import Server
    from support.worlds import World

ADAPTERS = ("a00", "a01", "a02")
INPUT, OUTPUT = 12, 5


@pytest.fixture(scope="module")
def server(llama: World, start_server: StartServer) -> Iterator[Server]:
    with start_server(llama, *llama.lora_modules(*ADAPTERS), "--max-loras", "2") as running:
        yield running


def bench(server: Server, *flags: str) -> int:
    sizes = ["--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT)]
    return main(["bench", "--base-url", server.url, "--vocab-size", "270", *sizes, *flags])


def tokens_of(server: Server, name: str) -> float:
    return server.metric("lora_server_generation_tokens_total", adapter=name)


def test_a_trace_is_replayed_on_a_real_server_and_counted_by_both_sides(
    server: Server, tmp_path: Path
) -> None:
    trace, output = tmp_path / "trace.jsonl", tmp_path / "figures.json"
    lines = [
        {"at": 0.02 * i, "adapter": (None, *ADAPTERS)[i % 4], "output_tokens": 3 + i % 2}
        for i in range(20)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = {BASE_NAME: "base", **{name: name for name in ADAPTERS}}
    assert bench(server, "--lora-modules", *ADAPTERS, "--include-base", "--num-prompts", "4") == 0
    before = {name: tokens_of(server, label) for name, label in names.items()}

    status = bench(server, "--trace", str(trace), "--output", str(output))

    figures = json.loads(output.read_text())
    counted = {name: tokens_of(server, label) - before[name] for name, label in names.items()}
    assert status == 0
    assert figures["requests_per_model"] == dict.fromkeys(sorted(names), 5)
    asked: Counter[str] = Counter()
    for line in lines:
        asked[str(line["adapter"] or BASE_NAME)] += int(str(line["output_tokens"]))
    for name in names:
        assert figures["per_model"][name]["output_tokens"] == asked[name]
        # the short request that loads each model is in the server's count alone
        assert counted[name] == asked[name] + 3 + (list(names).index(name) % 2)
    assert figures["duration_s"] >= 0.38
    assert figures["tokens_counted_by"] == "server"
    assert figures["short_answers"] == 0


def test_zipf_arrivals_and_goodput_come_with_a_report_and_its_plots(
    server: Server, tmp_path: Path
) -> None:
    report, output = tmp_path / "report.md", tmp_path / "figures.json"

    status = bench(
        server,
        *("--lora-modules", *ADAPTERS, "--popularity", "zipf", "--zipf-s", "1.2"),
        *("--num-prompts", "24", "--request-rate", "300", "--burstiness", "0.5"),
        *("--repeat", "2", "--warmup", "3", "--goodput", "ttft:60000", "tpot:60000"),
        *("--output", str(output), "--report", str(report)),
    )

    figures = json.loads(output.read_text())
    text = report.read_text()
    assert status == 0
    assert figures["completed"] == 48
    assert figures["goodput"]["good"] == 48
    plots = re.findall(r"!\[[^]]+\]\(([^)]+)\)", text)
    assert plots == [f"report-{name}.svg" for name in ("latency", "models", "timeline")]
    for plot in plots:
        root = ET.fromstring((tmp_path / plot).read_text())
        assert root.tag.endswith("svg")
        assert len(list(root.iter())) > 50
    for name in figures["per_model"]:
        assert f"| {name} |" in text
    assert f"{figures['output_tokens_per_s']:.2f}" in text
    assert f"slowest in time to first token: {figures['worst_model']['ttft_ms']}" in text


def test_two_tests_of_one_server_are_compared(
    server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = [str(tmp_path / name) for name in ("a.json", "b.json")]
    for path, seed in zip(paths, ("1", "2"), strict=True):
        flags = ["--num-prompts", "6", "--repeat", "3", "--seed", seed, "--output", path]
        assert bench(server, *flags) == 0
    capsys.readouterr()

    status = main(["bench", "compare", *paths, "--json"])

    result = json.loads(capsys.readouterr().out)
    figures = [json.loads(Path(path).read_text()) for path in paths]
    assert status == 0
    assert result["num_runs"] == [3, 3]
    assert result["chance"] == pytest.approx(0.1)
    assert result["config"] == {"seed": [1, 2]}
    rate = next(d for d in result["differences"] if d["figure"] == "output_tokens_per_s")
    before, after = (one["output_tokens_per_s"] for one in figures)
    assert rate["ratio"] == pytest.approx(after / before)
    runs = [[run["output_tokens_per_s"] for run in one["runs"]] for one in figures]
    is_apart = max(runs[0]) < min(runs[1]) or max(runs[1]) < min(runs[0])
    assert rate["noise"] == ("beyond" if is_apart else "within")


def test_a_report_of_nothing_but_failures_has_no_plots(server: Server, tmp_path: Path) -> None:
    report = tmp_path / "report.md"

    # longer than the model's context: every request is refused, the short warm-up is not
    flags = ["--num-prompts", "3", "--random-output-len", "250", "--report", str(report)]
    status = bench(server, *flags)

    assert status == 1
    assert "3 x " in report.read_text()
    assert list(tmp_path.iterdir()) == [report]


def test_open_requests_are_counted_from_their_begins_and_ends() -> None:
    spans = [(0.0, 2.0), (1.0, 3.0), (1.5, 0.25)]
    answers = [Answer(model="a", sent_s=at, duration_s=length) for at, length in spans]

    moments, counts = in_flight(answers)

    assert moments == [0.0, 1.0, 1.5, 1.75, 2.0, 4.0]
    assert counts == [1, 2, 3, 2, 1, 0]
