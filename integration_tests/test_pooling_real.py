"""The embedded 22M encoder with three bundled heads: a batch equals PEFT, the labels are right.

Also the official OpenAI client, and the wire shapes of Cohere's and Jina's clients.
"""

from __future__ import annotations

import asyncio
import base64
import json
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import numpy as np
import openai
import pytest
import torch
from peft import PeftModel
from support.pooling import post_all
from support.server import BASE_NAME, running
from transformers import AutoModel, AutoModelForSequenceClassification, AutoTokenizer

from lora_server.model.demo_encoder import bundled_heads, encoder_folder

if TYPE_CHECKING:
    from collections.abc import Iterator

    from support.server import Server

DATA = Path(__file__).parents[1] / "packages" / "lora-server" / "scripts" / "data" / "heads"
BASE_LABELS = 3
WIDTHS = {"sentiment": 2, "topic": 4, "rerank": 1, BASE_NAME: BASE_LABELS}
TOLERANCE: dict[str, Any] = {"rtol": 0.0, "atol": 1e-5}


def rows(name: str) -> list[dict[str, str]]:
    """Return the held-out lines of an adapter."""
    lines = (DATA / f"{name}.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["split"] == "test"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the encoder with a head of its own, so that the base can classify too."""
    folder = tmp_path_factory.mktemp("encoder") / "base"
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        encoder_folder(), num_labels=BASE_LABELS, dtype=torch.float32
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder_folder()).save_pretrained(folder)
    for name in ("modules.json", "sentence_bert_config.json", "1_Pooling/config.json"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes((encoder_folder() / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def server(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Serve it with the bundled heads."""
    modules = [f"{name}={path}" for name, path in bundled_heads().items()]
    arguments = ["serve", str(base), "--served-model-name", BASE_NAME, "--port", "0"]
    arguments += ["--max-lora-cls-labels", "4", "--lora-modules", *modules, "--num-threads", "1"]
    with running(arguments, tmp_path_factory.mktemp("server") / "server.log") as started:
        yield started


class Oracle:
    """PEFT's answers, one text at a time."""

    def __init__(self, base: Path) -> None:
        self.tokenizer: Any = AutoTokenizer.from_pretrained(base)
        self._base = base
        self._models: dict[str, Any] = {}

    def logits(self, name: str, text: str, pair: str | None = None) -> torch.Tensor:
        """Return the logits of one text or pair, float64."""
        if name not in self._models:
            model: Any = AutoModelForSequenceClassification.from_pretrained(
                self._base,
                num_labels=WIDTHS[name],
                ignore_mismatched_sizes=True,
                dtype=torch.float32,
            )
            if name != BASE_NAME:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # PEFT asks transformers by an old name
                    model = PeftModel.from_pretrained(model, str(bundled_heads()[name]))
            self._models[name] = model.eval()
        with torch.inference_mode():
            inputs = self.tokenizer(text, pair, return_tensors="pt")
            logits: torch.Tensor = self._models[name](**inputs).logits
        return logits[0].double()

    def embedding(self, name: str, text: str) -> torch.Tensor:
        """Return the normalised mean of the hidden states, float64."""
        inputs = self.tokenizer(text, return_tensors="pt")
        if name == BASE_NAME:
            body: Any = AutoModel.from_pretrained(encoder_folder(), dtype=torch.float32).eval()
        else:
            self.logits(name, text)
            body = self._models[name].base_model.model.bert
        with torch.inference_mode():
            hidden = body(**inputs).last_hidden_state
        pooled: torch.Tensor = hidden[0].double().mean(dim=0)
        normalised: torch.Tensor = pooled / pooled.norm()
        return normalised


@pytest.fixture(scope="module")
def oracle(base: Path) -> Oracle:
    """Return PEFT's answers."""
    return Oracle(base)


def test_three_heads_and_the_base_share_a_batch_and_equal_peft(
    server: Server, oracle: Oracle
) -> None:
    texts = [row["text"] for row in rows("sentiment")[::4] + rows("topic")[::4]]
    plan: list[tuple[str, str, str | None]] = [
        (name, text, None) for text in texts for name in ("sentiment", "topic", BASE_NAME)
    ]
    queries = rows("rerank")[:4]
    plan += [("rerank", q["query"], d["document"]) for q in queries for d in queries]
    requests: list[tuple[str, dict[str, Any]]] = [
        ("/classify", {"model": name, "input": text})
        if pair is None
        else ("/score", {"model": name, "text_1": text, "text_2": pair})
        for name, text, pair in plan
    ]

    replies = post_all(server.url, requests)

    assert "running each alone" not in server.log.read_text()
    for (name, text, pair), reply in zip(plan, replies, strict=True):
        logits = oracle.logits(name, text, pair)
        expected = logits.sigmoid() if len(logits) == 1 else logits.softmax(dim=0)
        item = reply["data"][0]
        found = item["probs"] if pair is None else [item["score"]]
        torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), expected, **TOLERANCE)


@pytest.mark.parametrize("name", ["sentiment", "topic"])
def test_held_out_lines_get_the_right_label(
    name: str, server: Server, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = rows(name)

    body = {"model": name, "input": [row["text"] for row in lines]}
    (reply,) = post_all(server.url, [("/classify", body)])

    labels = [item["label"] for item in reply["data"]]
    right = sum(label == row["label"] for label, row in zip(labels, lines, strict=True))
    with capsys.disabled():
        sys.stdout.write(f"\n{name}: {right} of {len(lines)} held-out lines are right\n")
    assert right / len(lines) > 0.85


def test_the_reranker_puts_the_answer_to_each_held_out_question_first(server: Server) -> None:
    lines = rows("rerank")
    documents = [row["document"] for row in lines]

    first = []
    for row in lines:
        body = {"model": "rerank", "query": row["query"], "documents": documents, "top_n": 1}
        (reply,) = post_all(server.url, [("/rerank", body)])
        first.append(reply["results"][0]["document"]["text"] == row["document"])

    assert sum(first) / len(first) > 0.85


def test_the_openai_client_embeds_with_the_base_and_with_adapters(
    server: Server, oracle: Oracle
) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    texts = ["The soup is hot.", "The match was lost."]

    base = client.embeddings.create(model=BASE_NAME, input=texts)
    adapted = client.embeddings.create(model="topic", input=texts, encoding_format="float")
    short = client.embeddings.create(model=BASE_NAME, input=texts[0], dimensions=16)
    client.close()

    for text, one, other in zip(texts, base.data, adapted.data, strict=True):
        found = torch.tensor(one.embedding, dtype=torch.float64)
        torch.testing.assert_close(found, oracle.embedding(BASE_NAME, text), **TOLERANCE)
        found = torch.tensor(other.embedding, dtype=torch.float64)
        torch.testing.assert_close(found, oracle.embedding("topic", text), **TOLERANCE)
    first = np.array(base.data[0].embedding[:16])
    np.testing.assert_allclose(short.data[0].embedding, first / np.linalg.norm(first), atol=1e-6)
    assert (base.model, adapted.model) == (BASE_NAME, "topic")
    assert base.usage.prompt_tokens == base.usage.total_tokens > 0


def test_base64_holds_the_same_numbers(server: Server) -> None:
    bodies = [
        {"model": "topic", "input": "hello", "encoding_format": kind}
        for kind in ("float", "base64")
    ]

    plain, coded = post_all(server.url, [("/v1/embeddings", body) for body in bodies])

    decoded = np.frombuffer(base64.b64decode(coded["data"][0]["embedding"]), dtype="<f4")
    np.testing.assert_allclose(decoded, np.float32(plain["data"][0]["embedding"]), atol=1e-6)


def test_a_call_in_the_wire_shape_of_coheres_client(server: Server) -> None:
    lines = rows("rerank")[:5]
    body = {
        "model": "rerank",
        "query": lines[0]["query"],
        "documents": [row["document"] for row in lines],
        "top_n": 3,
        "max_tokens_per_doc": 4096,
    }
    headers = {"Authorization": "Bearer key", "X-Client-Name": "test"}

    reply = httpx.post(f"{server.url}/v2/rerank", json=body, headers=headers, timeout=60)

    assert reply.status_code == 200, reply.text
    assert reply.headers["x-lora-adapter"].startswith("rerank@")
    answer = reply.json()
    assert isinstance(answer["id"], str)
    results = answer["results"]
    assert [set(result) >= {"index", "relevance_score"} for result in results] == [True] * 3
    scores = [result["relevance_score"] for result in results]
    assert results[0]["index"] == 0
    assert scores == sorted(scores, reverse=True)
    assert all(0 <= score <= 1 for score in scores)


def test_documents_as_objects_in_the_wire_shape_of_jinas_client_and_coheres_first_api(
    server: Server,
) -> None:
    lines = rows("rerank")[:3]
    body = {
        "model": "rerank",
        "query": lines[0]["query"],
        "documents": [{"text": row["document"]} for row in lines],
        "return_documents": False,
    }

    replies = [server.http.post(path, json=body) for path in ("/v1/rerank", "/rerank")]

    for reply in replies:
        results = reply.raise_for_status().json()["results"]
        assert [set(result) for result in results] == [{"index", "relevance_score"}] * 3
        assert results[0]["index"] == 0


def test_a_header_chooses_the_head_and_the_reply_says_which(server: Server) -> None:
    reply = server.http.post(
        "/classify",
        json={"input": "The rocket left its pad at dawn."},
        headers={"X-Use-LoRA": "topic"},
    )

    assert reply.status_code == 200, reply.text
    assert reply.headers["x-lora-adapter"].startswith("topic@")
    assert reply.json()["data"][0]["label"] == "space"
    assert reply.json()["model"] == "topic"


def test_a_bad_text_ends_only_its_own_request(server: Server) -> None:
    async def send() -> list[httpx.Response]:
        bodies = [
            {"model": "topic", "input": text} for text in ("fine", "long " * 400, "also fine")
        ]
        async with httpx.AsyncClient(base_url=server.url, timeout=60) as client:
            return await asyncio.gather(*(client.post("/classify", json=b) for b in bodies))

    first, second, third = asyncio.run(send())

    assert (first.status_code, second.status_code, third.status_code) == (200, 400, 200)
    error = second.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "402 tokens, and this model takes 256" in error["message"]


@pytest.mark.parametrize(
    ("path", "body", "text"),
    [
        ("/score", {"model": "topic", "text_1": "a", "text_2": "b"}, "a head of 4 labels"),
        ("/classify", {"input": "a", "lora": [{"name": "topic", "scale": 0.5}]}, "topic"),
        (
            "/v1/embeddings",
            {"model": "topic", "input": "a", "dimensions": 385},
            "385, and an embedding of this model has 384",
        ),
        (
            "/score",
            {"model": "rerank", "text_1": ["a", "b"], "text_2": ["c"]},
            "text_1 has 2 texts and text_2 1",
        ),
        ("/v1/chat/completions", {"messages": []}, "generates no text"),
        ("/v1/embeddings", {"input": []}, "at least 1 item"),
        ("/v1/embeddings", {"input": [40000]}, "40000"),
    ],
)
def test_what_cannot_be_answered_is_refused_with_the_numbers(
    path: str, body: dict[str, Any], text: str, server: Server
) -> None:
    reply = server.http.post(path, json=body)

    assert reply.status_code == 400, reply.text
    assert text in reply.json()["error"]["message"]


def test_texts_are_cut_where_the_caller_asks_for_it(server: Server, oracle: Oracle) -> None:
    long = "word " * 400
    bodies = [
        {"model": "topic", "input": long, "truncate_prompt_tokens": limit} for limit in (-1, 12)
    ]

    whole, short = post_all(server.url, [("/classify", body) for body in bodies])

    assert whole["usage"]["prompt_tokens"] == 256
    assert short["usage"]["prompt_tokens"] == 12
    expected = oracle.logits("topic", "word " * 10).softmax(dim=0)
    found = torch.tensor(short["data"][0]["probs"], dtype=torch.float64)
    torch.testing.assert_close(found, expected, **TOLERANCE)


def test_metrics_count_pooling_requests_by_adapter(server: Server) -> None:
    post_all(server.url, [("/classify", {"model": "topic", "input": "hello"})])
    before = server.metric("lora_server_requests_total", adapter="topic", outcome="ok")

    post_all(server.url, [("/classify", {"model": "topic", "input": "hello"})])

    after = server.metric("lora_server_requests_total", adapter="topic", outcome="ok")
    assert after == before + 1
    text = server.http.get("/metrics").text
    assert 'lora_server_request_duration_seconds_count{adapter="topic"}' in text


def test_a_checkpoint_without_a_head_serves_adapters_that_bring_theirs(
    tmp_path: Path, oracle: Oracle
) -> None:
    sentiment = bundled_heads()["sentiment"]
    arguments = ["serve", str(encoder_folder()), "--served-model-name", BASE_NAME, "--port", "0"]
    arguments += ["--task", "classify", "--lora-modules", f"sentiment={sentiment}"]

    with running([*arguments, "--num-threads", "1"], tmp_path / "server.log") as server:
        (own,) = post_all(server.url, [("/classify", {"model": "sentiment", "input": "good"})])
        base = server.http.post("/classify", json={"input": "good"})
        (cosine,) = post_all(server.url, [("/score", {"text_1": "a cat", "text_2": "a kitten"})])

    expected = oracle.logits("sentiment", "good").softmax(dim=0)
    found = torch.tensor(own["data"][0]["probs"], dtype=torch.float64)
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert base.status_code == 400
    assert "no trained classification head" in base.json()["error"]["message"]
    cosines = oracle.embedding(BASE_NAME, "a cat") @ oracle.embedding(BASE_NAME, "a kitten")
    assert cosine["data"][0]["score"] == pytest.approx(float(cosines), abs=1e-5)
