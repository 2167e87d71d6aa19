"""Composites that are looked into: their parts, and copies of them with other parts."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from langchain_core.runnables import (
    Runnable,
    RunnableAssign,
    RunnableBinding,
    RunnableParallel,
    RunnableSequence,
)
from langchain_core.runnables.base import RunnableEach

from teola_plugin.tracer.langchain.classes import is_accelerated
from teola_plugin.tracer.langchain.equivalents import retriever_per_query

Node = Runnable[Any, Any]


def parts(node: Node) -> Iterator[tuple[str, Node]]:
    """The parts of a composite that is looked into, and where they are; as the tracer walks."""
    if is_accelerated(node):
        return
    if isinstance(node, RunnableSequence):
        yield from ((f".steps[{i}]", step) for i, step in enumerate(node.steps))
    elif isinstance(node, RunnableAssign):
        yield ".mapper", node.mapper
    elif isinstance(node, RunnableParallel):
        yield from ((f'.steps__["{key}"]', step) for key, step in node.steps__.items())
    elif isinstance(node, RunnableBinding) or type(node) is RunnableEach:
        yield ".bound", node.bound
    elif (retriever := retriever_per_query(node)) is not None:
        yield ".retriever", retriever


def rebuilt(node: Node, path: str, makers: Mapping[str, Callable[[str], Node]]) -> Node:
    """A copy of the composites above the chosen paths, which are made anew; all else is the very same object."""
    if path in makers:
        return makers[path](path)
    before = dict(parts(node))
    inner = {where: rebuilt(part, path + where, makers) for where, part in before.items()}
    if all(inner[where] is before[where] for where in inner):
        return node
    return with_parts(node, inner)


def with_parts(node: Node, inner: Mapping[str, Node]) -> Node:
    """A copy of a composite with other `parts`."""
    return node.model_copy(update=_fields(node, inner))  # type: ignore[attr-defined, no-any-return]


def _fields(node: Node, inner: Mapping[str, Node]) -> dict[str, Any]:
    parts_in_order = list(inner.values())
    if isinstance(node, RunnableSequence):
        return {"first": parts_in_order[0], "middle": parts_in_order[1:-1], "last": parts_in_order[-1]}
    if isinstance(node, RunnableAssign):
        return {"mapper": parts_in_order[0]}
    if isinstance(node, RunnableParallel):
        return {"steps__": dict(zip(node.steps__, parts_in_order, strict=True))}
    return {next(iter(inner)).removeprefix("."): parts_in_order[0]}
