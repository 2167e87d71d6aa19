"""What the instructions do that make values of values: containers, operators, texts. See `bounded`."""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping
from dataclasses import replace

from teola_plugin.tracer.purity.calls import MOST, width
from teola_plugin.tracer.purity.machine import Machine
from teola_plugin.tracer.purity.size_bounds import Size, constant, plus, scaled
from teola_plugin.tracer.purity.values import (
    NULL,
    SMALL,
    Data,
    Frame,
    Known,
    State,
    Unbounded,
    Value,
    pops,
    quoted,
    size_of,
)

CELL = Known(object())
"""A cell that a function is about to close over."""


def build(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    count = (at.arg or 0) * (2 if at.opname == "BUILD_MAP" else 1)
    parts = pops(state, count)
    if at.opname == "BUILD_TUPLE" and parts and all(isinstance(p, Known) and isinstance(p.value, type) for p in parts):
        state.stack.append(Known(tuple(p.value for p in parts if isinstance(p, Known))))  # for `isinstance`
        return state
    if parts and all(part is CELL for part in parts):
        state.stack.append(NULL)  # `MAKE_FUNCTION` looks for what they hold by name
        return state
    state.stack.append(machine.made(plus(constant(1 + count), *map(size_of, parts))))
    return state


def build_const_map(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    parts = pops(state, (at.arg or 0) + 1)
    state.stack.append(machine.made(plus(constant(1 + len(parts)), *map(size_of, parts))))
    return state


def build_string(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    state.stack.append(machine.made(plus(constant(1), *map(size_of, pops(state, at.arg or 0))), text=True))
    return state


def build_slice(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    for part in pops(state, at.arg or 0):
        size_of(part)
    state.stack.append(SMALL)
    return state


def _add_to(state: State, depth: int, machine: Machine, value: Value) -> None:
    """A container on the stack grows by what is there in every round since it was made."""
    held = state.stack[-depth]
    if not isinstance(held, Data):
        raise Unbounded("a container that is not understood")
    more = machine.loops.in_all_rounds(plus(constant(1), size_of(value)), held.level)
    state.stack[-depth] = replace(held, size=plus(held.size, more))


def append(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    """Also a whole list or dictionary at once: its items."""
    (value,) = pops(state, 1)
    machine.spend(size_of(value))
    _add_to(state, at.arg or 0, machine, value)
    return state


def map_add(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    for value in pops(state, 2):
        machine.spend(size_of(value))
        _add_to(state, at.arg or 0, machine, value)
    return state


def same(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    (value,) = pops(state, 1)
    state.stack.append(machine.made(size_of(value)))
    return state


def intrinsic(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    if at.arg not in (5, 6):  # unary plus; list to tuple
        raise Unbounded("an intrinsic that is not known")
    return same(machine, frame, at, state)


def unpack(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    (value,) = pops(state, 1)
    size = size_of(value)
    state.stack += [Data(size)] * (at.arg or 0)
    return state


# ------------------------------------------------------------ operators


def truth(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    count = 1 if at.opname.startswith(("UNARY", "TO_BOOL")) else 2
    for value in pops(state, count):
        machine.spend(size_of(value))
    state.stack.append(SMALL)
    return state


def is_same(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    pops(state, 2)
    state.stack.append(SMALL)
    return state


def negative(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    (value,) = pops(state, 1)
    count = isinstance(value, Data) and value.count
    state.stack.append(machine.made(plus(constant(1), size_of(value)), count=count))
    return state


def subscript(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    of, *keys = pops(state, 3 if at.opname == "BINARY_SLICE" else 2)
    sliced = at.opname == "BINARY_SLICE"
    for key in keys:
        if not (isinstance(key, Known) and isinstance(key.value, slice)):
            machine.spend(size_of(key))
    size = size_of(of)
    if sliced or keys[0] == SMALL or (isinstance(keys[0], Known) and isinstance(keys[0].value, slice)):
        machine.spend(size)
    state.stack.append(Data(size, isinstance(of, Data) and of.text))
    return state


def operator(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    one, other = pops(state, 2)
    act = _OPERATORS.get(at.argrepr)
    if act is None:
        raise Unbounded(f"the operator {at.argrepr}")
    state.stack.append(act(machine, one, other))
    return state


def _counts(*values: Value) -> bool:
    """Whether the values are numbers that are no larger than their bound says."""
    return all(isinstance(v, Data) and v.count for v in values)


def _number(value: Value) -> float | None:
    """A small constant number."""
    found = value.value if isinstance(value, Known) else None
    return found if isinstance(found, (int, float)) and abs(found) <= MOST else None


def _plus(machine: Machine, one: Value, other: Value) -> Value:
    sides = [v if _number(v) is None else _added(_number(v)) for v in (one, other)]
    text = all(isinstance(v, (Data, Known)) and (not isinstance(v, Data) or v.text) for v in (one, other))
    return machine.made(plus(*map(size_of, sides)), text=text, count=_counts(*sides))


def _added(number: float | None) -> Data:
    """A small constant number, as what it adds to a count, or to the digits of another number."""
    if isinstance(number, int):
        return Data(constant(abs(number) + 1), count=True)
    return Data(constant(_DIGITS))


_DIGITS = 32
"""More than any float has."""


def _times(machine: Machine, one: Value, other: Value) -> Value:
    for factor, value in ((_number(one), other), (_number(other), one)):
        if factor is not None:
            size = scaled(size_of(value), max(1, abs(int(factor)) + 1))
            return machine.made(plus(constant(30), size), count=_counts(value) and isinstance(factor, int))
    if _counts(one) or _counts(other):
        return machine.made(machine.loops.times(size_of(one), size_of(other)), count=_counts(one, other))
    raise Unbounded("a product of what is not known")


def _divided(machine: Machine, one: Value, other: Value) -> Value:
    if _number(other) is None and not _counts(other):
        machine.spend(machine.loops.times(size_of(one), size_of(other)))
    return machine.made(plus(constant(30), size_of(one), size_of(other)))


def _modulo(machine: Machine, one: Value, other: Value) -> Value:
    if _number(one) is None and not _counts(one):
        raise Unbounded("a text may be formatted so")
    return _divided(machine, one, other)


_OPERATORS: Mapping[str, Callable[[Machine, Value, Value], Value]] = {
    "+": _plus,
    "*": _times,
    "/": _divided,
    "//": _divided,
    "%": _modulo,
    **dict.fromkeys(("-", "&", "|", "^", ">>"), _plus),
}


def _printed(machine: Machine, value: Value, *, again: bool, spec: Value | None) -> Value:
    size: Size = scaled(size_of(value), 12) if again else quoted(value)
    wide = 0 if spec is None else width(spec)
    return machine.made(plus(constant(30 + wide), size), text=True)


def format_value(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    flags = at.arg or 0
    spec = pops(state, 1)[0] if flags & 4 else None
    state.stack.append(_printed(machine, pops(state, 1)[0], again=flags & 3 in (2, 3), spec=spec))
    return state


def format_simple(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    spec = pops(state, 1)[0] if at.opname == "FORMAT_WITH_SPEC" else None
    state.stack.append(_printed(machine, pops(state, 1)[0], again=False, spec=spec))
    return state


def convert(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    state.stack.append(_printed(machine, pops(state, 1)[0], again=at.arg in (2, 3), spec=None))
    return state
