"""Functions of the user's that ask engines of a pool -> components. Their source is read, nothing of it runs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from teola_plugin.graph import INPUT, Ref
from teola_plugin.runtime.dead_parts import Once, cause_of
from teola_plugin.tracer.draft import Draft, Span, Traced
from teola_plugin.tracer.functions.deciding import Decide
from teola_plugin.tracer.functions.entering import entered, unbound
from teola_plugin.tracer.functions.exporting import exported, producers
from teola_plugin.tracer.functions.in_place import InPlace
from teola_plugin.tracer.functions.live import NO_SPAN, asks, settle
from teola_plugin.tracer.functions.machine import Flow, Frame
from teola_plugin.tracer.functions.reading import NOWHERE
from teola_plugin.tracer.functions.values import (
    UNKNOWN_VALUE,
    Built,
    Fields,
    Known,
    Symbol,
    Unknown,
    as_state,
    known_object,
    symbol_of,
)
from teola_plugin.tracer.functions.walk import Walk
from teola_plugin.tracer.symbols import NotUnderstood, Value

log = logging.getLogger("teola_plugin")
_said = Once()


@dataclass(frozen=True, slots=True)
class FunctionWalk:
    """What a function does, as far as its source tells."""

    value: Symbol = UNKNOWN_VALUE
    """What it returns."""
    updates: Mapping[str, Symbol] | None = None
    """What it returns by key, where that is a dictionary, or a `Command` with one; unknown values among them."""
    goto: tuple[str, ...] = ()
    """The nodes that it names: a `Command`'s `goto`, or the names that a router returns."""
    reached_end: bool = False
    """Whether the walk came to a `return`, or to the end; False where it stopped at what it does not understand."""
    certain: bool = False
    """Whether nothing was left out on the way, such as the arms of a condition that is not known yet."""
    runs_user_code: bool = True
    """Whether code runs that may do anything."""
    span: Span = field(default_factory=Span)
    """Of its components in the draft."""
    in_place: InPlace = field(default_factory=InPlace)
    """What it changes in place."""

    @property
    def asks(self) -> bool:
        """Whether it asks engines for anything, as far as is known."""
        return bool(self.span.heads)


def walk_function(
    func: object,
    given: Mapping[str, Value | Symbol],
    draft: Draft,
    name: str = "",
    *,
    state: str = "",
    decide: Decide | None = None,
) -> FunctionWalk:
    """Walks through the function, called with these arguments by name; its components go into `draft`.

    `name` leads the names of its components. `state` names the argument whose keys are read as attributes, too (a
    pydantic model, a dataclass). Arguments that are not given, and have no default, are unknown. Takes functions, bound
    methods, callable objects, tools made of functions, and `functools.partial` of them. Never raises; of a function
    that is not understood nothing is known. `decide` is asked for conditions on the template's input. The first
    function of a file takes the time to parse the file.
    """
    try:
        return _walked(func, given, draft, name, state, decide)
    except Exception as why:
        _note(func, why)
        return FunctionWalk()


def _note(func: Any, why: Exception) -> None:
    """What raises here is ours: sources that are not understood are no errors. What they ask for never runs ahead."""
    if isinstance(why, NotUnderstood):
        return
    named = getattr(func, "__qualname__", type(func).__name__)
    _said(
        (named, *cause_of(why)),
        lambda: log.warning(
            "the source of %s could not be read to its end, so what it asks for beyond that begins in its place. "
            "Answers are unaffected, only later than they could be; this is said once (%s is a bug of teola-plugin: "
            "please report it with this traceback)",
            named,
            type(why).__name__,
            exc_info=why,
        ),
    )


def _walked(
    func: Any, given: Mapping[str, Value | Symbol], draft: Draft, name: str, state: str, decide: Decide | None
) -> FunctionWalk:
    symbols: dict[str, Symbol] = {key: symbol_of(one) for key, one in given.items()}
    if state in symbols:
        symbols[state] = as_state(symbols[state])
    first: list[Symbol] = []
    while type(func) is partial:
        first = [*(Known(one) for one in func.args), *first]
        symbols = {key: Known(one) for key, one in func.keywords.items()} | symbols
        func = func.func
    plainly, first = unbound(func, first)
    found = None if plainly is None else entered(plainly, first, symbols)
    if plainly is None or found is None:
        return FunctionWalk()
    definition, frame = found
    walk = Walk(Draft(names=draft.names), frame, name or plainly.__name__.strip("<>"))
    walk.shared.decide = decide
    try:
        flow = walk.function(definition)
    except Exception as why:  # what was found before that holds
        _note(plainly, why)
        flow = Flow.STOPPED
    if flow is Flow.STOPPED:
        walk.user_code()
    return _settled(walk, flow, draft)


def _settled(walk: Walk, flow: Flow, draft: Draft) -> FunctionWalk:
    """What can run ahead goes into the draft."""
    value = walk.frame.returned if flow is not Flow.STOPPED else UNKNOWN_VALUE
    scratch = walk.draft
    lost, span = settle(scratch, walk.span, walk.shared.made, producers(value))
    if not any(asks(c) for c in scratch.components.values()):
        scratch, lost, span = Draft(names=draft.names), lost | set(scratch.components), NO_SPAN
    value = exported(value, lost, scratch, draft)
    for name in ("components", "calls", "lists", "formatted"):
        getattr(draft, name).update(getattr(scratch, name))
    draft.order += scratch.order
    draft.nodes += scratch.nodes
    draft.estimates += scratch.estimates
    updates, goto = _routed(value)
    return FunctionWalk(
        value,
        updates,
        goto,
        flow is not Flow.STOPPED,
        flow is not Flow.STOPPED and not walk.left_out,
        walk.runs_user_code,
        span,
        walk.in_place,
    )


def _routed(value: Symbol) -> tuple[Mapping[str, Symbol] | None, tuple[str, ...]]:
    """What a node updates, and where it goes."""
    if isinstance(value, Built) and value.kind.__name__ == "Command":
        return _by_key(value.fields.get("update", Known(None))), _names(value.fields.get("goto", Known(())))
    return _by_key(value), _names(value)


def _by_key(value: Symbol) -> Mapping[str, Symbol] | None:
    if isinstance(value, Known):
        known = value.value
        if known is None:
            return {}
        is_dict = type(known) is dict and all(type(key) is str for key in known)
        return {key: Known(one) for key, one in known.items()} if is_dict else None
    return value.items if isinstance(value, Fields) and value.base is None and not value.attributes else None


def _names(value: Symbol) -> tuple[str, ...]:
    known, found = known_object(value)
    if known and type(found) is str:
        return (found,)
    several = known and type(found) in (list, tuple) and all(type(one) is str for one in found)
    return tuple(found) if several else ()


def realised(draft: Draft, symbol: Symbol, name: str) -> Ref | None:
    """The value as a ref, by CALLs named after `name`; None for one that is not known."""
    walk = Walk(draft, Frame(NOWHERE), name)
    try:
        return walk.ref(symbol)
    except NotUnderstood:
        return None


def trace_function(func: object, names: Iterable[str], name: str = "") -> Traced:
    """A template of its own: its input is a dictionary of the arguments with these names."""
    return _traced(func, {one: Ref(INPUT).at(one) for one in names}, name)


def trace_node(func: object, state: str, name: str = "") -> Traced:
    """A template of its own: its input is the state, a dictionary, which the argument `state` is given."""
    return _traced(func, {state: Ref(INPUT)}, name, state)


def _traced(func: object, given: Mapping[str, Symbol], name: str, state: str = "") -> Traced:
    draft = Draft()
    made = walk_function(func, given, draft, name, state=state)
    output = None if isinstance(made.value, (Unknown, Known)) else realised(draft, made.value, name or "output")
    return draft.finished(Ref(INPUT) if output is None else output, name or "function")
