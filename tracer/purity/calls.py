"""Bounds of calls and operators: how long builtins, methods, `json` and `math` take, how large their results can be."""

from __future__ import annotations

import ast
import builtins
import inspect
import json
import math
import operator
import re
import string
import sys
import textwrap
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import FunctionType
from typing import Any

from teola_plugin.tracer.purity.abstract_values import (
    REPR_FACTOR,
    SMALL,
    AbstractValue,
    Constant,
    Machine,
    Method,
    ReadableFunction,
    Size,
    SizedObject,
    SizedValue,
    Unbounded,
    add,
    constant_size,
    is_plain_constant,
    length_of,
    maximum,
    printed_size,
    scale,
    size_of,
)
from teola_plugin.tracer.purity.data_classes import DataClass, data_class_of
from teola_plugin.tracer.source import Definition, source_of

Args = list[AbstractValue]
Kwargs = dict[str, AbstractValue]
LARGEST_CONSTANT = 1000
"""The longest range, the widest field, the highest factor that a function may name; characters of the longest text that
is put together of constants here."""
_LARGEST_FLOAT_SIZE = 32
"""More digits than any float has."""
_PERCENT_FIELD = re.compile(r"%(?:\([^)]*\))?([-#0 +.\d*]*)")
"""A field of a text that `%` formats: its flags, width and precision."""


def _words(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


MODULES = (json, math, re, textwrap)
_MATH = (math.ceil, math.floor, math.sqrt)
BUILTINS = _words(
    "abs all any bool dict enumerate filter float frozenset int isinstance len list map max min range repr reversed",
    "round set sorted str sum tuple zip",
)
_PATTERN_FUNCTIONS = (re.findall, re.search, re.split, re.sub)
_FUNCTIONS = (json.loads, json.dumps, textwrap.dedent, inspect.cleandoc, *_PATTERN_FUNCTIONS)
CALLABLES: tuple[Any, ...] = (*_FUNCTIONS, *_MATH, *(getattr(builtins, name) for name in sorted(BUILTINS)))
_SIMPLE_BUILTINS = _words(
    "all any bool dict enumerate frozenset isinstance len list range repr reversed set str tuple zip"
)
FIELDS = _words("additional_kwargs content id metadata name page_content role tool_calls type")
"""Fields of the framework's documents and messages."""
_NUMBER_METHODS = _words(
    "count endswith find index isalpha isdigit isspace isupper rfind rindex startswith",
)
_COPY_METHODS = _words("copy keys removeprefix removesuffix values")
_CASE_METHODS = _words("capitalize casefold lower title upper")
_STRIP_METHODS = _words("lstrip rstrip strip")
_SPLIT_METHODS = _words("items partition rpartition rsplit split splitlines")
_QUADRATIC_METHODS = _STRIP_METHODS | _words("rfind rindex rpartition rsplit")
"""Methods that may look at each character of the text once for each character of the argument."""
METHODS = (
    _NUMBER_METHODS
    | _COPY_METHODS
    | _CASE_METHODS
    | _STRIP_METHODS
    | _SPLIT_METHODS
    | _words("format get group join pretty_repr replace zfill")
)
_MESSAGE_CLASSES = _words("AIMessage BaseMessage HumanMessage SystemMessage ToolMessage")
_MESSAGE_FUNCTIONS = _words(
    "convert_to_messages filter_messages get_buffer_string message_to_dict messages_to_dict trim_messages",
)
_TOKEN_COUNTERS = _words("count_tokens_approximately")
_MESSAGE_MODULES = ("langchain_core.messages.utils", "langchain_core.messages.base")
_PRINTED_MESSAGE_FACTOR = 3 * REPR_FACTOR
"""Characters that one character or item of a message may become where LangChain prints or converts it."""


def _messages_member(value: object, names: frozenset[str]) -> str:
    """Return which class or function of LangChain's messages a value is; an empty text if it is none of `names`."""
    modules = [vars(sys.modules[name]) for name in _MESSAGE_MODULES if name in sys.modules]
    return next((name for name in names if any(name in one and one[name] is value for one in modules)), "")


@dataclass(frozen=True, slots=True)
class FieldGetter:
    """A function that reads one field of an object, and raises `UnfitValue` where that may run any other code."""

    name: str
    read: Callable[[Any, str], Any]
    """Returns the field of an object: no more than its time and its size are in proportion to the object's."""

    def __call__(self, value: Any) -> Any:
        """Return the field of an object."""
        return self.read(value, self.name)


def is_getter(value: object) -> bool:
    """Return True for an `itemgetter`, a `FieldGetter`, and for an `attrgetter` of one known field."""
    if type(value) is FieldGetter:
        return True
    if type(value) is operator.attrgetter:
        return value.__reduce__()[1][0] in FIELDS  # type: ignore[index]
    return type(value) is operator.itemgetter


def trusted_constant(value: Any) -> AbstractValue:
    """Return a global, or a closure's value. Raise `Unbounded` for what user code may have made or may change."""
    if is_plain_constant(value) or type(value) is FunctionType or is_getter(value):
        return Constant(value)
    if any(value is trusted for trusted in (*MODULES, *CALLABLES)) or _messages_member(value, _MESSAGE_CLASSES):
        return Constant(value)
    data_class = data_class_of(value)
    if data_class is not None:
        return data_class
    raise Unbounded("it reads a value of your own")


def to_readable(func: FunctionType, definition: Definition | None = None) -> ReadableFunction:
    """Return a function with its source. Raise `Unbounded` if there is none, or if it reads what may be changed."""
    definition = definition or source_of(func.__code__)
    if definition is None or func.__kwdefaults__:
        raise Unbounded("there is no source, or it has defaults")
    cells = zip(func.__code__.co_freevars, func.__closure__ or (), strict=True)
    variables = {name: trusted_constant(cell.cell_contents) for name, cell in cells}
    return ReadableFunction(definition, variables, func.__globals__, func.__defaults__ or ())


def read_attribute(receiver: AbstractValue, name: str) -> AbstractValue:
    """Return `receiver.name`. Raise `Unbounded` for an attribute whose cost is not known."""
    if isinstance(receiver, Constant) and receiver.value in (str, dict) and name in METHODS:
        return Method(None, name)
    if isinstance(receiver, Constant) and any(receiver.value is module for module in MODULES):
        member = getattr(receiver.value, name, None)
        if any(member is trusted for trusted in CALLABLES):
            return Constant(member)
    elif isinstance(receiver, SizedObject) and name in receiver.default_sizes:
        return SizedValue(add(receiver.size, constant_size(receiver.default_sizes[name])))
    elif name in FIELDS and isinstance(receiver, SizedValue):
        return SizedValue(receiver.size)
    elif name in METHODS:
        size_of(receiver)
        return Method(receiver, name)
    raise Unbounded(f"the attribute {name}")


def call_value(machine: Machine, callee: AbstractValue, args: Args, kwargs: Kwargs) -> AbstractValue:
    """Return what a call returns. Raise `Unbounded` if the callee is not known."""
    if isinstance(callee, ReadableFunction):
        return machine.call(callee, args, kwargs)
    if isinstance(callee, Method):
        receiver, *rest = args if callee.receiver is None else [callee.receiver, *args]
        return _call_method(machine, receiver, callee.name, rest, kwargs)
    if isinstance(callee, DataClass):
        return _make_object(machine, callee, args, kwargs)
    if isinstance(callee, Constant):
        value = callee.value
        if name := _messages_member(value, _MESSAGE_FUNCTIONS):
            return _call_on_messages(machine, args, dict(kwargs), name=name)
        if type(value) is FunctionType and value not in _FUNCTIONS:
            return machine.call(to_readable(value), args, kwargs)
        if is_getter(value):
            return machine.make(add(*map(size_of, args)))
        bound_call = next((bound_call for trusted, bound_call in _CALL_BOUNDS if trusted is value), None)
        if bound_call is not None:
            return bound_call(machine, args, dict(kwargs))
    raise Unbounded("it calls what is not known")


_BUILTIN_FACTORIES = (bool, dict, float, frozenset, int, list, set, str, tuple)


def _make_object(machine: Machine, data_class: DataClass, args: Args, kwargs: Kwargs) -> SizedObject:
    """Return an object of a data class. Raise `Unbounded` if a factory of its fields has no bound."""
    sizes = [constant_size(400)]
    for factory in (one.factory for one in data_class.fields.values() if one.factory is not None):
        if type(factory) is FunctionType:
            sizes.append(size_of(machine.call(to_readable(factory), [], {})))
        elif not any(factory is builtin for builtin in _BUILTIN_FACTORIES):
            raise Unbounded("a factory that is not known")
    size = add(*sizes, *(scale(size_of(value), 2) for value in (*args, *kwargs.values())))
    machine.spend(add(size, constant_size(sum(data_class.default_sizes.values()))))
    return SizedObject(size, data_class.default_sizes)


# ------------------------------------------------------------ methods


def _call_method(machine: Machine, receiver: AbstractValue, name: str, args: Args, kwargs: Kwargs) -> AbstractValue:
    """Return a bound for the result of a method of a plain value, and count its steps. `name` is one of `METHODS`.

    Raise `Unbounded` if there is no bound for them.
    """
    receiver_size, argument_size = size_of(receiver), add(*map(size_of, (*args, *kwargs.values())))
    is_text = isinstance(receiver, (SizedValue, Constant)) and (
        not isinstance(receiver, SizedValue) or receiver.is_text
    )
    machine.spend(add(receiver_size, argument_size))
    if name in _QUADRATIC_METHODS and args and not isinstance(args[0], Constant):
        machine.spend(machine.loops.multiply(receiver_size, argument_size))
    if name in _NUMBER_METHODS:
        return SMALL
    if name in _CASE_METHODS:
        return machine.make(scale(receiver_size, 3), is_text=is_text)
    if name in _STRIP_METHODS:
        return machine.make(receiver_size, is_text=is_text)
    if name in _COPY_METHODS:
        is_cut = name.startswith("remove")
        return machine.make(scale(receiver_size, 2), is_text=is_text and is_cut, length=length_of(receiver))
    if name in _SPLIT_METHODS:
        length = add(length_of(receiver), constant_size(3))
        return machine.make(add(scale(receiver_size, 3), constant_size(3)), length=length)
    if name == "group":  # of a match of a pattern without groups
        return machine.make(receiver_size)
    if name == "get":
        return SizedValue(maximum(receiver_size, size_of(args[1]) if len(args) > 1 else constant_size(1)))
    if name == "pretty_repr":
        printed_message = add(constant_size(200), scale(receiver_size, _PRINTED_MESSAGE_FACTOR))
        return machine.make(printed_message, is_text=True)
    if name == "zfill":
        return machine.make(add(receiver_size, _size_of_count(args[0])), is_text=True)
    return {"join": _join, "replace": _replace, "format": _format}[name](machine, receiver, args, kwargs)


def _join(machine: Machine, separator: AbstractValue, args: Args, kwargs: Kwargs) -> AbstractValue:
    """Return a bound for the result of `separator.join(items)`, and count its steps."""
    (items,) = args
    separators = machine.loops.multiply(length_of(separator), length_of(items))
    return machine.make(add(constant_size(1), size_of(items), separators), is_text=True)


def _replace(machine: Machine, text: AbstractValue, args: Args, kwargs: Kwargs) -> AbstractValue:
    """Return a bound for the result of `text.replace(old, new)`, which may be larger than the text. Count its steps."""
    old, new = args[:2]
    size = size_of(text)
    constants = [arg.value for arg in (old, new) if isinstance(arg, Constant) and isinstance(arg.value, str)]
    if len(constants) == 2:
        old_length, new_length = map(len, constants)
        growth = -(-new_length // old_length) if old_length else 1 + new_length
        return machine.make(add(scale(size, max(1, growth)), constant_size(1 + new_length)), is_text=True)
    inserted = machine.loops.multiply(add(size, constant_size(1)), add(size_of(new), constant_size(1)))
    return machine.make(add(size, inserted), is_text=True)


def _format(machine: Machine, template: AbstractValue, args: Args, kwargs: Kwargs) -> AbstractValue:
    """Return a bound for the result of `template.format(...)`, and count its steps.

    Raise `Unbounded` for a template that is no constant, looks into a value or names a wide field.
    """
    if not isinstance(template, Constant) or not isinstance(template.value, str):
        raise Unbounded("the template comes from elsewhere")
    total_width, growth, filled = 0, 1, 0
    for _, name, spec, conversion in string.Formatter().parse(template.value):
        if name and not name.isidentifier() and not name.isdigit():
            raise Unbounded("a field that looks into a value")
        total_width += field_width(Constant(spec or ""))
        growth = REPR_FACTOR if conversion in ("r", "a") else growth
        filled += name is not None
    sizes = add(constant_size(1), *map(printed_size, (*args, *kwargs.values())))
    literal_size = constant_size(len(template.value) + total_width)
    return machine.make(add(literal_size, scale(sizes, growth * max(1, filled))), is_text=True)


def field_width(spec: AbstractValue) -> int:
    """Return the width that a format specification names. Raise `Unbounded` if it is large or not known."""
    if not isinstance(spec, Constant) or not isinstance(spec.value, str) or "{" in spec.value:
        raise Unbounded("a width that is not known")
    numbers = "".join(c if c.isdigit() else " " for c in spec.value).split()
    if any(int(number) > LARGEST_CONSTANT for number in numbers):
        raise Unbounded("a wide field")
    return sum(map(int, numbers))


def _size_of_count(number: AbstractValue) -> Size:
    """Return a bound for a number itself. Raise `Unbounded` if there is none."""
    if isinstance(number, Constant) and isinstance(number.value, int) and abs(number.value) <= LARGEST_CONSTANT:
        return constant_size(abs(number.value))
    if isinstance(number, SizedValue) and number.is_count:
        return number.size
    raise Unbounded("a number that is not known, or large")


# ------------------------------------------------------------ functions


def _to_number(machine: Machine, args: Args, kwargs: Kwargs) -> AbstractValue:
    """Return a bound for the result of `int`, `float`, `abs` and functions of `math`, and count their steps."""
    size = add(*map(size_of, args))
    if not sys.get_int_max_str_digits():  # else long texts are refused, which would take their length squared
        machine.spend(machine.loops.multiply(size, size))
    return machine.make(add(constant_size(400), size))


def _call_simple(machine: Machine, args: Args, kwargs: Kwargs, *, name: str) -> AbstractValue:
    """Return a bound for the result of a builtin that looks at each item of its arguments once."""
    match name:
        case "isinstance":
            size_of(args[0])
            if not isinstance(args[1], Constant):
                raise Unbounded("a class of your own, which may say itself what its instances are")
            return SMALL
        case "all" | "any" | "bool":
            machine.spend(add(*map(size_of, args)))
            return SMALL
        case "len":
            return SizedValue(add(*map(length_of, args)), is_count=True)
        case "range":
            return machine.make(add(constant_size(1), *map(_size_of_count, args)))
        case "str":
            return machine.make(add(constant_size(30), *map(printed_size, args)), is_text=True)
        case "repr":
            sizes = [scale(size_of(arg), REPR_FACTOR) for arg in args]
            return machine.make(add(constant_size(30), *sizes), is_text=True)
        case _:
            sizes = [scale(size_of(arg), 3) for arg in (*args, *kwargs.values())]
            length = length_of(args[0]) if args and name != "dict" else None  # of a zip, no more than of the first
            return machine.make(add(constant_size(1 + len(kwargs)), *sizes), length=length)


def _round(machine: Machine, args: Args, kwargs: Kwargs) -> AbstractValue:
    """Return a bound for the result of `round`. Raise `Unbounded` for a number of digits that is large or not known."""
    digits = [value for value in (*args[1:], *kwargs.values()) if value != Constant(None)]
    digits_size = add(*map(_size_of_count, digits)) if digits else constant_size(LARGEST_CONSTANT)  # a float's integer
    return machine.make(add(constant_size(30), digits_size, size_of(args[0])))


def _sum(machine: Machine, args: Args, kwargs: Kwargs) -> AbstractValue:
    """Return a bound for the result of `sum`, and count its steps: quadratic with a start, which may be a list."""
    size = add(*map(size_of, (*args, *kwargs.values())))
    if len(args) + len(kwargs) > 1:  # lists, maybe: each is copied for each that follows
        machine.spend(machine.loops.multiply(size, size))
    return machine.make(add(constant_size(30), size))


def _compare(machine: Machine, args: Args, kwargs: Kwargs, *, is_sort: bool) -> AbstractValue:
    """Return a bound for the result of `sorted`, `max` or `min`, by `key=` if there is one."""
    key = kwargs.pop("key", Constant(None))
    if key != Constant(None):
        for items in args:
            machine.spend(machine.sum_over_items(items, lambda item: size_of(call_value(machine, key, [item], {}))))
    size = add(*map(size_of, (*args, *kwargs.values())))
    machine.spend(scale(size, 40 if is_sort else 1))
    return machine.make(scale(size, 2), length=length_of(args[0])) if is_sort else SizedValue(size)


def _map(machine: Machine, args: Args, kwargs: Kwargs) -> AbstractValue:
    """Return a bound for the result of `map` over one iterable, and count the steps of the function for each item."""
    func, *iterables = args
    if len(iterables) != 1 or kwargs:
        raise Unbounded("a map over several")

    def result_size(item: AbstractValue) -> Size:
        return add(constant_size(1), size_of(call_value(machine, func, [item], {})))

    return machine.make(machine.sum_over_items(iterables[0], result_size), length=length_of(iterables[0]))


def _filter(machine: Machine, args: Args, kwargs: Kwargs) -> AbstractValue:
    """Return a bound for the result of `filter`, and count the steps of the function for each item."""
    func, items = args
    if func != Constant(None):
        machine.spend(machine.sum_over_items(items, lambda item: size_of(call_value(machine, func, [item], {}))))
    return machine.make(size_of(items), length=length_of(items))


def _json_loads(machine: Machine, args: Args, kwargs: Kwargs) -> AbstractValue:
    """Return a bound for the result of `json.loads`, and count its steps: both are linear in the text.

    Raise `Unbounded` for keyword arguments, which may be hooks that run the user's code.
    """
    if kwargs:
        raise Unbounded("hooks of json")
    return machine.make(add(constant_size(1), *(scale(size_of(arg), 2) for arg in args)))


def _json_dumps(machine: Machine, args: Args, kwargs: Kwargs) -> AbstractValue:
    """Return a bound for the result of `json.dumps`, and count its steps.

    Raise `Unbounded` for options that may call code of the user's, and for a wide indent.
    """
    (value,) = args
    size = add(constant_size(2), scale(size_of(value), 2 * REPR_FACTOR))
    indent = kwargs.pop("indent", Constant(None))
    if indent != Constant(None):
        if not isinstance(indent, Constant) or not isinstance(indent.value, int) or indent.value > 16:
            raise Unbounded("a wide indent")
        size = add(size, scale(machine.loops.multiply(size_of(value), size_of(value)), 17))
    for name, option in kwargs.items():
        is_flag = isinstance(option, Constant) and isinstance(option.value, bool)
        if name not in ("ensure_ascii", "sort_keys") or not is_flag:
            raise Unbounded("hooks of json")
    return machine.make(size, is_text=True)


def _is_token_counter(value: object) -> bool:
    """Return True for a counter that takes no more steps for some messages than they are large."""
    return value is len or value == "approximate" or bool(_messages_member(value, _TOKEN_COUNTERS))


def _call_on_messages(machine: Machine, args: Args, kwargs: Kwargs, *, name: str) -> AbstractValue:
    """Return a bound for the result of LangChain's function `name` on plain messages, and count its steps.

    It goes through the messages once, and through its other arguments for each of them. `trim_messages` calls its
    counter on some of them: a few times or, for a part of a message, no more often than messages, items and lines are
    there. Raise `Unbounded` without messages, and for code of the user's that has no bound.
    """
    if not args or "text_splitter" in kwargs:
        raise Unbounded("messages that come later, or a text splitter")
    messages, *options = args
    counter = kwargs.pop("token_counter", Constant(len))
    if not isinstance(counter, Constant) or not _is_token_counter(counter.value):
        rounds = SizedValue(size_of(messages))
        machine.sum_over_items(rounds, lambda _: size_of(call_value(machine, counter, [messages], {})))
    elif "allow_partial" in kwargs:
        machine.spend(machine.loops.multiply(size_of(messages), size_of(messages)))
    options_size = add(constant_size(1), *map(size_of, (*options, *kwargs.values())))
    repeated = machine.loops.multiply(options_size, length_of(messages))
    size = add(constant_size(30), scale(size_of(messages), _PRINTED_MESSAGE_FACTOR), repeated)
    return machine.make(size, is_text=name == "get_buffer_string")


_ATOM = r"(?:\\[dDsSwWnrt]|\\[^\w\s]|\[\^?\]?(?:[^\]\[\\]|\\.)+\]|[^\\\[\](){}.*+?^$|]|\.)"
"""The text of a pattern that matches one character: the character itself, an escaped one, or a class of characters."""
_LINEAR_PATTERN = re.compile(rf"{_ATOM}+[*+]?", re.DOTALL)
"""Patterns of a fixed number of characters, of which the last may be repeated. With nothing behind the repetition there
is nothing to try again, so a search looks at each character of the text a constant number of times."""
_LONGEST_PATTERN = 100


def _search_pattern(machine: Machine, args: Args, kwargs: Kwargs, *, is_sub: bool = False) -> AbstractValue:
    """Return a bound for the result of `re.sub`, `re.findall` and the like, and count their steps.

    Raise `Unbounded` for options, for a pattern that is no constant or may take more than linear time, and for a
    replacement that is no constant text.
    """
    pattern, *replacements, text = args
    replacement = replacements[0] if is_sub and len(replacements) == 1 else Constant("")
    if kwargs or len(replacements) != is_sub or not isinstance(pattern, Constant) or type(pattern.value) is not str:
        raise Unbounded("a pattern that is not known")
    if len(pattern.value) > _LONGEST_PATTERN or not _LINEAR_PATTERN.fullmatch(pattern.value):
        raise Unbounded("a pattern that may take long")
    if not isinstance(replacement, Constant) or type(replacement.value) is not str or "\\" in replacement.value:
        raise Unbounded("a replacement that is not known")
    size = add(constant_size(1), size_of(text))
    machine.spend(scale(size, 1 + len(pattern.value)))
    return machine.make(scale(size, 3 + len(replacement.value)), is_text=is_sub)


def _dedent(machine: Machine, args: Args, kwargs: Kwargs) -> AbstractValue:
    """Return a bound for a text without the space before its lines, in which each tab may become eight spaces."""
    if len(args) != 1 or kwargs:
        raise Unbounded("options of a text")
    machine.spend(scale(size_of(args[0]), 10))
    return machine.make(scale(size_of(args[0]), 8), is_text=True)


CallBound = Callable[[Machine, Args, Kwargs], AbstractValue]
"""Counts the steps of a call and returns its result. It may change the keyword arguments."""
_CALL_BOUNDS: tuple[tuple[Any, CallBound], ...] = (
    *((func, _to_number) for func in (abs, float, int, *_MATH)),
    *((getattr(builtins, name), partial(_call_simple, name=name)) for name in _SIMPLE_BUILTINS),
    (round, _round),
    (sum, _sum),
    (sorted, partial(_compare, is_sort=True)),
    (max, partial(_compare, is_sort=False)),
    (min, partial(_compare, is_sort=False)),
    (map, _map),
    (filter, _filter),
    (json.loads, _json_loads),
    (json.dumps, _json_dumps),
    (textwrap.dedent, _dedent),
    *((func, partial(_search_pattern, is_sub=func is re.sub)) for func in _PATTERN_FUNCTIONS),
    (inspect.cleandoc, _dedent),
)


# ------------------------------------------------------------ operators


def are_counts(*values: AbstractValue) -> bool:
    """Return True if the values are numbers that are themselves no larger than their sizes."""
    return all(isinstance(value, SizedValue) and value.is_count for value in values)


def _constant_number(value: AbstractValue) -> float | None:
    """Return a small constant number, None for any other value."""
    number = value.value if isinstance(value, Constant) else None
    return number if isinstance(number, (int, float)) and abs(number) <= LARGEST_CONSTANT else None


def _constant_text(machine: Machine, text: str) -> Constant:
    """Return a short text that is put together of constants, and count the steps that this takes."""
    machine.spend(constant_size(1 + len(text)))
    return Constant(text)


def _add(machine: Machine, left: AbstractValue, right: AbstractValue) -> AbstractValue:
    """Return a bound for the result of `+`; the text itself if it is a short one of constants."""
    match left, right:
        case (Constant(str(first)), Constant(str(second))) if len(first) + len(second) <= LARGEST_CONSTANT:
            return _constant_text(machine, first + second)
    return _bound_by_sum(machine, left, right)


def _bound_by_sum(machine: Machine, left: AbstractValue, right: AbstractValue) -> AbstractValue:
    """Return a bound for the result of `+`, or of another operator that makes no more than its operands hold."""
    operands = []
    for value in (left, right):
        number = _constant_number(value)
        if isinstance(number, int):  # it adds this much to a count, and fewer digits to any other number
            value = SizedValue(constant_size(abs(number) + 1), is_count=True)
        elif number is not None:
            value = SizedValue(constant_size(_LARGEST_FLOAT_SIZE))
        operands.append(value)
    are_texts = all(
        value.is_text if isinstance(value, SizedValue) else isinstance(value, Constant) for value in (left, right)
    )
    return machine.make(add(*map(size_of, operands)), is_text=are_texts, is_count=are_counts(*operands))


def _multiply(machine: Machine, left: AbstractValue, right: AbstractValue) -> AbstractValue:
    """Return a bound for a product with a small constant or a count. Raise `Unbounded` for any other one."""
    match left, right:
        case (Constant(str(text)), Constant(int(number))) | (Constant(int(number)), Constant(str(text))):
            if len(text) * number <= LARGEST_CONSTANT:
                return _constant_text(machine, text * number)
    for factor, value in ((_constant_number(left), right), (_constant_number(right), left)):
        if factor is not None:
            size = scale(size_of(value), max(1, abs(int(factor)) + 1))
            is_count = are_counts(value) and isinstance(factor, int)
            return machine.make(add(constant_size(30), size), is_count=is_count)
    if are_counts(left) or are_counts(right):
        return machine.make(machine.loops.multiply(size_of(left), size_of(right)), is_count=are_counts(left, right))
    raise Unbounded("a product of what is not known")


def _divide(machine: Machine, left: AbstractValue, right: AbstractValue) -> AbstractValue:
    """Return a bound for the result of a division, and count its steps.

    They grow with the product of both sizes, as for long integers, unless the divisor is a small constant or a count.
    """
    if _constant_number(right) is None and not are_counts(right):
        machine.spend(machine.loops.multiply(size_of(left), size_of(right)))
    return machine.make(add(constant_size(30), size_of(left), size_of(right)))


def _modulo(machine: Machine, left: AbstractValue, right: AbstractValue) -> AbstractValue:
    """Return a bound for the result of `%`, and count its steps, as for a division.

    A constant text is formatted. Raise `Unbounded` unless it is one, or the left side is known to be a number.
    """
    if isinstance(left, Constant) and type(left.value) is str:
        specs = _PERCENT_FIELD.findall(left.value)
        if any("*" in spec for spec in specs):
            raise Unbounded("a width that is not known")
        size = constant_size(1 + len(left.value) + sum(field_width(Constant(spec)) for spec in specs))
        printed = scale(printed_size(right), REPR_FACTOR * max(1, len(specs)))
        return machine.make(add(size, printed), is_text=True)
    if _constant_number(left) is None and not are_counts(left):
        raise Unbounded("a text may be formatted so")
    return _divide(machine, left, right)


OPERATORS: Mapping[type[ast.operator], Callable[[Machine, AbstractValue, AbstractValue], AbstractValue]] = {
    ast.Add: _add,
    ast.Mult: _multiply,
    ast.Div: _divide,
    ast.FloorDiv: _divide,
    ast.Mod: _modulo,
    **dict.fromkeys((ast.Sub, ast.BitAnd, ast.BitOr, ast.BitXor, ast.RShift), _bound_by_sum),
}
