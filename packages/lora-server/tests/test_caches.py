"""No hidden cache: nothing that answers requests may remember results between them."""

from __future__ import annotations

import importlib
import pkgutil

import lora_server
import lora_server.adapters
import lora_server.engine
import lora_server.http
import lora_server.model


def test_c36_no_module_on_the_way_of_a_request_keeps_results_in_a_memo() -> None:
    """Looks for `functools` caches, on modules and their classes; the prefix cache is no memo."""
    packages = (lora_server.adapters, lora_server.engine, lora_server.http, lora_server.model)
    memos = []
    for package in packages:
        for info in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            module = importlib.import_module(info.name)
            owners = [module, *(v for v in vars(module).values() if isinstance(v, type))]
            memos += [
                f"{info.name}.{name}"
                for owner in owners
                if getattr(owner, "__module__", info.name) == info.name
                for name, value in vars(owner).items()
                if hasattr(value, "cache_info")
            ]

    assert memos == []
