"""Many small PEFT adapters in several versions, and PEFT's answers for each of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from transformers import AutoModelForCausalLM

from lora_weights import load_adapter
from support.adapters import Recipe, save_adapter
from support.checkpoints import FAMILIES, save_checkpoint
from support.oracle import PeftOracle
from support.traffic import MIN_MARGIN
from support.worlds import World

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from support.oracle import Choice

RECIPES = (
    Recipe(rank=4),
    Recipe(rank=2, targets=("attention",)),
    Recipe(rank=8, targets=("feed_forward", "head")),
    Recipe(rank=3, targets=("attention", "embedding")),
    Recipe(rank=6, use_rslora=True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Version:
    """One content that a name may stand for."""

    name: str
    number: int
    path: Path
    digest: str

    @property
    def key(self) -> str:
        """What the oracle calls it."""
        return f"{self.name}_v{self.number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """A base model, and adapters in versions, each in a folder of its own."""

    world: World
    versions: Mapping[str, tuple[Version, ...]]
    """By name; the first one is what a name begins with."""

    @property
    def names(self) -> tuple[str, ...]:
        """All names."""
        return tuple(self.versions)

    def by_digest(self) -> dict[str, Version]:
        """Versions by the twelve characters that replies show of their digests."""
        every = [version for versions in self.versions.values() for version in versions]
        return {version.digest[:12]: version for version in every}

    def clear_answer(
        self, choice: Choice, prompt: tuple[int, ...], num_tokens: int
    ) -> tuple[int, ...]:
        """PEFT's tokens as far as each is clearly the best one: a tie may go either way."""
        answer = self.world.oracle.greedy(choice, prompt, num_tokens)
        clear: list[int] = []
        for token_id, values in zip(answer.token_ids, answer.top, strict=True):
            if values[0] - values[1] < MIN_MARGIN:
                break
            clear.append(token_id)
        return tuple(clear)


def build_fleet(
    folder: Path,
    *,
    num_names: int,
    num_versions: Sequence[int],
    recipes: Sequence[Recipe] = RECIPES,
) -> Fleet:
    """Write a tiny Llama and its adapters below `folder`.

    Args:
        folder: where everything goes.
        num_names: adapters `n00` and on.
        num_versions: how many versions each name has; repeated when there are more names.
        recipes: what they look like, in turn.
    """
    family = FAMILIES["llama"]
    base_folder = folder / "base"
    save_checkpoint(family, base_folder)
    base = AutoModelForCausalLM.from_pretrained(base_folder, dtype=torch.float32)
    versions: dict[str, tuple[Version, ...]] = {}
    for number in range(num_names):
        name = f"n{number:02}"
        made = []
        for v in range(1, num_versions[number % len(num_versions)] + 1):
            path = folder / f"{name}-v{v}"
            recipe = recipes[(number + v) % len(recipes)]
            save_adapter(base, family, recipe, path, seed=1000 * v + number)
            made.append(Version(name=name, number=v, path=path, digest=load_adapter(path).digest))
        versions[name] = tuple(made)
    every = [version for several in versions.values() for version in several]
    world = World(
        family="llama",
        folder=folder,
        base=base_folder,
        adapters={several[0].name: several[0].path for several in versions.values()},
        oracle=PeftOracle(base_folder, {version.key: version.path for version in every}),
    )
    return Fleet(world=world, versions=versions)
