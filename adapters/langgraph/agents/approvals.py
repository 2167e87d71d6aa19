"""Where something may stand between a model's answer and its tools: then nothing of the tools begins early.

Tools may begin while a node asks its model only if the node leads to them directly. What leads elsewhere first (hooks
after the model, a node that asks a human) has the last word, and so does `interrupt()` in anything on the way.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Collection, Iterable, Iterator
from types import CodeType, FunctionType, MethodType
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool

from teola_plugin.tracer.langgraph.shape import GraphShape, NodeShape

Names = frozenset[str]
_LOOKED_AT = 2000
"""Objects that are looked into for one answer; where there are more, nobody knows."""


def models_before(shape: GraphShape, tools: Names) -> Names:
    """The nodes that may lead to one of these directly, without anybody being asked on the way."""
    before = frozenset(name for name, node in shape.nodes.items() if tools and _leads(node, tools))
    return frozenset(name for name in before if not _held_back(shape, shape.nodes[name], tools))


def _leads(node: NodeShape, tools: Names) -> bool:
    if not tools.isdisjoint((*node.then, *node.joins)):
        return True
    return any(not branch.ends or not tools.isdisjoint(branch.nodes) for branch in node.branches)


def _held_back(shape: GraphShape, node: NodeShape, tools: Names) -> bool:
    """Whether somebody is asked in the node itself, in what chooses where it leads, in the tools' own node, or in
    another node that it may lead to."""
    bound = [shape.nodes[name].bound for name in {node.name, *behind(shape, node), *tools} if name in shape.nodes]
    return any(map(interrupts, (*bound, *(branch.path for branch in node.branches))))


def behind(shape: GraphShape, node: NodeShape) -> Names:
    """The nodes that it may lead to directly; all of them where a conditional edge does not say."""
    chosen = (end for branch in node.branches for end in branch.nodes or shape.nodes)
    return frozenset((*node.then, *node.joins, *chosen))


def interrupts(obj: Any) -> bool:
    """Whether code of a function, or of what it holds, speaks of `interrupt`; also where there is too much of it.

    Tools and models are not looked into: a tool that asks a human asks about itself.
    """
    for number, one in enumerate(_held(obj)):
        if number > _LOOKED_AT or (isinstance(one, FunctionType) and _speaks(one)):
            return True
    return False


def _speaks(function: FunctionType) -> bool:
    names = set(_names(function.__code__)) - {KeyboardInterrupt.__name__}
    return any("interrupt" in name.lower() or _is_interrupt(function.__globals__.get(name)) for name in names)


def _is_interrupt(value: Any) -> bool:
    return getattr(value, "__module__", "") == "langgraph.types" and getattr(value, "__name__", "") == "interrupt"


def _names(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names(inner)


def _held(obj: Any) -> Iterator[Any]:
    """The object, and the functions and Runnables that it holds, each once."""
    todo, seen = [obj], dict[int, Any]()
    while todo:
        one = todo.pop()
        if id(one) not in seen:
            seen[id(one)] = one  # kept: the id stays its own
            yield one
            todo += _inside(one)


def _inside(one: Any) -> Iterable[Any]:
    if isinstance(one, list | tuple):
        return one
    if isinstance(one, dict):
        return one.values()
    if isinstance(one, BaseTool | BaseLanguageModel | type):
        return ()
    if isinstance(one, functools.partial):
        return [one.func, *one.args, *one.keywords.values()]
    if isinstance(one, MethodType):
        return [one.__func__]
    if isinstance(one, FunctionType):
        return [*_cells(one), vars(one).get("__wrapped__")]
    if isinstance(one, Runnable):
        return list(vars(one).values())
    call = vars(type(one)).get("__call__")
    return [call] if isinstance(call, FunctionType) else ()


def _cells(function: FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # it has no value yet
            yield cell.cell_contents


def paused(asked: Collection[str] | str | None, nodes: Names) -> bool:
    """Whether a graph that is to stop at these nodes (`interrupt_before`, `interrupt_after`) stops at one of ours."""
    return asked == "*" or (not isinstance(asked, str) and not nodes.isdisjoint(asked or ()))
