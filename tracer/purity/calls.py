"""Builtins, methods of texts and containers, `json`, `math`: how long they take, how large what they give can be."""

from __future__ import annotations

import builtins
import json
import math
import operator
import string
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any

from teola_plugin.tracer.purity.machine import Machine
from teola_plugin.tracer.purity.size_bounds import Size, constant, either, plus, scaled
from teola_plugin.tracer.purity.values import (
    REPR,
    SMALL,
    Data,
    Inner,
    Known,
    Method,
    Unbounded,
    Value,
    is_plain,
    quoted,
    size_of,
)

Arguments = list[Value]
Named = Mapping[str, Value]
MOST = 1000
"""The longest range, the widest field, the highest factor that a function may name."""


def _words(*lines: str) -> frozenset[str]:
    return frozenset(word for line in lines for word in line.split())


MODULES = (json, math)
_MATH = (math.ceil, math.floor, math.sqrt)
BUILTINS = _words(
    "abs all any bool dict enumerate filter float frozenset int isinstance len list map max min range repr reversed",
    "round set sorted str sum tuple zip",
)
CALLABLES: tuple[Any, ...] = (json.loads, json.dumps, *_MATH, *(getattr(builtins, name) for name in sorted(BUILTINS)))
FIELDS = _words("additional_kwargs content id metadata name page_content role tool_calls type")
"""Of the framework's documents and messages."""
_NUMBERS = _words(
    "count endswith find index isalpha isdigit isspace isupper rfind rindex startswith",
)
_SAME = _words("copy keys removeprefix removesuffix values")
_TEXTS = _words("capitalize casefold lower title upper")
_STRIPS = _words("lstrip rstrip strip")
_PARTS = _words("items partition rpartition rsplit split splitlines")
_SLOW = _STRIPS | _words("rfind rindex rpartition rsplit")
"""Those that may look at each character for each of the argument."""
METHODS = _NUMBERS | _SAME | _TEXTS | _STRIPS | _PARTS | _words("format get join replace zfill")


def is_getter(value: object) -> bool:
    """`itemgetter`, and `attrgetter` of one field."""
    if type(value) is operator.attrgetter:
        return value.__reduce__()[1][0] in FIELDS  # type: ignore[index]
    return type(value) is operator.itemgetter


def trusted(value: Any) -> Value:
    """A global, or what a closure holds. Raises `Unbounded` for what user code may change, or has made."""
    if is_plain(value) or type(value) is FunctionType or is_getter(value):
        return Known(value)
    if any(value is known for known in (*MODULES, *CALLABLES)):
        return Known(value)
    raise Unbounded("it reads a value of your own")


def attribute(of: Value, name: str) -> Value:
    """`of.name`, where that is no call."""
    if isinstance(of, Known) and of.value in (str, dict) and name in METHODS:
        return Method(None, name)
    if isinstance(of, Known) and any(of.value is module for module in MODULES):
        found = getattr(of.value, name, None)
        if any(found is known for known in CALLABLES):
            return Known(found)
    elif name in FIELDS and isinstance(of, Data):
        return Data(of.size)
    elif name in METHODS:
        size_of(of)
        return Method(of, name)
    raise Unbounded(f"the attribute {name}")


def called(machine: Machine, what: Value, given: Arguments, named: Named) -> Value:
    """What a call gives. Raises `Unbounded`."""
    if isinstance(what, Inner):
        return machine.run(what.code, what.names, what.cells, given, named)
    if isinstance(what, Method):
        of, *rest = given if what.of is None else [what.of, *given]
        return _method(machine, of, what.name, rest, named)
    if isinstance(what, Known):
        value = what.value
        if type(value) is FunctionType and value not in (json.loads, json.dumps):
            return machine.function(value, given, named)
        if is_getter(value):
            return machine.made(plus(*map(size_of, given)))
        known = next((make for one, make in _KNOWN if one is value), None)
        if known is not None:
            return known(machine, given, dict(named))
    raise Unbounded("it calls what is not known")


# ------------------------------------------------------------ methods


def _method(machine: Machine, of: Value, name: str, given: Arguments, named: Named) -> Value:
    own, others = size_of(of), plus(*map(size_of, (*given, *named.values())))
    text = isinstance(of, (Data, Known)) and (not isinstance(of, Data) or of.text)
    machine.spend(plus(own, others))
    if name in _SLOW and given and not isinstance(given[0], Known):
        machine.spend(machine.loops.times(own, others))
    if name in _NUMBERS:
        return SMALL
    if name in _TEXTS:
        return machine.made(scaled(own, 3), text=text)
    if name in _STRIPS:
        return machine.made(own, text=text)
    if name in _SAME:
        return machine.made(scaled(own, 2), text=text and name.startswith("remove"))
    if name in _PARTS:
        return machine.made(plus(scaled(own, 3), constant(3)))
    return _GROWING[name](machine, of, given, named)


def _get(machine: Machine, of: Value, given: Arguments, named: Named) -> Value:
    others = size_of(given[1]) if len(given) > 1 else constant(1)
    return Data(either(size_of(of), others))


def _join(machine: Machine, of: Value, given: Arguments, named: Named) -> Value:
    """The separator comes between items: once for each."""
    (items,) = given
    each = 1 + len(of.value) if isinstance(of, Known) and isinstance(of.value, (str, bytes)) else 0
    size = scaled(size_of(items), each) if each else machine.loops.times(plus(size_of(of), constant(1)), size_of(items))
    return machine.made(plus(constant(1), size), text=True)


def _replace(machine: Machine, of: Value, given: Arguments, named: Named) -> Value:
    old, new = given[:2]
    own = size_of(of)
    if isinstance(old, Known) and isinstance(new, Known) and isinstance(old.value, str) and isinstance(new.value, str):
        grows = -(-len(new.value) // len(old.value)) if old.value else 1 + len(new.value)
        return machine.made(plus(scaled(own, max(1, grows)), constant(1 + len(new.value))), text=True)
    return machine.made(
        plus(own, machine.loops.times(plus(own, constant(1)), plus(size_of(new), constant(1)))), text=True
    )


def _format(machine: Machine, of: Value, given: Arguments, named: Named) -> Value:
    if not isinstance(of, Known) or not isinstance(of.value, str):
        raise Unbounded("the template comes from elsewhere")
    fields = list(string.Formatter().parse(of.value))
    wide, quotes = 0, 1
    for _, name, spec, conversion in fields:
        if name and not name.isidentifier() and not name.isdigit():
            raise Unbounded("a field that looks into a value")
        wide += width(Known(spec or ""))
        quotes = REPR if conversion in ("r", "a") else quotes
    filled = sum(name is not None for _, name, _, _ in fields)
    sizes = plus(constant(1), *map(quoted, (*given, *named.values())))
    return machine.made(plus(constant(len(of.value) + wide), scaled(sizes, quotes * max(1, filled))), text=True)


def _zfill(machine: Machine, of: Value, given: Arguments, named: Named) -> Value:
    return machine.made(plus(size_of(of), _at_most(given[0])), text=True)


_GROWING: Mapping[str, Callable[[Machine, Value, Arguments, Named], Value]] = {
    "get": _get,
    "join": _join,
    "replace": _replace,
    "format": _format,
    "zfill": _zfill,
}


def width(spec: Value) -> int:
    """Of a field that is formatted so. Raises `Unbounded` for one that is wide, or not known."""
    if not isinstance(spec, Known) or not isinstance(spec.value, str) or "{" in spec.value:
        raise Unbounded("a width that is not known")
    numbers = "".join(c if c.isdigit() else " " for c in spec.value).split()
    if any(int(number) > MOST for number in numbers):
        raise Unbounded("a wide field")
    return sum(map(int, numbers))


def _at_most(number: Value) -> Size:
    """A bound for a number. Raises `Unbounded`."""
    if isinstance(number, Known) and isinstance(number.value, int) and abs(number.value) <= MOST:
        return constant(abs(number.value))
    if isinstance(number, Data) and number.count:
        return number.size
    raise Unbounded("a number that is not known, or large")


# ------------------------------------------------------------ functions


def _number(machine: Machine, given: Arguments, named: dict[str, Value]) -> Value:
    if not sys.get_int_max_str_digits():  # else long texts are refused, which would take their length squared
        machine.spend(machine.loops.times(plus(*map(size_of, given)), plus(*map(size_of, given))))
    return machine.made(plus(constant(400), *map(size_of, given)))


def _same(machine: Machine, given: Arguments, named: dict[str, Value]) -> Value:
    """A container of the items of all that is given."""
    sizes = map(size_of, (*given, *named.values()))
    return machine.made(plus(constant(1 + len(named)), *(scaled(size, 3) for size in sizes)))


def _truth(machine: Machine, given: Arguments, named: dict[str, Value]) -> Value:
    machine.spend(plus(*map(size_of, given)))
    return SMALL


def _is_instance(machine: Machine, given: Arguments, named: dict[str, Value]) -> Value:
    size_of(given[0])
    return SMALL


def _len(machine: Machine, given: Arguments, named: dict[str, Value]) -> Value:
    return Data(plus(*map(size_of, given)), count=True)


def _text(machine: Machine, given: Arguments, named: dict[str, Value]) -> Value:
    return machine.made(plus(constant(30), *map(quoted, given)), text=True)


def _repr(machine: Machine, given: Arguments, named: dict[str, Value]) -> Value:
    return machine.made(plus(constant(30), *(scaled(size_of(one), REPR) for one in given)), text=True)


def _round(machine: Machine, given: Arguments, named: dict[str, Value]) -> Value:
    for digits in (*given[1:], *named.values()):
        if not (isinstance(digits, Known) and digits.value is None):
            _at_most(digits)
    return machine.made(plus(constant(MOST), size_of(given[0])))


def _sum(machine: Machine, given: Arguments, named: dict[str, Value]) -> Value:
    size = plus(*map(size_of, (*given, *named.values())))
    if len(given) + len(named) > 1:  # lists, maybe: each is copied for each that follows
        machine.spend(machine.loops.times(size, size))
    return machine.made(plus(constant(30), size))


def _range(machine: Machine, given: Arguments, named: dict[str, Value]) -> Value:
    return machine.made(plus(constant(1), *map(_at_most, given)))


def _by_key(machine: Machine, given: Arguments, named: dict[str, Value], factor: int) -> Size:
    key = named.pop("key", Known(None))
    if key != Known(None):
        for items in given:
            machine.spend(machine.each(items, lambda one: size_of(called(machine, key, [one], {}))))
    size = plus(*map(size_of, (*given, *named.values())))
    machine.spend(scaled(size, factor))
    return size


def _sorted(machine: Machine, given: Arguments, named: dict[str, Value]) -> Value:
    return machine.made(scaled(_by_key(machine, given, named, 40), 2))


def _most(machine: Machine, given: Arguments, named: dict[str, Value]) -> Value:
    return Data(_by_key(machine, given, named, 1))


def _map(machine: Machine, given: Arguments, named: dict[str, Value]) -> Value:
    func, *several = given
    if len(several) != 1 or named:
        raise Unbounded("a map over several")
    made = machine.each(several[0], lambda one: plus(constant(1), size_of(called(machine, func, [one], {}))))
    return machine.made(made)


def _filter(machine: Machine, given: Arguments, named: dict[str, Value]) -> Value:
    func, items = given
    if func != Known(None):
        machine.spend(machine.each(items, lambda one: size_of(called(machine, func, [one], {}))))
    return machine.made(size_of(items))


def _loads(machine: Machine, given: Arguments, named: dict[str, Value]) -> Value:
    if named:
        raise Unbounded("hooks of json")
    return machine.made(plus(constant(1), *(scaled(size_of(one), 2) for one in given)))


def _dumps(machine: Machine, given: Arguments, named: dict[str, Value]) -> Value:
    (value,) = given
    size = plus(constant(2), scaled(size_of(value), 2 * REPR))
    indent = named.pop("indent", Known(None))
    if indent != Known(None):
        if not isinstance(indent, Known) or not isinstance(indent.value, int) or indent.value > 16:
            raise Unbounded("a wide indent")
        size = plus(size, scaled(machine.loops.times(size_of(value), size_of(value)), 17))
    for name, one in named.items():
        if name not in ("ensure_ascii", "sort_keys") or not isinstance(one, Known) or not isinstance(one.value, bool):
            raise Unbounded("hooks of json")
    return machine.made(size, text=True)


_KNOWN: tuple[tuple[Any, Callable[[Machine, Arguments, dict[str, Value]], Value]], ...] = (
    *((one, _number) for one in (abs, float, int, *_MATH)),
    *((one, _same) for one in (dict, enumerate, frozenset, list, reversed, set, tuple, zip)),
    *((one, _truth) for one in (all, any, bool)),
    (isinstance, _is_instance),
    (len, _len),
    (str, _text),
    (repr, _repr),
    (round, _round),
    (sum, _sum),
    (range, _range),
    (sorted, _sorted),
    *((one, _most) for one in (max, min)),
    (map, _map),
    (filter, _filter),
    (json.loads, _loads),
    (json.dumps, _dumps),
)
