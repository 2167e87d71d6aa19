"""Purity of the user's small functions, and what they read of their argument, from their source.

A function is certainly pure if it is made of the statements, builtins and methods that `interpreter` knows, on values
of the builtin types, the framework's own data classes and simple models of the user's (`is_plain`). It changes nothing,
and the time that it takes is bounded by the size of its argument. Everything else is user code: it runs once, in its
place.
"""

from __future__ import annotations

import ast
import json
import operator
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from types import FunctionType
from typing import Any

from teola_plugin.graph import UnfitValue
from teola_plugin.tracer.purity.abstract_values import ARGUMENT_SIZE, SizedObject
from teola_plugin.tracer.purity.calls import FIELDS, METHODS, FieldGetter
from teola_plugin.tracer.purity.data_classes import data_class_of, runs_no_own_code
from teola_plugin.tracer.purity.interpreter import Comprehension, free_names, inner_names, step_bound
from teola_plugin.tracer.source import Definition, source_of

_FRAMEWORKS = ("langchain_core",)
_NODES_MODULE = "llama_index.core.schema"
"""The module of LlamaIndex's nodes."""
_MAX_SIZE = 1_000_000
"""Items and characters of a value that a function may be computed on ahead of its place."""
_MAX_STEPS = 10**9
"""`n ** degree` for a function whose time grows with more than the size `n` of the value."""
_MAX_BITS = 4096
"""Bits of an integer: larger ones are slow to print, to multiply, ..."""
_CONTAINERS = frozenset((list, tuple, set, frozenset))
_SINGLE = frozenset((float, bool, type(None)))


@dataclass(frozen=True, slots=True)
class Purity:
    """A pure function's use of its one argument."""

    keys: tuple[str, ...] | None
    """The keys of a dictionary if it reads nothing else of it; None for the whole value."""
    path: tuple[str | int, ...] | None = None
    """The path of keys and indices if it only returns what lies there."""
    degree: int = field(default=1, compare=False)
    """Power of the argument's size that bounds its time."""


@dataclass(frozen=True, slots=True)
class ItemGetter:
    """An `itemgetter(*keys)`: one key gives its value, several give a tuple."""

    keys: tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class AttributeGetter:
    """An `attrgetter(...)`, which runs as it is."""

    get: Callable[[Any], Any]


# ------------------------------------------------------------ values


def is_plain(value: Any, *, may_hold_models: bool = True) -> bool:
    """Return True if a value's methods are the builtin types' and the framework's own, and it is not too large.

    Models of pydantic and enums of the user's count as well where they bring no code of their own for what expressions
    do with values, such as to compare and to print them; models only if `may_hold_models`.
    """
    return plain_size(value, _MAX_SIZE, may_hold_models=may_hold_models) <= _MAX_SIZE


def call_on_plain(func: Callable[[Any], Any], value: Any, degree: int = 1) -> Any:
    """Return `func(value)`. Raise `UnfitValue` for a value on which it might not be pure, or might take long."""
    size = plain_size(value, _MAX_SIZE)
    if size > _MAX_SIZE:
        raise UnfitValue("the value holds objects whose methods are not known, or very many")
    if degree > 1 and size**degree > _MAX_STEPS:
        raise UnfitValue("the value is too large for a function that takes more than one look at it")
    return func(value)


def call_on_containers(func: Callable[[Any], Any], values: dict[str, Any]) -> Any:
    """Return `func(values)` of a function that looks at the lists and tuples in `values`, but at none of their items.

    Raises `UnfitValue` for values that are neither lists or tuples nor plain.
    """
    sizes = [1 + len(one) if type(one) in (list, tuple) else plain_size(one, _MAX_SIZE) for one in values.values()]
    if sum(sizes) > _MAX_SIZE:
        raise UnfitValue("the value is no list, or very long")
    return func(values)


def plain_size(value: Any, limit: int, *, may_hold_models: bool = True) -> int:
    """Return the items, characters and digits of a plain value; `limit + 1` if there are more, or it is not plain.

    `may_hold_models`: see `is_plain`.
    """
    total, pending = 0, [value]
    while pending and total <= limit:
        item = pending.pop()
        kind = type(item)
        if kind is str or kind is bytes:
            total += 1 + len(item)
        elif kind is dict:
            total += 1 + len(item)
            if total <= limit:
                pending += (*item, *item.values())
        elif kind in _CONTAINERS:
            total += 1 + len(item)
            pending += item if total <= limit else ()
        elif kind is int:
            total += 1 + item.bit_length() if item.bit_length() <= _MAX_BITS else limit + 1
        elif kind in _SINGLE:
            total += 2
        elif _is_from_framework(kind) and isinstance(item, _data_classes()):
            pending += (vars(item), item.__pydantic_extra__)
        elif issubclass(kind, str) and (_is_from_framework(kind) or kind.__module__ == _NODES_MODULE):
            total += 1 + len(item)
        elif kind.__module__ == _NODES_MODULE or _is_simple_model(kind, may_hold_models=may_hold_models):
            total += 2
            pending += _fields_of_object(item)
        else:
            return limit + 1
    return min(total, limit + 1)


def _is_simple_model(kind: type, *, may_hold_models: bool) -> bool:
    return (may_hold_models or issubclass(kind, Enum)) and runs_no_own_code(kind, FIELDS | METHODS)


def _fields_of_object(item: Any) -> tuple[Any, ...]:
    """Return what an object of LlamaIndex's nodes, of a model or of an enum holds."""
    if isinstance(item, Enum):
        return (item._value_,)
    return (vars(item), *(getattr(item, name, None) for name in ("__pydantic_extra__", "__pydantic_private__")))


MAX_PROPERTY_SIZE = 20_000
"""Items and characters of the fields of an object whose property is computed ahead of its place."""


def read_property(value: Any, compute: FunctionType) -> Any:
    """Return `compute(value)`, a property of a data class of the user's that its other fields decide.

    Raises `UnfitValue` for a property that is not certainly pure and fast, and for values of other classes.
    """
    names = _fields_for_property(type(value), compute)  # type: ignore[arg-type]
    fields = getattr(value, "__dict__", {})
    if names is None or not fields.keys() >= set(names):
        raise UnfitValue(f"{compute.__name__} is a property that may do anything")
    if plain_size({name: fields[name] for name in names}, MAX_PROPERTY_SIZE) > MAX_PROPERTY_SIZE:
        raise UnfitValue("the object holds objects whose methods are not known, or very many")
    return compute(value)


@lru_cache(maxsize=256)
def _fields_for_property(kind: type, compute: FunctionType) -> tuple[str, ...] | None:
    """Return the fields that a pure property of a data class may read; None for one that is not known to be pure."""
    data_class = data_class_of(kind)
    if data_class is None:
        return None
    cost = step_bound(compute, argument=SizedObject(ARGUMENT_SIZE, data_class.default_sizes))
    return tuple(data_class.default_sizes) if cost is not None and cost.degree == 1 else None


def _is_from_framework(kind: type[Any]) -> bool:
    return kind.__module__.split(".", 1)[0] in _FRAMEWORKS


@lru_cache(maxsize=1)
def _data_classes() -> tuple[type[Any], ...]:
    """Return LangChain's data classes. An app with LlamaIndex alone has no value for which this is called."""
    from langchain_core.documents import Document
    from langchain_core.messages import BaseMessage
    from langchain_core.prompt_values import PromptValue

    return BaseMessage, Document, PromptValue


# ------------------------------------------------------------ functions


def analyze_callable(func: object) -> ItemGetter | AttributeGetter | Purity | None:
    """Return what `func` reads of its argument, or None for user code. Run nothing."""
    if type(func) is FunctionType:
        return cached_purity(func)
    if type(func) is operator.attrgetter:
        return AttributeGetter(func)
    if type(func) is operator.itemgetter:
        keys: tuple[object, ...] = func.__reduce__()[1]  # type: ignore[assignment]
        plain_keys = tuple(key for key in keys if isinstance(key, (str, int)))
        if len(plain_keys) == len(keys):
            return ItemGetter(plain_keys)
    return None


def analyze_purity(func: object, definition: Definition | None = None) -> Purity | None:
    """Return what `func(value)` reads, or None unless it is certainly pure. Run nothing.

    Args:
        func: Any object.
        definition: The source of the function, if it is not in a file.
    """
    if func in (json.loads, json.dumps):
        return Purity(None)
    if type(func) is not FunctionType or func.__defaults__ or func.__kwdefaults__:
        return None
    code = func.__code__
    definition = source_of(code) if definition is None and code.co_argcount == 1 else definition
    cost = None if definition is None else step_bound(func, definition)
    if definition is None or cost is None or code.co_kwonlyargcount:
        return None
    argument, body = code.co_varnames[0], definition.body
    keys = [key for part in (body if isinstance(body, list) else [body]) for key in _read_keys(part, argument)]
    str_keys = dict.fromkeys(key for key in keys if isinstance(key, str))
    return Purity(None if None in keys else tuple(str_keys), _path(definition, argument), cost.degree)


def cached_purity(func: FunctionType, definition: Definition | None = None) -> Purity | None:
    """Return `analyze_purity`, remembered also for functions that the same code defines again and again."""
    try:
        closure = tuple(_closure_key(cell.cell_contents) for cell in func.__closure__ or ())
    except (ValueError, TypeError):  # a cell that is still empty; a value that cannot be compared
        return analyze_purity(func, definition)
    has_defaults = func.__defaults__ is not None or func.__kwdefaults__ is not None
    return _purity_by_key(_FunctionKey(func, definition, (func.__code__, id(func.__globals__), closure, has_defaults)))


def _closure_key(value: Any) -> Hashable:
    """Return a key that is equal for equal values of a closure. Raise `TypeError` for values without one."""
    if type(value) in (str, int, bool, bytes, type(None)):
        return type(value), value
    if type(value) in (FunctionType, FieldGetter):
        return value  # type: ignore[no-any-return]
    raise TypeError("any other")


@dataclass(frozen=True, slots=True)
class _FunctionKey:
    """A function that compares equal to others of the same code, globals and closure."""

    func: FunctionType = field(compare=False)
    definition: Definition | None = field(compare=False)
    key: tuple[Hashable, ...]


@lru_cache(maxsize=1024)
def _purity_by_key(key: _FunctionKey) -> Purity | None:
    return analyze_purity(key.func, key.definition)


def _read_keys(node: ast.AST, argument: str) -> Iterator[str | None]:
    """Yield the constant key of each `argument["key"]`, and None for any other use of the argument."""
    if isinstance(node, ast.Subscript) and isinstance(key := _constant_key(node, argument), str):
        yield key
    elif isinstance(node, ast.Name) and node.id == argument:
        yield None
    elif isinstance(node, (ast.Lambda, ast.FunctionDef)):
        if argument in free_names([node]):  # it may read the argument never, or many times
            yield None
    elif isinstance(node, Comprehension):
        yield from _read_keys(node.generators[0].iter, argument)
        if argument in inner_names(node):
            yield None
    else:
        for part in ast.iter_child_nodes(node):
            yield from _read_keys(part, argument)


def _constant_key(node: ast.Subscript, argument: str | None = None) -> object:
    """Return the key of a subscript by a constant, None otherwise, and if it is not a subscript of the argument."""
    if argument is not None and not (isinstance(node.value, ast.Name) and node.value.id == argument):
        return None
    try:
        return ast.literal_eval(node.slice) if isinstance(node.ctx, ast.Load) else None
    except ValueError:
        return None


def _path(definition: Definition, argument: str) -> tuple[str | int, ...] | None:
    """Return the keys of `lambda x: x["a"][0]` and the like, None for a function that does anything else."""
    body: object = definition.body
    if isinstance(definition, ast.FunctionDef):
        *before, last = definition.body
        is_first = not before or (len(before) == 1 and ast.get_docstring(definition) is not None)
        body = last.value if is_first and isinstance(last, ast.Return) else None
    keys: list[Any] = []
    while isinstance(body, ast.Subscript):
        key = _constant_key(body)
        if type(key) not in (str, int):
            return None
        keys.insert(0, key)
        body = body.value
    return tuple(keys) if isinstance(body, ast.Name) and body.id == argument else None
