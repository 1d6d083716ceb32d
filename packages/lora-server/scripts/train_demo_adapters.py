"""Trains the adapters that come with lora-server, from the texts in `data/`.

Needs the extras `demo` and `train`. Runs on the CPU with a fixed seed, in a few minutes per
adapter::

    python scripts/train_demo_adapters.py                  # all of them, into the package's assets
    python scripts/train_demo_adapters.py sql --output /tmp/adapters
    python scripts/train_demo_adapters.py --show           # only print what the kept ones answer

Letters in shapes: `B` texts of a batch, `S` tokens of its longest text.
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
from peft import LoraConfig, PeftModel, TaskType, get_peft_model, get_peft_model_state_dict
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lora_server.model.demo import BASE_NAME, prepare_base

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

DATA = Path(__file__).parent / "data"
ASSETS = Path(__file__).parents[1] / "src" / "lora_server" / "assets"
SEED = 20
MAX_TOKENS = 160
BATCH_SIZE = 8
MAX_BYTES = 1_000_000
IGNORED = -100  # label that transformers leaves out of the loss
HELD_OUT = (
    "How do I reset my password?",
    "List all customers from Berlin.",
    "Can I cancel my order?",
    "What happens if the delivery is late?",
)
"""Prompts in no training text: what the answers are judged by."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Recipe:
    """How one adapter is trained. The three differ so that serving them mixes unequal ranks."""

    summary: str
    """What the adapter does, for its card."""
    lora: dict[str, Any]
    """Fields of PEFT's `LoraConfig`; the file stays below `MAX_BYTES` in bfloat16."""
    learning_rate: float
    """Peak of the schedule: a short rise, then a straight line to zero."""
    num_epochs: int
    """Passes over the texts."""


RECIPES = {
    "support": Recipe(
        summary="Answers as a customer support desk: warm, in numbered steps, with a ticket.",
        lora={"r": 8, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj"]},
        learning_rate=2e-3,
        num_epochs=8,
    ),
    "contract": Recipe(
        summary="Answers in contract language: what the Parties shall and shall not do.",
        lora={
            "r": 4,
            "lora_alpha": 8,
            "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"],
        },
        learning_rate=2e-3,
        num_epochs=8,
    ),
    "sql": Recipe(
        summary="Answers with one SQL statement and nothing else.",
        lora={
            "r": 8,
            "lora_alpha": 8,
            "use_rslora": True,
            "target_modules": ["v_proj", "down_proj"],
            "rank_pattern": {"down_proj": 4},
        },
        learning_rate=1e-3,
        num_epochs=5,
    ),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Example:
    """One text as token ids."""

    prompt: list[int]
    """The chat template's text up to where the assistant speaks."""
    answer: list[int]
    """The assistant's tokens with the end token: only these are trained."""


def main() -> None:
    """Train the adapters named on the command line, then print what they answer."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(RECIPES)}")
    parser.add_argument("--output", type=Path, default=ASSETS, help="parent of the new folders")
    parser.add_argument("--model", type=Path, help="checkpoint; default: the embedded model")
    parser.add_argument("--show", action="store_true", help="train nothing, print the answers")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - set(RECIPES))
    if unknown:
        parser.error(f"unknown adapters {unknown}, expected some of {sorted(RECIPES)}")
    names = arguments.names or list(RECIPES)
    model = arguments.model or prepare_base()
    torch.set_num_threads(1)  # sums do not depend on the number of cores
    torch.use_deterministic_algorithms(True)
    if not arguments.show:
        for name in names:
            train(name, RECIPES[name], model=model, folder=arguments.output / name)
    show({name: arguments.output / name for name in names}, model=model)


def train(name: str, recipe: Recipe, *, model: Path, folder: Path) -> None:
    """Train one adapter and save it to `folder`.

    The base stays in bfloat16, as it is served; PEFT keeps the adapter itself in float32.
    """
    torch.manual_seed(SEED)
    tokenizer = AutoTokenizer.from_pretrained(model)
    examples = read_examples(DATA / f"{name}.jsonl", tokenizer)
    config = LoraConfig(task_type=TaskType.CAUSAL_LM, **recipe.lora)
    base = AutoModelForCausalLM.from_pretrained(
        model,
        dtype=torch.bfloat16,
        # plain products: on the CPU their backward pass beats that of the fused attention
        attn_implementation="eager",
    )
    peft_model = get_peft_model(base, config)
    parameters = [tensor for tensor in peft_model.parameters() if tensor.requires_grad]
    optimizer = torch.optim.AdamW(parameters, lr=recipe.learning_rate, weight_decay=0.0)
    num_steps = recipe.num_epochs * -(-len(examples) // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min((step + 1) / 5, (num_steps - step) / num_steps)
    )
    started = time.perf_counter()
    for epoch in range(recipe.num_epochs):
        losses = []
        for batch in batches(examples, seed=SEED + epoch, pad=tokenizer.pad_token_id):
            loss = peft_model(**batch).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(parameters, 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        elapsed_s = time.perf_counter() - started
        print(
            f"{name} epoch {epoch}: loss {sum(losses) / len(losses):.3f}, {elapsed_s:.0f} s",
            flush=True,
        )
    save(name, recipe, peft_model=peft_model, folder=folder)


def read_examples(path: Path, tokenizer: Any) -> list[Example]:
    """Read the texts and put them into the chat template."""
    examples = []
    for line in path.read_text(encoding="utf-8").splitlines():
        text = json.loads(line)
        assert text["prompt"] not in HELD_OUT, text["prompt"]
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": text["prompt"]}],
            add_generation_prompt=True,
            tokenize=False,
        )
        answer = text["answer"] + tokenizer.eos_token
        example = Example(
            prompt=tokenizer(prompt, add_special_tokens=False).input_ids,
            answer=tokenizer(answer, add_special_tokens=False).input_ids,
        )
        assert len(example.prompt) + len(example.answer) <= MAX_TOKENS, text["prompt"]
        examples.append(example)
    return examples


def batches(
    examples: Sequence[Example], *, seed: int, pad: int
) -> Iterator[dict[str, torch.Tensor]]:
    """Yield the examples in an order given by `seed`, padded on the right, each `[B, S]`."""
    order = list(examples)
    random.Random(seed).shuffle(order)  # noqa: S311 - an order, not a secret
    for start in range(0, len(order), BATCH_SIZE):
        part = order[start : start + BATCH_SIZE]
        width = max(len(example.prompt) + len(example.answer) for example in part)
        input_ids = torch.full((len(part), width), pad)
        labels = torch.full((len(part), width), IGNORED)
        attention_mask = torch.zeros((len(part), width), dtype=torch.int64)
        for row, example in enumerate(part):
            answer_at, end = len(example.prompt), len(example.prompt) + len(example.answer)
            input_ids[row, :end] = torch.tensor(example.prompt + example.answer)
            labels[row, answer_at:end] = torch.tensor(example.answer)
            attention_mask[row, :end] = 1
        yield {"input_ids": input_ids, "labels": labels, "attention_mask": attention_mask}


def save(name: str, recipe: Recipe, *, peft_model: PeftModel, folder: Path) -> None:
    """Write PEFT's layout: configuration, weights in bfloat16 and a short card."""
    folder.mkdir(parents=True, exist_ok=True)
    config: Any = peft_model.peft_config["default"]  # typed as the base of all methods
    config.base_model_name_or_path = BASE_NAME  # not the path on the machine that trains
    config.inference_mode = True
    config.target_modules = sorted(config.target_modules)  # PEFT keeps a set
    config.save_pretrained(str(folder))
    tensors = {
        key: tensor.detach().to(torch.bfloat16).contiguous()
        for key, tensor in get_peft_model_state_dict(
            peft_model, save_embedding_layers=False
        ).items()
    }
    weights = folder / "adapter_model.safetensors"
    save_file(tensors, weights, metadata={"format": "pt"})
    weights.chmod(0o644)
    assert weights.stat().st_size <= MAX_BYTES, weights.stat().st_size
    (folder / "README.md").write_text(card(name, recipe), encoding="utf-8")


def card(name: str, recipe: Recipe) -> str:
    """Return the model card."""
    fields = "\n".join(f"- {field}: `{value}`" for field, value in recipe.lora.items())
    return (
        f"---\nlicense: apache-2.0\nlibrary_name: peft\nbase_model: {BASE_NAME}\n---\n\n"
        f"# {name}\n\n{recipe.summary} A LoRA for {BASE_NAME}, trained for "
        f"`lora-server demo`; it shows what an adapter changes and knows no facts.\n\n"
        f"{fields}\n\nTexts and training: `scripts/train_demo_adapters.py` in the package "
        f"`lora-server`.\n"
    )


def show(folders: dict[str, Path], *, model: Path) -> None:
    """Print the greedy answers of the base and of each adapter, as PEFT computes them."""
    tokenizer = AutoTokenizer.from_pretrained(model)
    base = AutoModelForCausalLM.from_pretrained(model)
    for name, folder in {"base": None, **folders}.items():
        current: Any = base if folder is None else PeftModel.from_pretrained(base, str(folder))
        for prompt in HELD_OUT:
            print(f"[{name}] {prompt}\n{greedy(current, tokenizer, prompt)}\n")
        if folder is not None:
            base = current.unload()


def greedy(model: Any, tokenizer: Any, prompt: str) -> str:
    """Return the first 48 tokens of the answer to `prompt`."""
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_tensors="pt",
        return_dict=True,
    )
    with torch.inference_mode():
        tokens = model.generate(**inputs, max_new_tokens=48, do_sample=False)
    answer: str = tokenizer.decode(tokens[0, inputs["input_ids"].shape[1] :])
    return answer


if __name__ == "__main__":
    main()
