"""The error classes are the tree that their module draws."""

from __future__ import annotations

import inspect

from lora_kernels import errors


def drawn_tree() -> dict[str, tuple[str, str | None]]:
    """Class -> (parent, builtin parent), as the module's docstring draws it."""
    assert errors.__doc__
    tree: dict[str, tuple[str, str | None]] = {}
    parents: list[str] = []
    for line in errors.__doc__.splitlines():
        name, _, builtin = line.strip().partition(" ")
        if not name.endswith("Error"):
            continue
        depth = (len(line) - len(line.lstrip())) // 4
        parents[depth:] = [name]
        tree[name] = (parents[depth - 1] if depth else "Exception", builtin.strip("()") or None)
    return tree


def test_the_drawn_tree_is_the_class_tree() -> None:
    classes = {name: cls for name, cls in vars(errors).items() if inspect.isclass(cls)}
    tree = drawn_tree()

    assert set(tree) == set(classes)
    for name, (parent, builtin) in tree.items():
        bases = [base.__name__ for base in classes[name].__bases__]
        assert bases == [parent, *([builtin] if builtin else [])]
