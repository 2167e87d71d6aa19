"""Turns functions of the user's that call engines of a pool into components. Their source is read, and not run."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from teola_plugin.graph import INPUT, Ref
from teola_plugin.runtime.prefetch_outcomes import OncePerCause, cause_of
from teola_plugin.tracer.draft import Draft, Names, Span, TraceResult
from teola_plugin.tracer.functions.expressions import evaluate
from teola_plugin.tracer.functions.frames import (
    BlockExit,
    CallFrame,
    FindLeaves,
    FindMethod,
    LowerGraph,
    OutOfFuel,
    Rules,
    SharedContext,
    enter_function,
    to_plain_function,
    unwrap_partial,
)
from teola_plugin.tracer.functions.interpreter import FunctionInterpreter
from teola_plugin.tracer.functions.lookup import NO_FREE_NAMES
from teola_plugin.tracer.functions.mutations import Mutations
from teola_plugin.tracer.functions.pruning import EMPTY_SPAN, prune_function, uses_engine
from teola_plugin.tracer.functions.pure_expressions import Decide
from teola_plugin.tracer.functions.statements import run_block
from teola_plugin.tracer.functions.symbols import (
    UNKNOWN_VALUE,
    Fields,
    Instance,
    KnownValue,
    Symbol,
    Unknown,
    known_value,
    move_to_draft,
    producers,
    to_symbol,
    with_attributes,
)
from teola_plugin.tracer.langchain.trace import FindLeaf, ReadFunction
from teola_plugin.tracer.symbols import NotUnderstood, Value

log = logging.getLogger("teola_plugin")
_warned = OncePerCause()
_RULES = Rules(evaluate, run_block)


@dataclass(frozen=True, slots=True)
class FunctionSummary:
    """The effects of calling a function, as far as its source tells: what it returns, changes and asks for."""

    value: Symbol = UNKNOWN_VALUE
    """What it returns."""
    updates: Mapping[str, Symbol] | None = None
    """What it returns by key, if that is a dictionary, or a `Command` with one; unknown values among them."""
    goto: tuple[str, ...] = ()
    """The nodes that it names: a `Command`'s `goto`, or the names that a router returns."""
    reached_end: bool = False
    """True if a `return`, or the end of the function, was reached; False if a statement before was not understood."""
    certain: bool = False
    """True if nothing was left out on the way, such as the branches of a condition that is not known yet."""
    runs_user_code: bool = True
    """True if code runs that may do anything."""
    span: Span = field(default_factory=Span)
    """The first and the last of its components in the draft."""
    mutations: Mutations = field(default_factory=Mutations)
    """The values that it changes in place."""
    changes_objects: bool = False
    """True if it changes lists or the like that exist already, or assigns attributes of existing objects."""

    @property
    def uses_engines(self) -> bool:
        """True if it asks engines for anything, as far as is known."""
        return bool(self.span.heads)


def summarize_function(
    func: object,
    arguments: Mapping[str, Value | Symbol],
    draft: Draft,
    name: str = "",
    *,
    state: str = "",
    decide: Decide | None = None,
    find_leaves: FindLeaves | None = None,
    find_method: FindMethod | None = None,
    lower_graph: LowerGraph | None = None,
    environment: Ref | None = None,
    unknown_attributes: Mapping[int, Iterable[str]] | None = None,
) -> FunctionSummary:
    """Read the source of a function as called with these arguments by name, and add its components to `draft`.

    Takes functions, bound methods, callable objects, tools made of functions, and `functools.partial` of them. Never
    raises; of a function that is not understood nothing is known. The first function of a file takes the time to parse
    the file.

    Args:
        func: The function.
        arguments: Its arguments by name. Others are unknown, unless they have a default.
        draft: Takes the components.
        name: The beginning of the components' names.
        state: The argument whose keys are read as attributes, too (a pydantic model, a dataclass).
        decide: Decides conditions on the template's input.
        find_leaves: Finds the models and retrievers of the user's own whose calls are components, too.
        find_method: Finds the rules of methods of another framework's objects.
        lower_graph: Reads the graphs that the function calls.
        environment: The environment variables in the template's input, if nothing changes them before the function.
        unknown_attributes: Attributes that may have changed when the function comes to them, by ids of their objects.
    """
    shared = SharedContext(_RULES, decide, find_leaves, find_method, lower_graph, environment)
    owners = (unknown_attributes or {}).items()
    attributes: dict[tuple[int, str], Symbol]
    attributes = {(owner, name): UNKNOWN_VALUE for owner, names in owners for name in names}
    try:
        return _summarize(func, arguments, draft, name, state, shared, attributes)
    except Exception as error:
        _warn(func, error)
        return FunctionSummary()


def _warn(func: Any, error: Exception) -> None:
    """Log an error of ours, once for each cause. A source that is not understood, too long or too deep is none."""
    if isinstance(error, (NotUnderstood, OutOfFuel, RecursionError)):
        return
    name = getattr(func, "__qualname__", type(func).__name__)
    _warned(
        (name, *cause_of(error)),
        lambda: log.warning(
            "the source of %s could not be read to its end, so later calls start at their usual time. "
            "Answers are unaffected, only later than they could be; this is said once (%s is a bug of teola-plugin: "
            "please report it with this traceback)",
            name,
            type(error).__name__,
            exc_info=error,
        ),
    )


def _summarize(
    func: Any,
    arguments: Mapping[str, Value | Symbol],
    draft: Draft,
    name: str,
    state: str,
    shared: SharedContext,
    attributes: dict[tuple[int, str], Symbol],
) -> FunctionSummary:
    """Interpret the function on a draft of its own, and add what can be prefetched to `draft`; see
    `summarize_function`.

    `attributes`: values of attributes of existing objects, by the object's id and the attribute's name.
    """
    keywords: dict[str, Symbol] = {key: to_symbol(value) for key, value in arguments.items()}
    if state in keywords:
        keywords[state] = with_attributes(keywords[state])
    func, positional, keywords = unwrap_partial(func, (), keywords)
    plain_function, positional = to_plain_function(func, positional)
    entry = None
    if plain_function is not None:
        entry = enter_function(plain_function, positional, keywords, may_have_others=True)
    if plain_function is None or entry is None:
        return FunctionSummary()
    definition, frame = entry
    name = name or plain_function.__name__.strip("<>")
    interpreter = FunctionInterpreter(draft.new_body(), frame, name, shared, attribute_values=attributes)
    try:
        block_exit = interpreter.run_function(definition)
    except Exception as error:  # what was read before still holds
        _warn(plain_function, error)
        block_exit = BlockExit.UNKNOWN
    interpreter.publish_names()
    if block_exit is BlockExit.UNKNOWN:
        interpreter.add_user_code()
    return _conclude(interpreter, block_exit, draft)


def _conclude(interpreter: FunctionInterpreter, block_exit: BlockExit, draft: Draft) -> FunctionSummary:
    """Move the components that can be prefetched into `draft`, and return the summary of the function."""
    reached_end = block_exit is not BlockExit.UNKNOWN
    value = interpreter.frame.return_value if reached_end else UNKNOWN_VALUE
    own_draft = interpreter.draft
    removed, span = prune_function(own_draft, interpreter.span, interpreter.shared.helpers, producers(value))
    if not any(map(uses_engine, own_draft.components.values())):
        removed |= set(own_draft.components)
        own_draft, span = draft.new_body(), EMPTY_SPAN
    value = move_to_draft(value, removed, own_draft, draft)
    draft.components |= own_draft.components
    draft.calls |= own_draft.calls
    draft.list_spellings |= own_draft.list_spellings
    draft.formatted_prompts |= own_draft.formatted_prompts
    draft.order += own_draft.order
    draft.nodes += own_draft.nodes
    draft.estimates += own_draft.estimates
    updates, goto = _updates_and_goto(value)
    return FunctionSummary(
        value,
        updates,
        goto,
        reached_end,
        reached_end and not interpreter.is_incomplete,
        interpreter.runs_user_code,
        span,
        interpreter.mutations,
        interpreter.shared.sets_attributes or interpreter.mutations.change_objects,
    )


def _updates_and_goto(value: Symbol) -> tuple[Mapping[str, Symbol] | None, tuple[str, ...]]:
    """Return what a node writes to the state, and the nodes to which it goes."""
    if isinstance(value, Instance) and value.kind.__name__ == "Command":
        update, goto = value.fields.get("update", KnownValue(None)), value.fields.get("goto", KnownValue(()))
        return _values_by_key(update), _node_names(goto)
    return _values_by_key(value), _node_names(value)


def _values_by_key(value: Symbol) -> Mapping[str, Symbol] | None:
    """Return the values that a node of a graph writes to the state, by key; None if they are not known by key."""
    if isinstance(value, KnownValue):
        update = value.value
        if update is None:
            return {}
        is_dictionary = type(update) is dict and all(type(key) is str for key in update)
        return {key: KnownValue(item) for key, item in update.items()} if is_dictionary else None
    return value.items if isinstance(value, Fields) and value.base is None and not value.attributes else None


def _node_names(value: Symbol) -> tuple[str, ...]:
    """Return the names of nodes that a router or a `Command` gives, one or several; empty if they are not known."""
    is_known, names = known_value(value)
    if is_known and type(names) is str:
        return (names,)
    are_names = is_known and type(names) in (list, tuple) and all(type(name) is str for name in names)
    return tuple(names) if are_names else ()


def first_parameter(func: Any) -> str:
    """Return the name of the parameter that takes the only argument of a call, "" if there is none."""
    func, bound_arguments, _ = unwrap_partial(func, (), {})
    plain_function, bound_arguments = to_plain_function(func, bound_arguments)
    if plain_function is None:
        return ""
    code, index = plain_function.__code__, len(bound_arguments)
    return code.co_varnames[index] if code.co_argcount > index else ""


def function_reader(find_leaves: Callable[..., FindLeaf]) -> ReadFunction:
    """Return what adds the calls of functions in chains to a draft: those of leaves that `find_leaves` finds, too.

    `find_leaves`: as `FindLeaves`; `on_loop` is True if the function runs only on a loop, False if only elsewhere.
    """

    def read(draft: Draft, func: Any, argument: Ref, name: str, on_loop: bool | None) -> Names:
        """Add the calls of a function that a chain runs to `draft`. Return the names of the first components.

        Generator functions, and functions without a parameter, add nothing.
        """
        parameter = first_parameter(func)
        if not parameter or inspect.isgeneratorfunction(func) or inspect.isasyncgenfunction(func):
            return ()
        find = partial(find_leaves, on_loop=on_loop)
        return summarize_function(func, {parameter: argument}, draft, name, find_leaves=find).span.heads

    return read


def materialize(draft: Draft, symbol: Symbol, name: str) -> Ref | None:
    """Return the value as a ref, made by CALLs whose names begin with `name`; None if it is not known."""
    interpreter = FunctionInterpreter(draft, CallFrame(NO_FREE_NAMES), name, SharedContext(_RULES))
    try:
        return interpreter.to_ref(symbol)
    except NotUnderstood:
        return None


def trace_function(
    func: object, names: Iterable[str], name: str = "", find_leaves: FindLeaves | None = None
) -> TraceResult:
    """Return the template of a function. Its input is a dictionary of the arguments with these names.

    `find_leaves` finds the models and retrievers of the user's own whose calls are components, too.
    """
    return _trace(func, {key: Ref(INPUT).at(key) for key in names}, name, find_leaves=find_leaves)


def trace_node(func: object, state: str, name: str = "") -> TraceResult:
    """Return the template of a node of a graph. Its input is the state, which the argument `state` takes."""
    return _trace(func, {state: Ref(INPUT)}, name, state)


def _trace(
    func: object,
    arguments: Mapping[str, Symbol],
    name: str,
    state: str = "",
    find_leaves: FindLeaves | None = None,
) -> TraceResult:
    """Return the template of a function that is called with these arguments; see `trace_function` and `trace_node`."""
    draft = Draft()
    summary = summarize_function(func, arguments, draft, name, state=state, find_leaves=find_leaves)
    value = summary.value
    output = None if isinstance(value, (Unknown, KnownValue)) else materialize(draft, value, name or "output")
    return draft.finish(Ref(INPUT) if output is None else output, name or "function")
