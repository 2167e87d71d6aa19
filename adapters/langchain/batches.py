"""Batches: whether a chain takes its inputs one by one, so that each may begin when its turn has come."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from langchain_core.language_models import BaseLLM
from langchain_core.runnables import Runnable

from teola_plugin.tracer.lcel_classes import is_pool_backed

_KNOWN = ("langchain_core.", "teola_plugin.")


def batches_one_by_one(chain: Runnable[Any, Any]) -> bool:
    """Whether nothing in it makes one call of a whole batch: text models do, and maybe classes of the user's own."""
    return all(_one_by_one(node) for node in _inside(chain))


def _one_by_one(node: Runnable[Any, Any]) -> bool:
    if is_pool_backed(node):
        return True
    own = (getattr(type(node), name).__module__ for name in ("batch", "abatch"))
    return not isinstance(node, BaseLLM) and all(module.startswith(_KNOWN) for module in own)


def _inside(root: Any) -> Iterator[Runnable[Any, Any]]:
    """All Runnables below `root`, through fields and containers; user code is not looked into."""
    todo, seen = [root], dict[int, Any]()
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen[id(node)] = node
        if isinstance(node, Mapping):
            todo += node.values()
        elif isinstance(node, list | tuple):
            todo += node
        elif isinstance(node, Runnable):
            yield node
            todo += vars(node).values()
