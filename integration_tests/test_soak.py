"""Ten minutes at full load while adapters come, change and go: no error, and flat memory."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import pytest
from support.fleet import Fleet, build_fleet
from support.soak import Soak

if TYPE_CHECKING:
    from support.fixture_types import StartServer
    from support.server import Server

NUM_CLIENTS, NUM_NAMES = 16, 12
FLAGS = (
    *("--max-loras", "4", "--max-cpu-loras", "8", "--max-lora-rank", "8"),
    *("--max-num-seqs", "16", "--max-adapter-wait", "0.3"),
)
MAX_GROWTH_BYTES = 8 * 2**20
"""Growth by the fitted line that cannot be told from the allocator's noise, over any time. In ten
minutes 300 bytes for each request would be ten times that."""


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Fleet:
    return build_fleet(tmp_path_factory.mktemp("fleet"), num_names=NUM_NAMES, num_versions=(2,))


def is_idle(server: Server) -> bool:
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting")
    held = ("lora_server_kv_blocks_used", "lora_server_adapter_slots_leased")
    return all(server.metric(name) == 0 for name in (*names, *held))


@pytest.mark.soak
def test_nothing_fails_and_memory_stays_flat_under_full_load(
    fleet: Fleet, start_server: StartServer, pytestconfig: pytest.Config
) -> None:
    seconds = float(pytestconfig.getoption("--soak-seconds"))
    flags = [*fleet.world.lora_modules(), "--adapter-root", str(fleet.world.folder), *FLAGS]
    with start_server(fleet.world, *flags) as server:
        assert server.process.pid is not None
        soak = Soak(url=server.url, pid=server.process.pid, fleet=fleet, seconds=seconds)
        asyncio.run(soak.run(NUM_CLIENTS))

        report = pytestconfig.get_terminal_writer()
        report.line()
        for name, value in soak.figures().items():
            report.line(f"{name:>20} {value}")
        assert soak.problems == []
        for kind in ("loads", "updates", "unloads"):
            assert soak.done[kind] == int(seconds)
        assert server.wait_for(lambda: is_idle(server))
        assert 'adapter="fresh-' not in server.http.get("/metrics").text
        span_s = soak.steady[-1].time_s - soak.steady[0].time_s
        assert soak.growth_bytes_per_s * span_s < MAX_GROWTH_BYTES, soak.figures()
    log = server.log.read_text()
    assert "Traceback" not in log
    assert " ERROR " not in log
