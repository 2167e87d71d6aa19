"""Private names of LangGraph: each touched here, in a function that says what happens without it.

Seen unchanged from langgraph 1.0.0 to 1.2.22.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

from teola_plugin.graph.containers import trust_package
from teola_plugin.shims import report_missing

trust_package("langgraph")

Wrap = Callable[[Any], Any]
"""What the loop runs for a node -> what it runs instead."""


def watched_node(node: Any, wrap: Wrap, instead: Any = None, **changes: Any) -> Any:
    """Return a copy of a `PregelNode`, with other values for some fields, of which the loop runs `wrap(...)`.

    `instead`: what runs in place of `bound`, which stays what it was, for by it the node cache tells nodes apart; so do
    the writers. Private:
    `PregelNode.node`, the cached property that the loop reads (`langgraph.pregel._read`); since langgraph 0.3. Where it
    is no cached property any more, the node is given back as it is: it runs as always, and nothing ahead of it.
    """
    if not hasattr(type(node), "node") or not hasattr(node, "copy"):
        _report_unwatched(node)
        return node
    copied = node.copy(changes)
    run = (copied if instead is None else copied.copy({"bound": instead})).node
    if run is None:
        return copied
    if not hasattr(getattr(type(node), "node", None), "attrname"):
        _report_unwatched(node)
        return node.copy(changes)
    vars(copied)["node"] = wrap(run)
    return copied


def _report_unwatched(node: Any) -> None:
    report_missing("langgraph", f"{type(node).__name__}.node", "nothing in the graph's nodes starts early")


def state_of(config: Mapping[str, Any], channels: Sequence[str]) -> Mapping[str, Any] | None:
    """Return the values of the state's channels, those that have one, as the task with this config sees them.

    Private: the key `__pregel_read` of the config's `configurable`, a function (channels, fresh) -> values; since
    langgraph 0.2. Without it: None.
    """
    read = (config.get("configurable") or {}).get("__pregel_read")
    values = read(list(channels), False) if callable(read) else None
    if isinstance(values, Mapping):
        return values
    report_missing("langgraph", "__pregel_read", "calls that depend on the graph's state do not start early")
    return None


def configurable_of(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return what the user has set in the `configurable` of a config, without LangGraph's own keys.

    Private: that these begin with `__pregel_`; since langgraph 0.1.
    """
    return {key: value for key, value in (config.get("configurable") or {}).items() if not key.startswith("__pregel_")}


def context_of(config: Mapping[str, Any]) -> Any:
    """Return the context of the call that a task with this config belongs to; None without one.

    Private: the key `__pregel_runtime` of the config's `configurable`; since langgraph 0.6. Without it: None.
    """
    return getattr((config.get("configurable") or {}).get("__pregel_runtime"), "context", None)


def injected_arguments(runnable: object) -> Sequence[str]:
    """Return the names of the arguments that a node's functions take besides their input.

    Private: `RunnableCallable.func_accepts`; since langgraph 0.4. Without it: empty, and they are what they are by
    default.
    """
    if _of_lambda(runnable) is not None:
        return ("config",)
    return tuple(getattr(runnable, "func_accepts", ()))


def is_sent_task(config: Mapping[str, Any]) -> bool:
    """Return True if a task was sent its input (`Send`), instead of reading the state.

    Private: the first word of `langgraph_path` in the config's metadata, which is public itself; since langgraph 0.2.
    Without it: False.
    """
    path = (config.get("metadata") or {}).get("langgraph_path") or ("",)
    return bool(path[0] == "__pregel_push")


def is_resumed(config: Mapping[str, Any]) -> bool:
    """Return True if graphs inside of the task with this config go on from a checkpoint, after an interrupt or error.

    Private: the key `__pregel_resuming` of the config's `configurable`; since langgraph 0.2. Without it: False.
    """
    return bool((config.get("configurable") or {}).get("__pregel_resuming"))


def branch_of(config: Mapping[str, Any]) -> str:
    """Return the fan-out that a task was sent by (`Send`), the same for all of its branches; empty for any other task.

    Private: as in `is_sent_task`, and the namespace of the checkpoint, in the config's metadata.
    """
    if not is_sent_task(config):
        return ""
    metadata = config["metadata"]
    outer = str(metadata.get("langgraph_checkpoint_ns", "")).rpartition("|")[0]
    return f"{outer}/{metadata.get('langgraph_step')}/{metadata.get('langgraph_node')}"


class Functions(NamedTuple):
    """The functions of a node or of a conditional edge."""

    func: Callable[..., Any] | None
    afunc: Callable[..., Any] | None
    """None for a sync function that LangGraph runs in a thread."""


def functions_of(runnable: object) -> Functions | None:
    """Return the user's functions that a `RunnableCallable` runs; None for any other object.

    A `RunnableLambda` of two functions, which is how a node has a sync and an async form, is one, too.

    Private: the class (`langgraph._internal._runnable`), its `func` and `afunc`; since langgraph 0.2. Without it: None,
    and functions run as they always did, with nothing ahead of them.
    """
    if both := _of_lambda(runnable):
        return both
    kind = _callable_class()
    if kind is None or not isinstance(runnable, kind):
        return None
    func, afunc = runnable.func, runnable.afunc  # type: ignore[attr-defined]
    wrapped = isinstance(afunc, partial) and func is not None and func in afunc.args
    return Functions(func, None if wrapped else afunc)


class Task(NamedTuple):
    """A task of the functional API, as `@task` makes it."""

    func: Callable[..., Any]
    is_cached: bool
    """True if its results may come from a cache."""


def task_of(value: object) -> Task | None:
    """Return the parts of what `@task` makes of a function; None for any other object.

    Private: the class `langgraph.func._TaskFunction`, its `func` and `cache_policy`; since langgraph 0.3. Without it:
    None, and what tasks call starts when the task does.
    """
    kind = _task_class()
    if kind is None or type(value) is not kind:
        return None
    return Task(value.func, value.cache_policy is not None)  # type: ignore[attr-defined]


@cache
def _task_class() -> type[Any] | None:
    """Return LangGraph's class for tasks; None if it is not where it was, which is logged."""
    try:
        from langgraph.func import _TaskFunction
    except ImportError:
        report_missing("langgraph", "_TaskFunction", "calls of tasks do not start early")
        return None
    return _TaskFunction


def _of_lambda(runnable: object) -> Functions | None:
    """Return the functions of a `RunnableLambda` that has both, by public names."""
    from langchain_core.runnables import RunnableLambda

    if type(runnable) is not RunnableLambda:
        return None
    func, afunc = getattr(runnable, "func", None), getattr(runnable, "afunc", None)
    return Functions(func, afunc) if func is not None and afunc is not None else None


@cache
def _callable_class() -> type[Any] | None:
    """Return LangGraph's class for the functions of nodes; None if it is not where it was, which is logged."""
    try:
        from langgraph._internal._runnable import RunnableCallable
    except ImportError:
        report_missing("langgraph", "RunnableCallable", "the functions of nodes are not looked into")
        return None
    return RunnableCallable
