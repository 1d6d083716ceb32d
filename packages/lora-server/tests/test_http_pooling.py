"""The pooling routes around a scripted engine: shapes, labels, activations, refusals."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from lora_server.config import Task
from lora_server.engine.pooling_request import PoolingKind, PoolingOutput
from lora_server.errors import EngineError
from lora_server.http.pooling_service import PoolingService
from lora_server.http.pooling_text import PoolingText
from lora_server.model.labels import AdapterLabels, build_labels, read_notes
from lora_server.model.pooling_model import HeadInfo, HeadRows

if TYPE_CHECKING:
    from collections.abc import Callable

    from conftest import Harness

    from lora_server.engine.pooling_request import PoolingRequest

BASE_NOTES = read_notes({"id2label": {0: "bad", 1: "good", 2: "none"}})
LOGITS = {1: [1.5], 2: [0.5, -1.0], 3: [0.0, 1.0, 2.0]}


@dataclass
class ScriptedPooler:
    """Answers with fixed logits of the wanted width, or with a vector that tells the text apart."""

    width: int = 3
    per_token: bool = False
    error: Exception | None = None
    hangs: bool = False
    requests: list[PoolingRequest] = field(default_factory=list)
    num_cancelled: int = 0

    async def pool(self, request: PoolingRequest) -> PoolingOutput:
        self.requests.append(request)
        await asyncio.sleep(0)
        if self.error is not None and request.request_id.endswith("-1"):
            raise self.error
        if self.hangs or self.error is not None:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                self.num_cancelled += 1
                raise
        count = len(request.token_ids)
        if request.kind is PoolingKind.EMBED:
            values = np.array([3.0, 4.0, count, 0.0], dtype=np.float32)
        else:
            rows = count if self.per_token else 1
            values = np.array([LOGITS[self.width]] * rows, dtype=np.float32)
        return PoolingOutput(request_id=request.request_id, values=values, admitted_s=0.0)


@dataclass
class Pooled:
    """A service that pools, and the engine behind it."""

    harness: Harness
    engine: ScriptedPooler

    def post(self, path: str, body: Any, **options: Any) -> dict[str, Any]:
        """Send one request, which must be answered."""
        reply = self.harness.post(path, body, **options)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        return answer

    def refuse(self, path: str, body: Any) -> str:
        """Send one request, which must be refused; return why."""
        reply = self.harness.post(path, body)
        assert reply.status_code == 400, reply.text
        message: str = self.harness.error(reply)["message"]
        return message


@pytest.fixture
def make_pooled(make_harness: Callable[..., Harness], tokenizer: Any) -> Callable[..., Pooled]:
    """Return a function that makes a service; its keywords describe head, task and adapters."""

    def make(
        *,
        head: bool = True,
        trained: bool = True,
        rows: HeadRows = HeadRows.FIRST,
        task: Task = Task.CLASSIFY,
        adapter: AdapterLabels | None = None,
        width: int = 3,
    ) -> Pooled:
        engine = ScriptedPooler(width=width, per_token=rows is HeadRows.ALL)
        info = HeadInfo(
            rows=rows, labels=build_labels(3, BASE_NOTES), notes=BASE_NOTES, is_trained=trained
        )
        pooling = PoolingService(
            engine=engine,
            task=task,
            text=PoolingText(tokenizer),
            head=info if head else None,
            embedding_length=4,
            labels_of=lambda _digest: adapter,
        )
        return Pooled(make_harness(pooling=pooling), engine)

    return make


def own(width: int | None, **fields: Any) -> AdapterLabels:
    """Return what an adapter brings of a head."""
    return AdapterLabels(num_labels=width, notes=read_notes(fields) if fields else None)


def test_classify_has_vllms_shape(make_pooled: Callable[..., Pooled]) -> None:
    pooled = make_pooled()

    answer = pooled.post("/classify", {"model": "base-model", "input": ["hello", "the cat"]})

    assert answer["object"] == "list"
    assert answer["id"].startswith("classify-")
    assert (answer["model"], answer["created"]) == ("base-model", 1_700_000_000)
    first, second = answer["data"]
    expected = np.exp(LOGITS[3]) / np.exp(LOGITS[3]).sum()
    assert (first["index"], second["index"]) == (0, 1)
    assert set(first) == {"index", "label", "probs", "num_classes"}
    np.testing.assert_allclose(first["probs"], expected)
    assert (first["label"], first["num_classes"]) == ("none", 3)
    count = sum(len(request.token_ids) for request in pooled.engine.requests)
    assert answer["usage"] == {
        "prompt_tokens": count,
        "total_tokens": count,
        "completion_tokens": 0,
    }


@pytest.mark.parametrize(
    ("labels", "name", "count"),
    [
        (own(2, id2label={"0": "yes", "1": "no"}), "yes", 2),
        (own(2), "LABEL_0", 2),
        (own(None, id2label={"0": "x", "1": "y", "2": "z"}), "z", 3),
        (own(None), "none", 3),
    ],
    ids=["own names", "own head without names", "names for the base's head", "the base's"],
)
def test_labels_are_the_adapters_where_it_names_them(
    labels: AdapterLabels, name: str, count: int, make_pooled: Callable[..., Pooled]
) -> None:
    pooled = make_pooled(adapter=labels, width=count)

    (item,) = pooled.post("/classify", {"model": "sql", "input": "hello"})["data"]

    assert (item["label"], item["num_classes"]) == (name, count)


def test_independent_labels_are_told_by_their_thresholds(
    make_pooled: Callable[..., Pooled],
) -> None:
    fields = {
        "id2label": {"0": "spam", "1": "rude"},
        "problem_type": "multi_label_classification",
        "thresholds": {"rude": 0.2},
    }
    pooled = make_pooled(adapter=own(2, **fields), width=2)

    (item,) = pooled.post("/classify", {"model": "sql", "input": "hello"})["data"]

    np.testing.assert_allclose(item["probs"], 1 / (1 + np.exp(-np.array(LOGITS[2]))))
    assert item["labels"] == ["spam", "rude"]


@pytest.mark.parametrize("field_name", ["use_activation", "activation"])
def test_logits_are_told_when_no_activation_is_wanted(
    field_name: str, make_pooled: Callable[..., Pooled]
) -> None:
    body = {"input": "hello", field_name: False}

    (item,) = make_pooled().post("/classify", body)["data"]

    assert item["probs"] == LOGITS[3]


def test_a_score_is_the_sigmoid_of_one_label(make_pooled: Callable[..., Pooled]) -> None:
    pooled = make_pooled(adapter=own(1), width=1)

    body = {"model": "sql", "text_1": "hello", "text_2": ["the cat", "the mat"]}
    for path in ("/score", "/v1/score"):
        answer = pooled.post(path, body)
        assert [set(item) for item in answer["data"]] == [{"index", "object", "score"}] * 2
        assert answer["data"][1]["score"] == pytest.approx(1 / (1 + np.exp(-1.5)))


def test_without_any_head_a_score_is_the_cosine_of_the_embeddings(
    make_pooled: Callable[..., Pooled],
) -> None:
    pooled = make_pooled(head=False, task=Task.EMBED)

    (item,) = pooled.post("/score", {"text_1": "hello", "text_2": "the cat sat"})["data"]

    one, other = (np.array([3.0, 4.0, len(r.token_ids)]) for r in pooled.engine.requests)
    expected = one @ other / np.linalg.norm(one) / np.linalg.norm(other)
    assert item["score"] == pytest.approx(expected, abs=1e-7)


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_documents_come_back_ordered(path: str, make_pooled: Callable[..., Pooled]) -> None:
    pooled = make_pooled(head=False, task=Task.EMBED)
    documents = ["a much longer text than the query", {"text": "hello"}, "hello the"]
    body = {"query": "hello", "documents": documents, "top_n": 2}

    answer = pooled.post(path, body)

    assert [result["index"] for result in answer["results"]] == [1, 2]
    assert answer["results"][0]["document"] == {"text": "hello"}
    assert answer["results"][0]["relevance_score"] == pytest.approx(1.0)
    assert answer["id"].startswith("rerank-")
    bare = pooled.post(path, {**body, "return_documents": False})
    assert set(bare["results"][0]) == {"index", "relevance_score"}


def test_documents_are_read_up_to_their_limit(make_pooled: Callable[..., Pooled]) -> None:
    pooled = make_pooled(head=False, task=Task.EMBED)
    body = {"query": "hello", "documents": ["the cat sat on the mat"], "max_tokens_per_doc": 1}

    answer = pooled.post("/v2/rerank", body)

    assert [len(request.token_ids) for request in pooled.engine.requests][1] == 1
    assert answer["results"][0]["document"]["text"] == "the cat sat on the mat"


def test_embeddings_come_as_numbers_or_base64_and_shortened(
    make_pooled: Callable[..., Pooled],
) -> None:
    pooled = make_pooled()
    ids = list(pooled.harness.ids("hello"))

    plain = pooled.post("/v1/embeddings", {"input": [ids, ids[:1]]})
    coded = pooled.post("/v1/embeddings", {"input": ids, "encoding_format": "base64"})
    short = pooled.post("/v1/embeddings", {"input": ids, "dimensions": 2})

    vector = [3.0, 4.0, float(len(ids)), 0.0]
    assert [item["index"] for item in plain["data"]] == [0, 1]
    assert plain["data"][0] == {"object": "embedding", "index": 0, "embedding": vector}
    decoded = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), dtype="<f4")
    assert decoded.tolist() == vector
    cut = np.array(short["data"][0]["embedding"])
    np.testing.assert_allclose(np.linalg.norm(cut), np.linalg.norm(vector), rtol=1e-6)
    np.testing.assert_allclose(cut / cut[0], [1.0, 4 / 3], rtol=1e-6)


def test_pooling_tells_rows_of_labels_token_by_token(make_pooled: Callable[..., Pooled]) -> None:
    pooled = make_pooled(rows=HeadRows.ALL, task=Task.TOKEN_CLASSIFY)
    ids = list(pooled.harness.ids("the cat"))

    (item,) = pooled.post("/pooling", {"input": ids})["data"]

    assert item["labels"] == ["bad", "good", "none"]
    assert len(item["data"]) == len(item["tokens"]) == len(ids)
    assert sum(item["data"][0]) == pytest.approx(1.0)


def test_pooling_tells_embeddings_and_labels_of_texts(make_pooled: Callable[..., Pooled]) -> None:
    embedded = make_pooled(head=False, task=Task.EMBED).post("/pooling", {"input": "hello"})
    labelled = make_pooled().post("/pooling", {"input": "hello", "use_activation": False})

    assert embedded["data"][0]["data"][:2] == [3.0, 4.0]
    assert "labels" not in embedded["data"][0]
    assert labelled["data"][0]["data"] == LOGITS[3]
    assert labelled["data"][0]["labels"] == ["bad", "good", "none"]


def test_the_header_chooses_and_the_reply_says_which(make_pooled: Callable[..., Pooled]) -> None:
    pooled = make_pooled()

    reply = pooled.harness.post("/classify", {"input": "a"}, headers={"X-Use-LoRA": "Legal"})

    assert reply.headers["x-lora-adapter"].startswith("Legal@")
    assert reply.json()["model"] == "Legal"
    assert [len(request.adapters) for request in pooled.engine.requests] == [1]
    assert pooled.harness.catalog.held == []


def test_a_text_is_cut_only_on_request(make_pooled: Callable[..., Pooled]) -> None:
    pooled = make_pooled()
    long = "q" * 100

    assert "the text has 100 tokens, and this model takes 64" in pooled.refuse(
        "/classify", {"input": long}
    )
    for limit, expected in ((-1, 64), (10, 10)):
        answer = pooled.post("/classify", {"input": long, "truncate_prompt_tokens": limit})
        assert answer["usage"]["prompt_tokens"] == expected
    ids = pooled.post("/classify", {"input": [5] * 100, "truncate_prompt_tokens": 3})
    assert ids["usage"]["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/classify", {"input": []}, "at least 1 item"),
        ("/classify", {"input": ""}, "a text has no tokens"),
        ("/classify", {"input": [500]}, "500"),
        ("/classify", {"input": "a", "truncate_prompt_tokens": 0}, "expected -1 or at least 1"),
        ("/classify", {"input": "a", "unknown": 1}, "does not support this field"),
        ("/v1/embeddings", {"input": "a", "dimensions": 5}, "dimensions is 5"),
        ("/score", {"text_1": "a", "text_2": "b"}, "a head of 3 labels; a score needs one of 1"),
        ("/v1/chat/completions", {"messages": []}, "--task classify, which generates no text"),
        ("/v1/completions", {"prompt": "a"}, "--task classify, which generates no text"),
    ],
)
def test_what_cannot_be_answered_is_refused(
    path: str, body: dict[str, Any], text: str, make_pooled: Callable[..., Pooled]
) -> None:
    assert text in make_pooled().refuse(path, body)


@pytest.mark.parametrize(
    ("options", "path", "text"),
    [
        ({"trained": False}, "/classify", "no trained classification head"),
        ({"head": False, "task": Task.EMBED}, "/classify", "--task embed, which loads no"),
        ({"rows": HeadRows.ALL}, "/classify", "use /pooling"),
    ],
)
def test_a_server_that_cannot_classify_says_why(
    options: dict[str, Any], path: str, text: str, make_pooled: Callable[..., Pooled]
) -> None:
    assert text in make_pooled(**options).refuse(path, {"input": "a"})


def test_a_pair_without_a_token_is_refused(make_pooled: Callable[..., Pooled]) -> None:
    pooled = make_pooled(adapter=own(1), width=1)
    model = {"model": "sql"}

    messages = [
        pooled.refuse("/score", {**model, "text_1": "", "text_2": ["the cat", ""]}),
        pooled.refuse("/rerank", {**model, "query": "", "documents": [""]}),
    ]

    assert all("no tokens" in message for message in messages)
    assert pooled.engine.requests == []
    assert pooled.post("/score", {**model, "text_1": "", "text_2": "the cat"})["data"]


def test_uneven_lists_and_token_heads_cannot_be_scored(make_pooled: Callable[..., Pooled]) -> None:
    uneven = {"text_1": ["a", "b"], "text_2": ["c"]}
    pairs = {"text_1": "a", "text_2": "b"}

    assert "2 texts and text_2 1" in make_pooled(head=False).refuse("/score", uneven)
    assert "cannot score" in make_pooled(rows=HeadRows.ALL).refuse("/score", pairs)


def test_a_server_that_generates_says_how_to_pool(harness: Harness) -> None:
    reply = harness.post("/v1/embeddings", {"input": "a"})

    assert reply.status_code == 400
    assert "--task embed" in harness.error(reply)["message"]


def test_the_first_failure_ends_the_other_texts(make_pooled: Callable[..., Pooled]) -> None:
    pooled = make_pooled()
    pooled.engine.error = EngineError("broken")

    reply = pooled.harness.post("/classify", {"input": ["a", "b", "c"]})

    assert reply.status_code == 500
    assert pooled.engine.num_cancelled == 2
    assert pooled.harness.catalog.held == []


def test_a_client_that_leaves_ends_its_texts(make_pooled: Callable[..., Pooled]) -> None:
    pooled = make_pooled()
    pooled.engine.hangs = True

    async def leave() -> None:
        body = json.dumps({"model": "sql", "input": ["a", "b"]}).encode()
        messages: list[Any] = [{"type": "http.request", "body": body}]

        async def receive() -> Any:
            if messages:
                return messages.pop()
            while len(pooled.engine.requests) < 2:  # noqa: ASYNC110 - a bound is around it
                await asyncio.sleep(0)
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            sent.append(message)

        sent: list[Any] = []
        scope = {
            "type": "http",
            "asgi": {"version": "3.0"},
            "http_version": "1.1",
            "method": "POST",
            "path": "/classify",
            "raw_path": b"/classify",
            "query_string": b"",
            "root_path": "",
            "scheme": "http",
            "server": ("test", 80),
            "client": ("test", 1),
            "headers": [(b"content-type", b"application/json")],
        }
        await asyncio.wait_for(pooled.harness.app(scope, receive, send), 10)

    asyncio.run(leave())

    assert pooled.engine.num_cancelled == 2
    assert pooled.harness.catalog.held == []
