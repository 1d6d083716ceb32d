"""Embeddings and classification on the embedded 22M encoder: what eight adapters cost, and save.

`python integration_tests/bench_pooling.py [--output FILE] [--rounds N]` starts a server of its own,
sends texts of 64 tokens from 32 clients at once, with the base alone and with eight adapters in
turn, and then lets PEFT answer the same texts one by one, switching its adapter for each. Prints
requests per second of each, and the two ratios. A measurement, not a test.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import urlsplit

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from transformers import AutoModelForSequenceClassification, AutoTokenizer

sys.path.insert(0, str(Path(__file__).parent))

from support.machine import machine
from support.server import BASE_NAME, running

from lora_server.model.demo_encoder import encoder_folder

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

NUM_ADAPTERS = 8
NUM_TOKENS = 64
CONCURRENCY = 32
RANK = 8
TARGETS = ["query", "key", "value"]
WORDS = ("cat", "sat", "on", "warm", "red", "chair", "and", "rain", "fell", "over", "the", "town")
ROUTES = ("/v1/embeddings", "/classify")
LEAST_OF_BASE, LEAST_OF_PEFT = 0.7, 3.0


def save_base(folder: Path) -> Path:
    """Write the encoder with a head of two labels."""
    torch.manual_seed(0)
    model = AutoModelForSequenceClassification.from_pretrained(
        encoder_folder(), num_labels=2, dtype=torch.float32
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(encoder_folder()).save_pretrained(folder)
    return folder


def save_adapters(base: Path, parent: Path) -> dict[str, Path]:
    """Write random adapters with heads of their own."""
    folders = {}
    for number in range(NUM_ADAPTERS):
        torch.manual_seed(number)
        model: Any = AutoModelForSequenceClassification.from_pretrained(base, dtype=torch.float32)
        config = LoraConfig(
            task_type=TaskType.SEQ_CLS,
            r=RANK,
            lora_alpha=RANK,
            target_modules=TARGETS,
            init_lora_weights=False,
        )
        folders[f"a{number}"] = parent / f"a{number}"
        get_peft_model(model, config).save_pretrained(str(parent / f"a{number}"))
    return folders


def make_texts(base: Path, count: int) -> list[str]:
    """Return texts of exactly `NUM_TOKENS` tokens, special ones included."""
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    texts = []
    for start in range(count):
        words = [WORDS[(start + i * (1 + start % 5)) % len(WORDS)] for i in range(NUM_TOKENS - 2)]
        texts.append(" ".join(words))
        assert len(tokenizer(texts[-1]).input_ids) == NUM_TOKENS, texts[-1]
    return texts


async def load(url: str, route: str, texts: Sequence[str], names: Sequence[str]) -> float:
    """Send every text, adapters in turn, and return requests per second."""
    place = urlsplit(url)
    bodies = iter(
        [
            json.dumps({"model": names[i % len(names)], "input": text}).encode()
            for i, text in enumerate(texts)
        ]
    )

    async def work() -> None:
        # Plain streams: a client library would take more of the two cores than the server's HTTP.
        reader, writer = await asyncio.open_connection(place.hostname, place.port)
        for body in bodies:
            head = (
                f"POST {route} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\n\r\n"
            )
            writer.write(head.encode() + body)
            reply = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            assert reply.startswith("http/1.1 200"), reply
            length = next(
                int(line.partition(":")[2])
                for line in reply.splitlines()
                if line.startswith("content-length")
            )
            await reader.readexactly(length)
        writer.close()
        await writer.wait_closed()

    start_s = time.perf_counter()
    await asyncio.gather(*(work() for _ in range(CONCURRENCY)))
    return len(texts) / (time.perf_counter() - start_s)


def measure_server(
    base: Path, adapters: dict[str, Path], texts: Sequence[str], options: argparse.Namespace
) -> dict[str, dict[str, list[float]]]:
    """Return requests per second by route, with the base and with the adapters, in turn."""
    modules = [f"{name}={path}" for name, path in adapters.items()]
    arguments = ["serve", str(base), "--served-model-name", BASE_NAME, "--port", "0"]
    arguments += [
        "--dtype",
        options.dtype,
        "--max-loras",
        str(NUM_ADAPTERS),
        "--lora-modules",
        *modules,
    ]
    found: dict[str, dict[str, list[float]]] = {}
    with running(arguments, base.parent / "server.log") as server:
        for number in range(options.rounds + 1):
            for route in ROUTES:
                for case, names in (("base", [BASE_NAME]), ("adapters", list(adapters))):
                    rate = asyncio.run(load(server.url, route, texts, names))
                    if number:  # the first round warms up
                        found.setdefault(route, {}).setdefault(case, []).append(rate)
        log = server.log.read_text()
    assert "running each alone" not in log, log
    return found


def measure_peft(
    base: Path, adapters: dict[str, Path], texts: Sequence[str], options: argparse.Namespace
) -> dict[str, list[float]]:
    """Return requests per second of PEFT, which switches its adapter for each text."""
    tokenizer: Any = AutoTokenizer.from_pretrained(base)
    plain: Any = AutoModelForSequenceClassification.from_pretrained(
        base, dtype=getattr(torch, options.dtype)
    )
    names = list(adapters)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT comments on several heads, which are meant
        model = PeftModel.from_pretrained(plain, str(adapters[names[0]]), adapter_name=names[0])
        for name in names[1:]:
            model.load_adapter(str(adapters[name]), adapter_name=name)
    model = model.eval().to(getattr(torch, options.dtype))  # PEFT keeps adapters in float32
    body: Any = cast("Any", model).base_model.model.bert

    def embed(text: str) -> list[float]:
        hidden = body(**tokenizer(text, return_tensors="pt")).last_hidden_state[0].float()
        pooled: list[float] = torch.nn.functional.normalize(hidden.mean(dim=0), dim=0).tolist()
        return pooled

    def classify(text: str) -> list[float]:
        logits = model(**tokenizer(text, return_tensors="pt")).logits[0].float()
        probs: list[float] = logits.softmax(dim=0).tolist()
        return probs

    answers: dict[str, Callable[[str], list[float]]] = dict(
        zip(ROUTES, (embed, classify), strict=True)
    )
    found: dict[str, list[float]] = {}
    with torch.inference_mode():
        for number in range(options.rounds + 1):
            for route, answer in answers.items():
                start_s = time.perf_counter()
                for i, text in enumerate(texts):
                    model.set_adapter(names[i % len(names)])
                    answer(text)
                if number:
                    rate = len(texts) / (time.perf_counter() - start_s)
                    found.setdefault(route, []).append(rate)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=3, help="runs of each case after the first")
    parser.add_argument("--num-texts", type=int, default=512, help="requests a run")
    parser.add_argument("--output", type=Path, help="write the figures as JSON")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        base = save_base(folder / "base")
        adapters = save_adapters(base, folder)
        texts = make_texts(base, options.num_texts)
        served = measure_server(base, adapters, texts, options)
        peft = measure_peft(base, adapters, texts[: options.num_texts // 4], options)
    report: dict[str, Any] = {"machine": machine(), "dtype": options.dtype, "requests_per_s": {}}
    for route in ROUTES:
        rates = {
            "base": statistics.median(served[route]["base"]),
            "adapters": statistics.median(served[route]["adapters"]),
            "peft": statistics.median(peft[route]),
        }
        report["requests_per_s"][route] = {
            "runs": {**served[route], "peft": peft[route]},
            "median": rates,
            "of_base": rates["adapters"] / rates["base"],
            "of_peft": rates["adapters"] / rates["peft"],
        }
        sys.stdout.write(
            f"{route}: base {rates['base']:.1f}/s, {NUM_ADAPTERS} adapters "
            f"{rates['adapters']:.1f}/s ({rates['adapters'] / rates['base']:.2f} of the base, at "
            f"least {LEAST_OF_BASE} wanted), PEFT switching {rates['peft']:.1f}/s "
            f"({rates['adapters'] / rates['peft']:.2f} times, at least {LEAST_OF_PEFT} wanted)\n"
        )
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
