"""What this package refuses, and with which facts.

LayerError
    LayerConfigError (ValueError)
    UnsupportedModuleError (TypeError)
    TargetNotFoundError (ValueError)
    AdapterMismatchError (ValueError)
    AdapterNotActiveError (LookupError)
    NotLinearError (ValueError)
    RoutingNotSetError (RuntimeError)
    InferenceOnlyError (RuntimeError)

Texts say where, found and expected; the facts are attributes too.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from lora_weights import Problem

MAX_LISTED = 50
"""Items written out in a text; all of them are in the error's attribute."""


def _listed(head: str, items: tuple[str, ...]) -> str:
    """Return one line for one item, an indented list for several."""
    if len(items) == 1:
        return f"{head}: {items[0]}"
    lines = [f"{head}: {len(items)} problems", *(f"  {item}" for item in items[:MAX_LISTED])]
    if len(items) > MAX_LISTED:
        lines.append(f"  and {len(items) - MAX_LISTED} more")
    return "\n".join(lines)


class LayerError(Exception):
    """Base of every error this package raises."""


class LayerConfigError(LayerError, ValueError):
    """Values of a `LoraModelConfig` are out of range or contradict each other."""

    def __init__(self, problems: Iterable[str]) -> None:
        self.problems = tuple(problems)
        """Every problem, each with the field, found and expected."""
        super().__init__(_listed("LoraModelConfig", self.problems))


class UnsupportedModuleError(LayerError, TypeError):
    """Modules that `target_modules` names cannot carry LoRA."""

    def __init__(self, modules: Mapping[str, str]) -> None:
        self.modules = dict(modules)
        """Module path -> why it cannot be wrapped."""
        texts = tuple(f"{path} {reason}" for path, reason in self.modules.items())
        super().__init__(_listed("target_modules", texts))


class TargetNotFoundError(LayerError, ValueError):
    """The model has nothing to wrap, or `target_modules` names what it does not have."""


class AdapterMismatchError(LayerError, ValueError):
    """An adapter does not fit this model. Holds every problem, not the first one."""

    def __init__(self, problems: Iterable[Problem], *, source: str = "") -> None:
        self.problems = tuple(problems)
        """Every problem found, each with module, tensor, found and expected."""
        self.source = source
        """Where the adapter came from."""
        texts = tuple(str(problem) for problem in self.problems)
        super().__init__(_listed(f"adapter {source!r}", texts))


class AdapterNotActiveError(LayerError, LookupError):
    """A step names adapters that are in no slot; running it would give the base model's output."""

    def __init__(self, residency: Mapping[str, str]) -> None:
        self.residency = dict(residency)
        """Adapter key -> where it is: `host`, or `disk` when it is not registered."""
        found = ", ".join(f"{key!r} (residency {where})" for key, where in residency.items())
        super().__init__(
            f"the step names adapters that are in no slot: {found}; acquire them first"
        )


class NotLinearError(LayerError, ValueError):
    """A step scales or mixes adapters whose change does not grow with a scale."""

    def __init__(self, keys: Iterable[str]) -> None:
        self.keys = tuple(keys)
        """Keys of the adapters."""
        super().__init__(
            f"adapters {list(self.keys)} hold gains (DoRA, IA3) or whole modules, which have no "
            "meaning at another scale or in a sum; expected scale 1 and no other adapter beside it"
        )


class RoutingNotSetError(LayerError, RuntimeError):
    """A module was called before `set_routing`, or with other rows than the step was set for."""

    def __init__(self, *, module: str, num_rows: int, num_routed: int | None) -> None:
        self.module = module
        """Path of the wrapped module."""
        self.num_rows = num_rows
        """Rows the module was called with."""
        self.num_routed = num_routed
        """Rows the step was set for; None when no routing is set."""
        found = "no routing is set" if num_routed is None else f"the routing has {num_routed} rows"
        super().__init__(f"{module} is called with {num_rows} rows and {found}; call set_routing")


class InferenceOnlyError(LayerError, RuntimeError):
    """A module with an active adapter was called with gradients on; the LoRA part has none."""

    def __init__(self, *, module: str) -> None:
        self.module = module
        """Path of the wrapped module."""
        super().__init__(
            f"{module} runs adapters without gradients: call the model under torch.inference_mode()"
        )
