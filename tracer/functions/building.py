"""The framework's own objects, made of objects at hand as the function makes them: prompts, chains, bound models.

Only classes and methods of the framework are called, with arguments that the source names.
"""

from __future__ import annotations

import inspect
import operator
import textwrap
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any

from langchain_core.documents import Document
from langchain_core.messages import BaseMessage
from langchain_core.runnables import Runnable

from teola_plugin.tracer.functions.reading import attribute, derives_from, is_a, of_framework
from teola_plugin.tracer.functions.values import (
    UNKNOWN_VALUE,
    Built,
    Known,
    Spread,
    Symbol,
    is_constant,
    known_object,
    words,
)

_BUILDERS = words(
    "as_retriever assign bind bind_tools from_messages from_template map partial pick pipe with_config with_fallbacks",
    "with_retry with_structured_output with_types",
)
"""Methods that make an object of the framework of another, and do nothing else."""
_CONSTANT_FUNCTIONS = (textwrap.dedent, inspect.cleandoc, operator.itemgetter, operator.attrgetter)
"""Pure functions of the standard library that prompts and chains are written with."""
_GRAPH_CLASSES = ("langgraph.types.Command", "langgraph.types.Send")


def is_runnable(value: object) -> bool:
    return is_a(value, Runnable)


def piped(left: Symbol, right: Symbol) -> Symbol | None:
    """`left | right` of Runnables at hand; None where neither is one."""
    here, one = known_object(left)
    there, other = known_object(right)
    if not (is_runnable(one) or is_runnable(other)):
        return None
    if not (here and there and is_tame(one) and is_tame(other) and _pipes_as_the_framework(one, other)):
        return UNKNOWN_VALUE
    return _made(lambda: one | other)


def _pipes_as_the_framework(one: Any, other: Any) -> bool:
    """Whether the methods that `|` may call are the framework's."""
    named = ((one, "__or__"), (other, "__ror__"))
    found = [attribute(of, name) for of, name in named if is_runnable(of)]
    return all(isinstance(how, Known) and of_framework(how.value) for how in found)


def is_tame(value: Any) -> bool:
    """Whether the framework may be given the value: looking at it runs none of the user's code."""
    kind = type(value)
    if kind in (list, tuple):
        return all(map(is_tame, value))
    if kind is dict:
        return all(type(key) is str for key in value) and all(map(is_tame, value.values()))
    if is_a(value, type):
        return kind is type or kind.__module__.split(".", 1)[0] in _OF_CLASSES
    return is_constant(value) or kind in _TAME or of_framework(kind) or is_runnable(value)


_OF_CLASSES = ("abc", "enum", "pydantic", "typing", "typing_extensions")
"""Where classes of classes come from that describe what a model writes."""
_TAME = (FunctionType, MethodType, type(len), operator.itemgetter, operator.attrgetter)


def _made(make: Callable[[], Any]) -> Symbol:
    """What the framework makes; what it raises, the plain code will raise."""
    try:
        return Known(make())
    except Exception:
        return UNKNOWN_VALUE


def built(what: Any, given: Sequence[Symbol | Spread], named: Mapping[str, Symbol]) -> Symbol | None:
    """What a class, a method or a function of the framework makes; None for what may do anything else."""
    if is_a(what, type) and _is_data(what):
        return _data(what, given, named)
    if not _builds(what):
        return None
    values = [known_object(one) for one in given if not isinstance(one, Spread)]
    by_name = {key: known_object(one) for key, one in named.items()}
    if len(values) < len(given) or not all(known and is_tame(one) for known, one in (*values, *by_name.values())):
        return UNKNOWN_VALUE
    if any(what is one for one in _CONSTANT_FUNCTIONS) and not all(is_constant(value) for _, value in values):
        return None
    arguments = [value for _, value in values]
    return _made(lambda: what(*arguments, **{key: value for key, (_, value) in by_name.items()}))


def _builds(what: Any) -> bool:
    if type(what) is MethodType:
        func: Any = what.__func__
        return type(func) is FunctionType and func.__name__ in _BUILDERS and of_framework(func)
    if any(what is known for known in _CONSTANT_FUNCTIONS):
        return True
    return is_a(what, type) and derives_from(what, Runnable) and of_framework(what) and of_framework(what.__init__)


def _is_data(kind: type) -> bool:
    if derives_from(kind, BaseMessage, Document):
        return of_framework(kind)
    return f"{kind.__module__}.{kind.__qualname__}" in _GRAPH_CLASSES


_FIRST = {"Send": ("node", "arg"), "Command": (), "Document": ("page_content",)}
"""Names of arguments that are given by place; a message has its content there."""


def _data(kind: type, given: Sequence[Symbol | Spread], named: Mapping[str, Symbol]) -> Symbol:
    places = _FIRST.get(kind.__name__, ("content",))
    if len(given) > len(places) or any(isinstance(one, Spread) for one in given):
        return UNKNOWN_VALUE
    fields: dict[str, Symbol] = {}
    for name, one in zip(places, given, strict=False):
        assert not isinstance(one, Spread)
        fields[name] = one
    fields |= named
    found = {key: known_object(one) for key, one in fields.items()}
    if derives_from(kind, BaseMessage) and all(known and is_tame(one) for known, one in found.values()):
        return _made(lambda: kind(**{key: value for key, (_, value) in found.items()}))
    return Built(kind, fields)
