"""What equivalents are made of: steps that the tracer knows, and nobody runs as they are."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from langchain_core.runnables import Runnable, RunnableLambda
from langchain_core.runnables.base import RunnableEach

from teola_plugin.tracer.leaf import Leaf

Node = Runnable[Any, Any]


class Computed(RunnableLambda[Any, Any]):
    """The framework's own pure code for a step."""


class AsDict(Computed):
    """A chain's input: its one key's value may come bare. Nothing to do where a dictionary is known to come."""

    def __init__(self, key: str | None) -> None:
        super().__init__(lambda value: value if isinstance(value, dict) or key is None else {key: value})


class SequentialEach(RunnableEach[Any, Any]):
    """Each item, where the plain sync code makes one call after the other: the graph makes them at once."""


class LeafStep(RunnableLambda[Any, Any]):
    """A step on an engine, for an object that is no Runnable."""

    def __init__(self, leaf: Leaf) -> None:
        super().__init__(_never_run)
        self._leaf = leaf

    def __teola_leaf__(self, kwargs: Mapping[str, Any]) -> Leaf:
        return self._leaf


def _never_run(value: Any) -> Any:
    raise AssertionError("an equivalent is planned with, and never run")


def is_from(function: Callable[..., Any], module: str, name: str) -> bool:
    """Whether it is that very function of the framework; without importing what nobody has imported."""
    return getattr(function, "__module__", "") == module and getattr(function, "__qualname__", "") == name
