"""What a LangChain object is: recognised by `isinstance`, trusted only where nothing it executes is overridden."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any

from langchain_core.language_models import BaseLanguageModel
from langchain_core.output_parsers.base import BaseLLMOutputParser
from langchain_core.prompts import BasePromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import (
    RouterRunnable,
    Runnable,
    RunnableAssign,
    RunnableBranch,
    RunnableGenerator,
    RunnableLambda,
    RunnableParallel,
    RunnablePassthrough,
    RunnablePick,
    RunnableSequence,
    RunnableWithFallbacks,
)
from langchain_core.runnables.base import RunnableBindingBase, RunnableEachBase
from langchain_core.runnables.configurable import DynamicRunnable
from langchain_core.runnables.history import RunnableWithMessageHistory
from langchain_core.runnables.retry import RunnableRetry
from langchain_core.tools import BaseTool

from teola_plugin.errors import TraceError
from teola_plugin.tracer.leaf import Leaf
from teola_plugin.tracer.purity.purity import Purity, analyze_callable

# Methods that may be overridden without a change of what a call computes.
_HARMLESS = re.compile(
    r"__.*|lc_.*|get_.*|with_.*|(a?stream|a?transform)_events|is_lc_serializable|bind|bind_tools|pipe|map|assign|pick"
    r"|partial|pretty_.*|save|dict|asdict|json|copy|model_post_init|_abc_.*|from_.*|validate_.*|pre_init_.*"
)
_RUN_KEEPERS = ("langchain_core", "langchain_classic", "teola_plugin")
_EXECUTED = ("invoke", "ainvoke", "stream", "astream", "transform", "atransform", "batch", "abatch")
_ANY_EXECUTED = frozenset(_EXECUTED)


@lru_cache(maxsize=1024)
def overridden(cls: type[Any], known: type[Any]) -> str:
    """Name of a method below `known` that changes what a call does; empty when there is none."""
    for one in cls.__mro__[: cls.__mro__.index(known)]:
        for name, value in vars(one).items():
            if callable(value) and callable(getattr(known, name, None)) and not _HARMLESS.fullmatch(name):
                return f"{one.__name__}.{name}"
    return ""


def changed(node: object, known: type[Any]) -> str:
    """As `overridden`, for an object: its own attributes may hide methods too."""
    below = overridden(type(node), known)  # type: ignore[arg-type]
    if below or _ANY_EXECUTED.isdisjoint(vars(node)):
        return below
    return next(f"its own {name}" for name in _EXECUTED if name in vars(node))


@lru_cache(maxsize=1024)
def _leaf_owner(cls: type[Any]) -> type[Any] | None:
    """The class that says what leaf objects of `cls` are; None where they are no leaves of the pool."""
    return next((one for one in cls.__mro__ if "__teola_leaf__" in vars(one)), None)


def leaf_of(node: object, kwargs: Mapping[str, Any]) -> Leaf | str | None:
    """The leaf of a pool-backed object, why it has none, or None for any other object."""
    owner = _leaf_owner(type(node))  # type: ignore[arg-type]
    if owner is None:
        return None
    other = changed(node, owner)
    if other:
        return f"{other} overrides what the pool-backed class does"
    leaf: Leaf | None = node.__teola_leaf__(kwargs)  # type: ignore[attr-defined]
    return leaf or "its bound arguments change what it does"


def is_pool_backed(node: object) -> bool:
    return _leaf_owner(type(node)) is not None  # type: ignore[arg-type]


def check_runnable(node: object, path: str) -> None:
    """Raises `TraceError` for anything but a Runnable."""
    if not isinstance(node, Runnable):
        raise TraceError(
            f"{path} is a {type(node).__qualname__}, not a LangChain Runnable.",
            path=path,
            hint="pass a Runnable (a chain, a model, a retriever, RunnableLambda(function), ...)",
        )


def silent(node: Runnable[Any, Any]) -> bool:
    """Whether the tracer sees through the node, or it adds at most a key access: it needs no name of its own."""
    if is_pool_backed(node):
        return False
    if isinstance(node, RunnableSequence):
        return all(silent(step) for step in node.steps)
    if isinstance(node, RunnableParallel):
        return all(silent(step) for step in node.steps__.values())
    if isinstance(node, RunnableAssign):
        return silent(node.mapper)
    if isinstance(node, RunnableBindingBase):
        return silent(node.bound)
    if isinstance(node, RunnableLambda):
        reads = analyze_callable(getattr(node, "func", None))
        return reads is not None and not (isinstance(reads, Purity) and reads.path is None)
    if isinstance(node, RunnablePassthrough):
        return node.func is None and node.afunc is None
    return isinstance(node, (RunnablePick, BasePromptTemplate))


_NAMES: tuple[tuple[type, str], ...] = (
    (BaseLanguageModel, "model"),
    (BaseRetriever, "retrieve"),
    (BaseLLMOutputParser, "parse"),
    (BasePromptTemplate, "prompt"),
    (RunnableEachBase, "each"),
    (RunnableSequence, "sequence"),
    (RunnableParallel, "parallel"),
    (RunnableAssign, "assign"),
    (RunnablePick, "pick"),
    (RunnablePassthrough, "passthrough"),
    (RunnableBranch, "branch"),
    (RunnableGenerator, "generator"),
    (RunnableWithFallbacks, "fallbacks"),
    (RunnableRetry, "retry"),
    (RunnableWithMessageHistory, "history"),
    (RouterRunnable, "router"),
    (DynamicRunnable, "configurable"),
)


def short_name(node: object) -> str:
    """One readable word for a component's name."""
    if isinstance(node, RunnableLambda):
        func = vars(node).get("func") or vars(node).get("afunc")
        name = getattr(func, "__name__", "")
        return name if isinstance(name, str) and name.isidentifier() else "lambda"
    if isinstance(node, BaseTool):
        return node.name
    known = next((name for cls, name in _NAMES if isinstance(node, cls)), "")
    return known or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(node).__name__).lower()


def reason(node: object) -> str:
    """Why a node that no rule lowers runs as it always did."""
    if isinstance(node, RunnableLambda):
        return "your code: runs once, in its place; pool-backed models it calls join the query"
    if isinstance(node, (BaseLanguageModel, BaseRetriever)):
        return "wrapped leaf: runs as it always did"
    if isinstance(node, BaseTool):
        return "a tool: runs once, in its place"
    if isinstance(node, DynamicRunnable):
        return "its structure depends on the configuration of each call"
    if isinstance(node, (BaseLLMOutputParser, BasePromptTemplate)):
        return f"{type(node).__name__} is not known to be pure"
    return f"{type(node).__name__} decides at run time what runs"


def emits_own_run(node: object) -> bool:
    """Whether its run, as callbacks see it, ends with exactly the value it returns.

    True for the frameworks' own run-keeping methods. A Router or a Configurable lends its tag to whatever it chooses.
    """
    if isinstance(node, (RouterRunnable, DynamicRunnable)):
        return False
    methods = [getattr(type(node), name) for name in ("invoke", "ainvoke", "transform", "atransform")]
    if not all(str(getattr(m, "__module__", "")).split(".")[0] in _RUN_KEEPERS for m in methods):
        return False
    if isinstance(node, RunnableWithFallbacks):  # what it tries has the same parent and tag as itself
        return all(emits_own_run(one) for one in node.runnables)
    return emits_own_run(node.bound) if isinstance(node, RunnableBindingBase) else True


def children(node: object) -> Iterator[tuple[str, object]]:
    """The parts of a composite and where they are. An accelerated object is a whole, with a plan of its own."""
    if is_accelerated(node):
        return
    if isinstance(node, RunnableSequence):
        yield from ((f".steps[{i}]", step) for i, step in enumerate(node.steps))
    elif isinstance(node, RunnableParallel):
        yield from ((f'.steps__["{key}"]', step) for key, step in node.steps__.items())
    elif isinstance(node, RunnableAssign):
        yield ".mapper", node.mapper
    elif isinstance(node, (RunnableBindingBase, RunnableEachBase)):
        yield ".bound", node.bound
    elif isinstance(node, RunnableBranch):
        for i, (condition, arm) in enumerate(node.branches):
            yield from ((f".branches[{i}][0]", condition), (f".branches[{i}][1]", arm))
        yield ".default", node.default
    elif isinstance(node, RunnableWithFallbacks):
        yield from ((f".runnables[{i}]", one) for i, one in enumerate(node.runnables))
    elif isinstance(node, RouterRunnable):
        yield from ((f'.runnables["{key}"]', one) for key, one in node.runnables.items())
    elif isinstance(node, DynamicRunnable):
        yield ".default", node.default


def is_accelerated(node: object) -> bool:
    """Whether it brings an e-graph of its own when it is called."""
    return hasattr(type(node), "__teola_accelerated__")


def planned(node: Any) -> Any:
    """What runs for a chain that is accelerated by itself; the node itself for any other."""
    return getattr(node, "chain", node) if is_accelerated(node) else node


def pool_backed_inside(node: object, path: str) -> Iterator[tuple[str, object]]:
    """Pool-backed objects, and parts with plans of their own, that a composite holds as far as its attributes show."""
    stack = [(path, node)]
    while stack:
        where, one = stack.pop()
        if is_pool_backed(one) or is_accelerated(one):
            yield where, one
        else:
            stack += [(where + more, child) for more, child in reversed(list(children(one)))]
