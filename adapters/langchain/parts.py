"""Parts that are planned when they begin: what a branch, a router, a fallback or the user's function chooses.

What runs is known at run time only. So the composite runs as it always did, in a copy whose parts are accelerated
objects of their own: when one is called, its e-graph joins the live query.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Protocol

from langchain_core.runnables import (
    RouterRunnable,
    Runnable,
    RunnableBranch,
    RunnableLambda,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableEach
from langchain_core.runnables.configurable import RunnableConfigurableAlternatives
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.runnables.retry import RunnableRetry

from teola_plugin.adapters.langchain.composites import parts as structural_parts
from teola_plugin.adapters.langchain.composites import with_parts as with_structural_parts
from teola_plugin.tracer.langchain.classes import WRAPPED_FUNCTION, find_override, is_pool_backed, store_effects
from teola_plugin.tracer.langchain.equivalents import equivalent_chain
from teola_plugin.tracer.purity.purity import analyze_callable

Node = Runnable[Any, Any]


class Accelerate(Protocol):
    """A function that accelerates the parts of a composite."""

    def __call__(self, node: Node, /) -> Node:
        """The same part, accelerated if that is of any use."""
        ...

    def graph(self, node: Node, /) -> Node:
        """A compiled graph, accelerated; the very object for any other."""
        ...

    def maps(self, node: RunnableEach[Any, Any], /) -> bool:
        """Return True if the graph knows all that is done with an item, so that it needs no plan of its own."""
        ...


KEPT = 32
"""Runnables that a function of the user's returned, remembered with what was made of them."""


def with_parts(node: Node, accelerate: Accelerate) -> Node:
    """`node`, or a copy of its composites in which parts that are chosen at run time are accelerated."""
    if is_pool_backed(node):
        return node
    if (graph := accelerate.graph(node)) is not node:
        return graph
    for kind, make in _KINDS:
        if type(node) is kind:  # a class of the user's own may do anything with its parts
            return node if find_override(node, kind) else make(node, accelerate)
    before = dict(structural_parts(node))
    accelerated_parts = {where: with_parts(part, accelerate) for where, part in before.items()}
    return (
        node
        if all(accelerated_parts[where] is before[where] for where in accelerated_parts)
        else with_structural_parts(node, accelerated_parts)
    )


def _updated(node: Any, **fields: Any) -> Node:
    """A copy with other values for some fields; the very same object when they are what they were."""
    same = all(_same(getattr(node, name), value) for name, value in fields.items())
    updated: Node = node if same else node.model_copy(update=fields)
    return updated


def _same(old: Any, new: Any) -> bool:
    if isinstance(new, Mapping):
        return all(old[key] is value for key, value in new.items())
    if isinstance(new, (list, tuple)):
        return all(_same(a, b) for a, b in zip(old, new, strict=True))
    return old is new


def _branch(node: RunnableBranch[Any, Any], accelerate: Accelerate) -> Node:
    arms = [(condition, accelerate(arm)) for condition, arm in node.branches]
    return _updated(node, branches=arms, default=accelerate(node.default))


def _fallbacks(node: RunnableWithFallbacks[Any, Any], accelerate: Accelerate) -> Node:
    fallbacks = [accelerate(one) for one in node.fallbacks]
    return _updated(node, runnable=accelerate(node.runnable), fallbacks=fallbacks)


def _alternatives(node: RunnableConfigurableAlternatives[Any, Any], accelerate: Accelerate) -> Node:
    alternatives = {
        key: accelerate(one) if isinstance(one, Runnable) else one for key, one in node.alternatives.items()
    }
    return _updated(node, default=accelerate(node.default), alternatives=alternatives)


def _lambda(node: RunnableLambda[Any, Any], accelerate: Accelerate) -> Node:
    """The user's function runs as it always did; a Runnable that it returns is accelerated."""
    func, afunc = vars(node).get("func"), vars(node).get("afunc")
    if equivalent_chain(node) is not None or store_effects(func):
        return node  # the framework's own
    wrapped = {
        name: wrapper
        for name, one in (("func", func), ("afunc", afunc))
        if one is not None and analyze_callable(one) is None and (wrapper := _returning(one, _Remembered(accelerate)))
    }
    if not wrapped:
        return node
    copied = copy.copy(node)
    vars(copied).update(wrapped)
    return copied


class _Remembered:
    """`accelerate`, once for each of the Runnables that keep coming back."""

    def __init__(self, accelerate: Accelerate) -> None:
        self._accelerate = accelerate
        self._pairs: list[tuple[Node, Node]] = []

    def __call__(self, value: Any) -> Any:
        if not isinstance(value, Runnable):
            return value
        for original, accelerated in list(self._pairs):
            if original is value:
                return accelerated
        accelerated = self._accelerate(value)
        self._pairs = [*self._pairs[1 - KEPT :], (value, accelerated)]
        return accelerated


def _returning(func: Callable[..., Any], accelerated: _Remembered) -> Callable[..., Any] | None:
    """`func`, with what it returns accelerated; None for a function that yields."""
    if not inspect.isroutine(func) or inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
        return None
    if inspect.iscoroutinefunction(func):

        @functools.wraps(func)
        async def acall(*args: Any, **kwargs: Any) -> Any:
            return accelerated(await func(*args, **kwargs))

        setattr(acall, WRAPPED_FUNCTION, func)
        return acall

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        return accelerated(func(*args, **kwargs))

    setattr(call, WRAPPED_FUNCTION, func)
    return call


_KINDS: tuple[tuple[type, Callable[[Any, Accelerate], Node]], ...] = (
    (RunnableBranch, _branch),
    (
        RouterRunnable,
        lambda node, accelerate: _updated(
            node, runnables={key: accelerate(one) for key, one in node.runnables.items()}
        ),
    ),
    (RunnableWithFallbacks, _fallbacks),
    (RunnableRetry, lambda node, accelerate: _updated(node, bound=accelerate(node.bound))),
    (
        RunnableEach,
        lambda node, accelerate: node if accelerate.maps(node) else _updated(node, bound=accelerate(node.bound)),
    ),
    (RunnableConfigurableAlternatives, _alternatives),
    (RunnableWithMessageHistory, lambda node, accelerate: _updated(node, bound=with_parts(node.bound, accelerate))),
    (RunnableLambda, _lambda),
)
