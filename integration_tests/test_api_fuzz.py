"""The API against its own OpenAPI document: requests that it allows, and requests that it does not.

No answer may be a failure of the server's, and each has a status, a media type and a form that the
document names.
"""

from __future__ import annotations

from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import pytest
from schemathesis import GenerationMode
from support.api_fuzz import Fuzzer, narrowed
from support.pooling import FAMILIES, build_world
from support.server import BASE_NAME, running

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.fixture_types import StartServer
    from support.server import Server
    from support.worlds import World

KEY = "K"
NAMES = ("a00", "a01", "a02")
LABELS = {"one": 1, "five": 5, "plain": None}
QUICK_EXAMPLES = 12
LONG_EXAMPLES = 500
SEED = 20


@dataclass(frozen=True)
class Target:
    """A server, its document, and schemas of properties that decide how far a request gets."""

    server: Server
    document: dict[str, Any]
    existing: dict[str, Any]

    def fuzz(
        self, mode: GenerationMode, *, num_examples: int, is_narrowed: bool = False
    ) -> dict[str, int]:
        """Fuzz every operation; return how many requests each got."""
        document = narrowed(self.document, self.existing) if is_narrowed else self.document
        with closing(Fuzzer(self.server.url, KEY, document, mode=mode)) as fuzzer:
            return {
                operation.label: fuzzer.fuzz(operation, num_examples=num_examples, seed_value=SEED)
                for operation in fuzzer.operations()
            }

    def check_unharmed(self) -> None:
        """The server still answers, and nothing that it did not expect was logged."""
        assert self.server.http.get("/health").status_code == 200
        assert "Traceback" not in self.server.log.read_text()


def read_document(server: Server) -> dict[str, Any]:
    reply = httpx.get(f"{server.url}/openapi.json", headers={"Authorization": f"Bearer {KEY}"})
    found: dict[str, Any] = reply.raise_for_status().json()
    return found


@pytest.fixture(scope="module")
def generating(llama: World, start_server: StartServer) -> Iterator[Target]:
    flags = [*llama.lora_modules(*NAMES), "--adapter-root", str(llama.folder)]
    flags += ["--max-loras", "3", "--max-lora-rank", "32", "--max-model-len", "64"]
    flags += ["--api-key", KEY]
    existing = {
        "model": {"enum": [BASE_NAME, *NAMES, None]},
        "lora_name": {"enum": [*NAMES, "new"]},
        "lora_path": {"enum": [str(llama.adapters[name]) for name in (*NAMES, "a03")]},
        "expected_digest": {"type": "null"},
        "gate": {"type": "null"},
        "lora": {"type": "null"},
        "max_tokens": {"type": "integer", "minimum": 0, "maximum": 8},
        "max_completion_tokens": {"type": "null"},
        "min_tokens": {"type": "null"},
        "n": {"type": "integer", "minimum": 1, "maximum": 3},
    }
    with start_server(llama, *flags) as server:
        yield Target(server, read_document(server), existing)


@pytest.fixture(scope="module")
def pooling(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    folder = tmp_path_factory.mktemp("pooling")
    world = build_world(FAMILIES["bert"], folder, "classify", LABELS)
    arguments = ["serve", str(world.base), "--served-model-name", BASE_NAME, "--port", "0"]
    arguments += ["--dtype", "float32", "--num-threads", "1", *world.flags, "--api-key", KEY]
    existing = {
        "model": {"enum": [BASE_NAME, *LABELS, None]},
        "lora": {"type": "null"},
        "truncate_prompt_tokens": {"enum": [None, -1, 20]},
    }
    with running([*arguments, "--max-lora-cls-labels", "5"], folder / "server.log") as server:
        yield Target(server, read_document(server), existing)


def test_every_route_that_takes_a_key_is_described(generating: Target) -> None:
    described = {
        f"{method.upper()} {path}": operation
        for path, methods in generating.document["paths"].items()
        for method, operation in methods.items()
    }

    assert described.keys() >= {
        "POST /v1/completions",
        "POST /v1/chat/completions",
        "POST /v1/load_lora_adapter",
        "POST /v1/unload_lora_adapter",
        "POST /v1/adapters/{name}/pin",
        "GET /v1/models/{name}",
        "GET /metrics",
        "GET /health",
    }
    for label, operation in described.items():
        is_open = label.startswith("GET /health")
        assert ("security" in operation) != is_open, label
        assert ("401" in operation["responses"]) != is_open, label
        assert "422" not in operation["responses"], label


def test_a_few_requests_to_every_operation_are_answered_as_described(generating: Target) -> None:
    right = generating.fuzz(GenerationMode.POSITIVE, num_examples=QUICK_EXAMPLES, is_narrowed=True)
    wrong = generating.fuzz(GenerationMode.NEGATIVE, num_examples=QUICK_EXAMPLES)

    for counts in (right, wrong):
        assert counts.keys() >= {"POST /v1/completions", "POST /v1/load_lora_adapter"}
        assert all(counts.values()), counts
    generating.check_unharmed()


@pytest.mark.api_fuzz
@pytest.mark.parametrize("kind", ["generating", "pooling"])
@pytest.mark.parametrize(
    ("mode", "is_narrowed"),
    [
        (GenerationMode.POSITIVE, True),
        (GenerationMode.POSITIVE, False),
        (GenerationMode.NEGATIVE, False),
    ],
    ids=["allowed-and-known", "allowed", "not-allowed"],
)
def test_many_requests_to_every_operation_are_answered_as_described(
    kind: str, mode: GenerationMode, is_narrowed: bool, request: pytest.FixtureRequest
) -> None:
    target: Target = request.getfixturevalue(kind)

    counts = target.fuzz(mode, num_examples=LONG_EXAMPLES, is_narrowed=is_narrowed)

    assert sum(counts.values()) > LONG_EXAMPLES
    target.check_unharmed()
