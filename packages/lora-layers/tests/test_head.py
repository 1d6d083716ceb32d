"""Classification heads of unequal width in a mixed batch, each against float64 arithmetic."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from lora_layers import AdapterMismatchError, LoraModelConfig, LoraModelManager, NotLinearError
from lora_layers.heads import find_heads
from lora_layers.targets import walk_sites
from lora_layers.testing import build_adapter, runs
from lora_weights import FullModule, LoraPair, ModulePart

if TYPE_CHECKING:
    from pathlib import Path

    from lora_layers import RowRun
    from lora_weights import Adapter

IN, LABELS = 12, 3


class Classifier(nn.Module):
    """A projection and a head of one linear module."""

    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(IN, IN)
        self.classifier = nn.Linear(IN, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[T, I]` to `[T, labels]`."""
        return self.classifier(torch.tanh(self.dense(x)))  # type: ignore[no-any-return]


class TwoLayers(nn.Module):
    """RoBERTa's form: the head is a module of two linear ones."""

    def __init__(self) -> None:
        super().__init__()
        self.classifier = nn.ModuleDict(
            {"dense": nn.Linear(IN, IN), "out_proj": nn.Linear(IN, LABELS)}
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map `[T, I]` to `[T, labels]`."""
        hidden = torch.tanh(self.classifier["dense"](x))
        return self.classifier["out_proj"](hidden)  # type: ignore[no-any-return]


class Companion(nn.Module):
    """DistilBERT's form: a second linear module beside the head."""

    def __init__(self) -> None:
        super().__init__()
        self.pre_classifier = nn.Linear(IN, IN)
        self.classifier = nn.Linear(IN, LABELS)

    def forward(self, x: Tensor) -> Tensor:
        """Map `[T, I]` to `[T, labels]`."""
        return self.classifier(self.pre_classifier(x).relu())  # type: ignore[no-any-return]


def normal(*shape: int, seed: int) -> Tensor:
    """Return random numbers."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def wrap(module: nn.Module, **options: object) -> tuple[LoraModelManager, dict[str, Tensor]]:
    """Return a wrapped model with random weights, and a copy of its state."""
    for number, parameter in enumerate(module.parameters()):
        parameter.requires_grad = False
        parameter.copy_(normal(*parameter.shape, seed=number) * 0.3)
    state = {name: value.clone().double() for name, value in module.state_dict().items()}
    values = {"max_loras": 4, "max_lora_rank": 4, "max_labels": 9} | options
    return LoraModelManager(module, LoraModelConfig(**values)), state  # type: ignore[arg-type]


def own_head(labels: int, *, seed: int, width: int = IN) -> ModulePart:
    """Return a whole head."""
    weight = normal(labels, width, seed=seed)
    return ModulePart(full=FullModule(weight=weight, bias=normal(labels, seed=seed + 1)))


def apply_head(part: ModulePart, x: Tensor) -> Tensor:
    """Compute a head's output in float64."""
    assert part.full is not None
    assert part.full.bias is not None
    return functional.linear(x, part.full.weight.double(), part.full.bias.double())


@pytest.fixture
def shell(tmp_path: Path) -> Adapter:
    """Return an adapter whose parts the tests replace."""
    return build_adapter(tmp_path, ["layers.0.attn.q_proj"]).adapter


def activate(manager: LoraModelManager, shell: Adapter, **parts: dict[str, ModulePart]) -> None:
    """Prepare, register and activate one adapter for each set of parts."""
    for key, modules in parts.items():
        manager.register(key, manager.prepare(replace(shell, parts=modules)))
        manager.activate(key)


def run(manager: LoraModelManager, x: Tensor, *rows: RowRun) -> Tensor:
    """Run one step."""
    manager.set_routing(rows, rows)
    return manager.model(x)  # type: ignore[no-any-return]


X = normal(8, IN, seed=50)


def hidden(state: dict[str, Tensor]) -> Tensor:
    """Return the input of `Classifier`'s head, float64."""
    return torch.tanh(functional.linear(X.double(), state["dense.weight"], state["dense.bias"]))


def test_heads_of_one_two_five_and_nine_labels_share_a_batch_with_the_base(shell: Adapter) -> None:
    manager, state = wrap(Classifier())
    heads = {f"l{labels}": own_head(labels, seed=labels * 10) for labels in (1, 2, 5, 9)}
    activate(manager, shell, **{key: {"classifier": part} for key, part in heads.items()})
    rows = runs((1, "l9"), (2, None), (1, "l1"), (2, "l5"), (1, "l2"), (1, "l9"))

    mixed = run(manager, X, *rows)

    assert mixed.shape == (8, 9)
    x = hidden(state)
    base = functional.linear(x, state["classifier.weight"], state["classifier.bias"])
    places = {"l9": [0, 7], "l1": [3], "l5": [4, 5], "l2": [6]}
    for key, idx in places.items():
        labels = manager.num_labels([key])
        assert labels == int(key[1:])
        expected = apply_head(heads[key], x[idx])
        torch.testing.assert_close(mixed[idx, :labels].double(), expected, rtol=1e-5, atol=1e-5)
        assert not mixed[idx, labels:].any()
    torch.testing.assert_close(mixed[1:3, :LABELS].double(), base[1:3], rtol=1e-5, atol=1e-5)
    assert manager.num_labels() == LABELS


def test_each_row_of_a_mixed_batch_is_what_it_is_alone(shell: Adapter) -> None:
    manager, _ = wrap(Classifier())
    activate(
        manager, shell, a={"classifier": own_head(2, seed=1)}, b={"classifier": own_head(7, seed=3)}
    )
    rows = (None, "a", "b", "a", None, "b", "b", "a")

    mixed = run(manager, X, *runs(*((1, key) for key in rows)))

    for index, key in enumerate(rows):
        labels = manager.num_labels([key] if key else [])
        alone = run(manager, X[index : index + 1], *runs((1, key)))
        torch.testing.assert_close(mixed[index, :labels], alone[0, :labels], rtol=0, atol=1e-6)


def test_an_adapter_without_a_head_keeps_the_bases_beside_one_that_has_its_own(
    shell: Adapter,
) -> None:
    manager, state = wrap(Classifier())
    pair = LoraPair(lora_a=normal(2, IN, seed=1), lora_b=normal(IN, 2, seed=2))
    head = own_head(5, seed=3)
    activate(manager, shell, plain={"dense": ModulePart(pair=pair)}, own={"classifier": head})

    mixed = run(manager, X, *runs((4, "plain"), (4, "own")))

    weight = state["dense.weight"] + pair.lora_b.double() @ pair.lora_a.double()
    x = torch.tanh(functional.linear(X.double(), weight, state["dense.bias"]))
    expected = functional.linear(x, state["classifier.weight"], state["classifier.bias"])
    assert manager.num_labels(["plain"]) == LABELS
    torch.testing.assert_close(mixed[:4, :LABELS].double(), expected[:4], rtol=1e-5, atol=1e-5)
    expected = apply_head(head, hidden(state))
    torch.testing.assert_close(mixed[4:, :5].double(), expected[4:], rtol=1e-5, atol=1e-5)


def test_without_an_own_head_in_the_batch_the_output_is_the_bases_bit_for_bit(
    shell: Adapter,
) -> None:
    manager, _ = wrap(Classifier())
    before = run(manager, X, *runs((8, None))).clone()
    activate(manager, shell, wide={"classifier": own_head(9, seed=1)})

    assert torch.equal(run(manager, X, *runs((8, None))), before)


def test_a_slot_used_by_a_wider_head_before_holds_nothing_of_it(shell: Adapter) -> None:
    manager, state = wrap(Classifier(), max_loras=1)
    narrow = own_head(2, seed=1)
    activate(manager, shell, narrow={"classifier": narrow})
    first = run(manager, X, *runs((8, "narrow"))).clone()
    activate(manager, shell, wide={"classifier": own_head(9, seed=3)})
    assert run(manager, X, *runs((8, "wide"))).shape == (8, 9)
    manager.remove("wide")
    manager.activate("narrow")

    again = run(manager, X, *runs((8, "narrow")))

    assert torch.equal(again, first)
    expected = apply_head(narrow, hidden(state))
    torch.testing.assert_close(again[:, :2].double(), expected, rtol=1e-5, atol=1e-5)
    pair = LoraPair(lora_a=normal(2, IN, seed=1), lora_b=normal(IN, 2, seed=2))
    activate(manager, shell, plain={"dense": ModulePart(pair=pair)})
    assert run(manager, X, *runs((8, "plain"))).shape == (8, LABELS)


@pytest.mark.parametrize(
    ("model", "inner", "label"),
    [
        (TwoLayers, "classifier.dense", "classifier.out_proj"),
        (Companion, "pre_classifier", "classifier"),
    ],
    ids=["roberta", "distilbert"],
)
def test_both_layers_of_a_head_are_the_adapters_own(
    model: type[nn.Module], inner: str, label: str, shell: Adapter
) -> None:
    manager, state = wrap(model(), target_modules=frozenset())
    first, second = own_head(IN, seed=1), own_head(6, seed=3)
    activate(manager, shell, own={inner: first, label: second})

    mixed = run(manager, X, *runs((4, None), (4, "own")))

    act = torch.tanh if model is TwoLayers else torch.relu
    own = apply_head(second, act(apply_head(first, X.double())))
    base = functional.linear(X.double(), state[f"{inner}.weight"], state[f"{inner}.bias"])
    base = functional.linear(act(base), state[f"{label}.weight"], state[f"{label}.bias"])
    torch.testing.assert_close(mixed[4:, :6].double(), own[4:], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(mixed[:4, :LABELS].double(), base[:4], rtol=1e-5, atol=1e-5)


def test_the_target_filter_does_not_reach_the_head(shell: Adapter) -> None:
    manager, _ = wrap(Classifier(), target_modules=frozenset({"dense"}))

    prepared = manager.prepare(replace(shell, parts={"classifier": own_head(4, seed=1)}))

    assert prepared.num_labels == 4
    assert set(manager.shapes) == {"dense", "classifier"}


@pytest.mark.parametrize(
    ("part", "limit", "text"),
    [
        (own_head(9, seed=1), 8, r"classifier weight is \[9, 12\], expected \[at most 8, 12\]"),
        (own_head(4, seed=1), None, r"classifier weight is \[4, 12\], expected \[at most 3, 12\]"),
        (own_head(2, seed=1, width=10), 8, r"weight is \[2, 10\], expected \[at most 8, 12\]"),
        (
            ModulePart(full=FullModule(weight=normal(2, IN, seed=1))),
            8,
            "classifier bias is not in the file",
        ),
    ],
    ids=["too many labels", "more than the base", "other width", "no bias"],
)
def test_a_head_that_does_not_fit_is_refused_with_the_numbers(
    part: ModulePart, limit: int | None, text: str, shell: Adapter
) -> None:
    manager, _ = wrap(Classifier(), max_labels=limit)

    with pytest.raises(AdapterMismatchError, match=text):
        manager.prepare(replace(shell, parts={"classifier": part}))


def test_a_listed_head_without_weights_is_refused_and_a_listed_absent_one_is_normal(
    shell: Adapter,
) -> None:
    manager, _ = wrap(Classifier())
    config = replace(shell.config, modules_to_save=("classifier", "score"))
    listed = replace(shell, config=config)
    pair = LoraPair(lora_a=normal(2, IN, seed=1), lora_b=normal(IN, 2, seed=2))

    manager.prepare(replace(listed, parts={"classifier": own_head(2, seed=1)}))
    with pytest.raises(AdapterMismatchError, match=r"listed in modules_to_save \(classifier\)"):
        manager.prepare(replace(listed, parts={"dense": ModulePart(pair=pair)}))


def test_a_head_trained_for_another_task_is_refused(shell: Adapter) -> None:
    manager, _ = wrap(Classifier(), head_task_type="SEQ_CLS")
    head = {"classifier": own_head(2, seed=1)}

    for task_type in (None, "SEQ_CLS"):
        config = replace(shell.config, task_type=task_type)
        assert manager.prepare(replace(shell, parts=head, config=config)).num_labels == 2
    config = replace(shell.config, task_type="TOKEN_CLS")
    with pytest.raises(AdapterMismatchError, match="TOKEN_CLS, expected SEQ_CLS"):
        manager.prepare(replace(shell, parts=head, config=config))


def test_with_two_heads_in_the_model_no_adapter_brings_its_own(shell: Adapter) -> None:
    model = nn.ModuleDict({"score": nn.Linear(IN, 2), "classifier": nn.Linear(IN, 2)})
    manager, _ = wrap(model)

    assert manager.num_labels() is None
    with pytest.raises(AdapterMismatchError, match=r"one of 2 heads \(score, classifier\)"):
        manager.prepare(replace(shell, parts={"classifier": own_head(2, seed=1)}))


def test_a_head_has_no_meaning_at_another_scale(shell: Adapter) -> None:
    manager, _ = wrap(Classifier())
    activate(manager, shell, own={"classifier": own_head(2, seed=1)})

    with pytest.raises(NotLinearError, match="own"):
        manager.set_routing(runs((8, [("own", 0.5)])), runs((8, [("own", 0.5)])))


@pytest.mark.parametrize(
    ("model", "members"),
    [
        (Classifier(), {"classifier"}),
        (TwoLayers(), {"classifier.dense", "classifier.out_proj"}),
        (Companion(), {"pre_classifier", "classifier"}),
        (nn.ModuleDict({"score": nn.ReLU(), "proj": nn.Linear(2, 2)}), set()),
    ],
    ids=["one layer", "two layers", "companion", "no linear module"],
)
def test_finds_the_linear_modules_of_a_head(model: nn.Module, members: set[str]) -> None:
    heads = find_heads(walk_sites(model), {"score", "classifier"})

    assert {path for head in heads for path in head.member_paths} == members
