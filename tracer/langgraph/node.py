"""One node of a graph, walked with symbolic values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from langchain_core.runnables import Runnable

from teola_plugin.graph import Component, Ref, Role
from teola_plugin.shims.langgraph import functions_of
from teola_plugin.tracer.draft import Draft, Span
from teola_plugin.tracer.functions import UNKNOWN_VALUE, Fields, SendPerItem, Symbol, materialize, summarize_function
from teola_plugin.tracer.functions.mutations import Mutations
from teola_plugin.tracer.functions.pruning import EMPTY_SPAN
from teola_plugin.tracer.functions.pure_expressions import Decide
from teola_plugin.tracer.functions.symbols import to_symbol
from teola_plugin.tracer.langchain.trace import trace_into
from teola_plugin.tracer.symbols import Prompted, Record, Value


@dataclass(frozen=True, slots=True)
class Visited:
    """What became of a node, or of what chooses the way behind it."""

    span: Span = EMPTY_SPAN
    updates: Mapping[str, Symbol] | None = None
    """What it writes, by channel; None where that is not known."""
    goto: tuple[str, ...] = ()
    """Where it goes, as far as it says so itself."""
    sent: tuple[SendPerItem, ...] = ()
    """What it sends to nodes, one task for each item of a list."""
    opaque: bool = False
    """Whether it runs code that nobody knows, and that may take long."""
    in_place: Mutations = field(default_factory=Mutations)
    """What it changes in place: channels hold that, too."""


NOTHING = Visited()
UNKNOWN = "unknown"
"""The component that stands for what is not known yet."""


def visit(draft: Draft, bound: Runnable[Any, Any], given: Symbol, name: str, decide: Decide | None = None) -> Visited:
    """Adds to the draft what it will ask engines for. Never raises for what it does not understand."""
    functions = functions_of(bound)
    if functions is None:
        value, span = trace_into(draft, bound, _value(draft, given, name), name, f"graph.{name}", {})
        made = to_symbol(value)
        return Visited(span, made.items if isinstance(made, Fields) and made.base is None else None)
    func = functions.func or functions.afunc
    first = _first_argument(func)
    walked = summarize_function(func, {first: given}, draft, name, state=first, decide=decide) if first else None
    if walked is None:
        return Visited(opaque=True)
    sent = (walked.value,) if isinstance(walked.value, SendPerItem) else ()
    opaque = walked.runs_user_code and not walked.uses_engines
    return Visited(walked.span, walked.updates, walked.goto, sent, opaque, walked.mutations)


def unknown(draft: Draft) -> Ref:
    """What nobody can tell before the plain graph has come there."""
    if UNKNOWN not in draft.components:
        draft.add(Component(UNKNOWN, Role.OPAQUE, ()))
    return Ref(UNKNOWN)


def _first_argument(func: Any) -> str:
    """The name of the one that gets the state."""
    while type(func) is partial and not func.args:
        func = func.func
    code = getattr(getattr(func, "__func__", func), "__code__", None)
    skipped = 1 if hasattr(func, "__self__") else 0
    return code.co_varnames[skipped] if code is not None and code.co_argcount > skipped else ""


def _value(draft: Draft, given: Symbol, name: str) -> Value:
    """For a Runnable: refs, and dictionaries of refs."""
    if isinstance(given, Fields):
        return Record({key: _value(draft, one, name) for key, one in given.items.items()}, given.base)
    if isinstance(given, Ref | Prompted):
        return given
    return (None if given is UNKNOWN_VALUE else materialize(draft, given, name)) or unknown(draft)
