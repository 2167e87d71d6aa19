"""What each instruction of CPython 3.11 to 3.13 does to sizes. See `bounded`."""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import CodeType

from teola_plugin.tracer.bounded import (
    NULL,
    SMALL,
    Data,
    Frame,
    Inner,
    Known,
    Loop,
    Machine,
    State,
    Unbounded,
    Value,
    is_plain,
    quoted,
    size_of,
    trusted,
)
from teola_plugin.tracer.bounded_calls import BUILTINS, MOST, attribute, called, width
from teola_plugin.tracer.bounds import Size, constant, plus, scaled

_CELL = Known(object())
_CLOSURE = 0x08
_METHODS_ARE_FLAGGED = sys.version_info >= (3, 12)

Step = Callable[[Machine, Frame, dis.Instruction, State], State | None]
"""What comes after it; None where nothing falls through."""


def step(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State | None:
    """Raises `Unbounded`."""
    return _STEPS[at.opname](machine, frame, at, state)


def _pops(state: State, count: int) -> list[Value]:
    if count > len(state.stack):
        raise Unbounded("a stack that is not understood")
    at = len(state.stack) - count
    found, state.stack[at:] = state.stack[at:], []
    return found


# ------------------------------------------------------------ moving values


def _nothing(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    return state


def _never(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    raise Unbounded(f"the instruction {at.opname}")


def _load_const(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    if not is_plain(at.argval) and not isinstance(at.argval, (CodeType, slice, frozenset)):
        raise Unbounded("a constant of another kind")
    state.stack.append(Known(at.argval) if not isinstance(at.argval, frozenset) else Known(tuple(at.argval)))
    return state


def _named(frame: Frame, state: State, name: str) -> Value:
    found = state.local.get(name, frame.cells.get(name))
    if found is None:
        raise Unbounded(f"{name} is not there yet")
    return found


def _set(frame: Frame, state: State, name: str, value: Value) -> None:
    if frame.loops and name in frame.loops[-1].bound:
        raise Unbounded(f"{name} is carried from round to round")
    state.local[name] = value


def _load_fast(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    names = at.argval if isinstance(at.argval, tuple) else (at.argval,)
    state.stack += [_named(frame, state, name) for name in names]
    return state


def _load_and_clear(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    state.stack.append(state.local.pop(at.argval, NULL))
    return state


def _store_fast(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    (value,) = _pops(state, 1)
    if value is NULL:
        state.local.pop(at.argval, None)
    else:
        _set(frame, state, at.argval, value)
    return state


def _store_load(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    (value,) = _pops(state, 1)
    _set(frame, state, at.argval[0], value)
    state.stack.append(_named(frame, state, at.argval[1]))
    return state


def _store_store(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    second, first = _pops(state, 2)
    _set(frame, state, at.argval[0], first)
    _set(frame, state, at.argval[1], second)
    return state


def _load_deref(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    state.stack.append(_named(frame, state, at.argval))
    return state


def _load_cell(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    state.stack.append(_CELL)
    return state


def _load_global(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    name = at.argval
    if name in frame.names:
        found = trusted(frame.names[name])
    elif name in BUILTINS:
        found = Known(getattr(builtins, name))
    else:
        raise Unbounded(f"{name} is not known")
    null = [NULL] if (at.arg or 0) & 1 else []
    state.stack += [*null, found]
    return state


def _pop(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    if frame.ended != at.offset - 2:  # what 3.13 has after a loop: the iterator is gone already
        _pops(state, 1)
    return state


def _push_null(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    state.stack.append(NULL)
    return state


def _copy(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    state.stack.append(state.stack[-(at.arg or 0)])
    return state


def _swap(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    i = -(at.arg or 0)
    state.stack[-1], state.stack[i] = state.stack[i], state.stack[-1]
    return state


# ------------------------------------------------------------ making containers


def _build(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    count = (at.arg or 0) * (2 if at.opname == "BUILD_MAP" else 1)
    parts = _pops(state, count)
    if at.opname == "BUILD_TUPLE" and parts and all(isinstance(p, Known) and isinstance(p.value, type) for p in parts):
        state.stack.append(Known(tuple(p.value for p in parts if isinstance(p, Known))))  # for `isinstance`
        return state
    if parts and all(part is _CELL for part in parts):
        state.stack.append(NULL)  # `MAKE_FUNCTION` looks for what they hold by name
        return state
    state.stack.append(machine.made(plus(constant(1 + count), *map(size_of, parts))))
    return state


def _build_const_map(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    parts = _pops(state, (at.arg or 0) + 1)
    state.stack.append(machine.made(plus(constant(1 + len(parts)), *map(size_of, parts))))
    return state


def _build_string(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    state.stack.append(machine.made(plus(constant(1), *map(size_of, _pops(state, at.arg or 0))), text=True))
    return state


def _build_slice(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    for part in _pops(state, at.arg or 0):
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


def _append(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    """Also a whole list or dictionary at once: its items."""
    (value,) = _pops(state, 1)
    machine.spend(size_of(value))
    _add_to(state, at.arg or 0, machine, value)
    return state


def _map_add(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    for value in _pops(state, 2):
        machine.spend(size_of(value))
        _add_to(state, at.arg or 0, machine, value)
    return state


def _same(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    (value,) = _pops(state, 1)
    state.stack.append(machine.made(size_of(value)))
    return state


def _intrinsic(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    if at.arg not in (5, 6):  # unary plus; list to tuple
        raise Unbounded("an intrinsic that is not known")
    return _same(machine, frame, at, state)


def _unpack(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    (value,) = _pops(state, 1)
    size = size_of(value)
    state.stack += [Data(size)] * (at.arg or 0)
    return state


# ------------------------------------------------------------ operators


def _truth(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    count = 1 if at.opname.startswith(("UNARY", "TO_BOOL")) else 2
    for value in _pops(state, count):
        machine.spend(size_of(value))
    state.stack.append(SMALL)
    return state


def _is(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    _pops(state, 2)
    state.stack.append(SMALL)
    return state


def _negative(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    (value,) = _pops(state, 1)
    count = isinstance(value, Data) and value.count
    state.stack.append(machine.made(plus(constant(1), size_of(value)), count=count))
    return state


def _subscript(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    of, *keys = _pops(state, 3 if at.opname == "BINARY_SLICE" else 2)
    sliced = at.opname == "BINARY_SLICE"
    for key in keys:
        if not (isinstance(key, Known) and isinstance(key.value, slice)):
            machine.spend(size_of(key))
    size = size_of(of)
    if sliced or keys[0] == SMALL or (isinstance(keys[0], Known) and isinstance(keys[0].value, slice)):
        machine.spend(size)
    state.stack.append(Data(size, isinstance(of, Data) and of.text))
    return state


def _operator(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    one, other = _pops(state, 2)
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
    sides = [v if _number(v) is None else Data(constant(MOST), count=isinstance(_number(v), int)) for v in (one, other)]
    text = all(isinstance(v, (Data, Known)) and (not isinstance(v, Data) or v.text) for v in (one, other))
    return machine.made(plus(*map(size_of, sides)), text=text, count=_counts(*sides))


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


def _format_value(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    flags = at.arg or 0
    spec = _pops(state, 1)[0] if flags & 4 else None
    state.stack.append(_printed(machine, _pops(state, 1)[0], again=flags & 3 in (2, 3), spec=spec))
    return state


def _format_simple(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    spec = _pops(state, 1)[0] if at.opname == "FORMAT_WITH_SPEC" else None
    state.stack.append(_printed(machine, _pops(state, 1)[0], again=False, spec=spec))
    return state


def _convert(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    state.stack.append(_printed(machine, _pops(state, 1)[0], again=at.arg in (2, 3), spec=None))
    return state


# ------------------------------------------------------------ jumps, loops


def _come(frame: Frame, target: int, state: State) -> None:
    known = frame.coming.get(target)
    frame.coming[target] = state.copy() if known is None else known.join(state)


def _jump(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State | None:
    if at.argval > at.offset:
        _come(frame, at.argval, state)
    else:
        _again(frame, at)
    return None


def _again(frame: Frame, at: dis.Instruction) -> None:
    """Backwards there is nothing but the next round of a loop over items."""
    if all(loop.start != at.argval for loop in frame.loops):
        raise Unbounded("a loop without a bound")


def _jump_if(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    keeps = at.opname.endswith("_OR_POP")
    (value,) = _pops(state, 1)
    machine.spend(plus(constant(1), size_of(value)))
    if at.argval <= at.offset:
        _again(frame, at)
    else:
        target = state.copy()
        target.stack += [value] if keeps else []
        _come(frame, at.argval, target)
    return state


def _for(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    (items,) = _pops(state, 1)
    _come(frame, at.argval, state)
    first = machine.loops.enter(plus(constant(1), size_of(items)))
    frame.loops.append(Loop(at.offset, at.argval, frozenset(state.local)))
    state.stack += [items, Data(first, level=machine.loops.depth)]
    return state


def _after_loop(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    """From 3.12 on. The iterator is gone already."""
    frame.ended = at.offset if sys.version_info >= (3, 13) else None
    return state


def _generator(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    frame.yielded = constant(1)
    state.stack.append(NULL)
    return state


def _yield(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    (value,) = _pops(state, 1)
    more = machine.loops.in_all_rounds(plus(constant(1), size_of(value)), frame.base)
    frame.yielded = plus(frame.yielded or constant(1), more)
    state.stack.append(NULL)
    return state


def _return(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> None:
    found = Known(at.argval) if at.opname == "RETURN_CONST" else _pops(state, 1)[0]
    frame.given.append(found)


# ------------------------------------------------------------ calls


def _attribute(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    (of,) = _pops(state, 1)
    method = at.opname == "LOAD_METHOD" or (_METHODS_ARE_FLAGGED and bool((at.arg or 0) & 1))
    state.stack += [*([NULL] if method else []), attribute(of, at.argval)]
    return state


def _keywords(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    frame.keywords = frame.code.co_consts[at.arg or 0]
    return state


def _call(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    keywords, frame.keywords = frame.keywords, ()
    if at.opname == "CALL_KW":
        (names,) = _pops(state, 1)
        keywords = names.value if isinstance(names, Known) else ()
    given = _pops(state, at.arg or 0)
    below, above = _pops(state, 2)
    if below is NULL:
        what = above
    elif above is NULL:
        what = below
    else:
        what, given = below, [above, *given]
    split = len(given) - len(keywords)
    machine.spend(constant(1))
    state.stack.append(called(machine, what, given[:split], dict(zip(keywords, given[split:], strict=True))))
    return state


def _function(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    (code,) = _pops(state, 1)
    if not isinstance(code, Known) or not isinstance(code.value, CodeType):
        raise Unbounded("a function that is not known")
    if at.arg:
        if at.arg != _CLOSURE:
            raise Unbounded("a function with defaults")
        _pops(state, 1)
    cells = {name: state.local.get(name, frame.cells.get(name)) for name in code.value.co_freevars}
    state.stack.append(Inner(code.value, {name: cell for name, cell in cells.items() if cell is not None}, frame.names))
    return state


def _function_attribute(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    _, function = _pops(state, 2)
    if at.arg != _CLOSURE:
        raise Unbounded("a function with defaults")
    state.stack.append(function)
    return state


def _table(*rows: tuple[str, Step]) -> Mapping[str, Step]:
    return {name: act for names, act in rows for name in names.split()}


_STEPS = _table(
    ("CACHE COPY_FREE_VARS EXTENDED_ARG GET_ITER MAKE_CELL NOP PRECALL RESUME", _nothing),
    ("RERAISE", _never),
    ("LOAD_CONST", _load_const),
    ("LOAD_FAST LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST", _load_fast),
    ("LOAD_FAST_AND_CLEAR", _load_and_clear),
    ("STORE_FAST", _store_fast),
    ("STORE_FAST_LOAD_FAST", _store_load),
    ("STORE_FAST_STORE_FAST", _store_store),
    ("LOAD_DEREF", _load_deref),
    ("LOAD_CLOSURE", _load_cell),
    ("LOAD_GLOBAL", _load_global),
    ("POP_TOP", _pop),
    ("PUSH_NULL", _push_null),
    ("COPY", _copy),
    ("SWAP", _swap),
    ("BUILD_LIST BUILD_MAP BUILD_SET BUILD_TUPLE", _build),
    ("BUILD_CONST_KEY_MAP", _build_const_map),
    ("BUILD_STRING", _build_string),
    ("BUILD_SLICE", _build_slice),
    ("DICT_MERGE DICT_UPDATE LIST_APPEND LIST_EXTEND SET_ADD SET_UPDATE", _append),
    ("MAP_ADD", _map_add),
    ("LIST_TO_TUPLE", _same),
    ("CALL_INTRINSIC_1", _intrinsic),
    ("UNPACK_SEQUENCE", _unpack),
    ("COMPARE_OP CONTAINS_OP TO_BOOL UNARY_NOT", _truth),
    ("IS_OP", _is),
    ("UNARY_INVERT UNARY_NEGATIVE", _negative),
    ("BINARY_SLICE BINARY_SUBSCR", _subscript),
    ("BINARY_OP", _operator),
    ("FORMAT_VALUE", _format_value),
    ("FORMAT_SIMPLE FORMAT_WITH_SPEC", _format_simple),
    ("CONVERT_VALUE", _convert),
    ("JUMP_BACKWARD JUMP_FORWARD", _jump),
    ("JUMP_IF_FALSE_OR_POP JUMP_IF_TRUE_OR_POP", _jump_if),
    ("POP_JUMP_BACKWARD_IF_FALSE POP_JUMP_BACKWARD_IF_NONE POP_JUMP_BACKWARD_IF_NOT_NONE", _jump_if),
    ("POP_JUMP_BACKWARD_IF_TRUE POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_NONE", _jump_if),
    ("POP_JUMP_FORWARD_IF_NOT_NONE POP_JUMP_FORWARD_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_NONE", _jump_if),
    ("POP_JUMP_IF_NOT_NONE POP_JUMP_IF_TRUE", _jump_if),
    ("FOR_ITER", _for),
    ("END_FOR", _after_loop),
    ("RETURN_GENERATOR", _generator),
    ("YIELD_VALUE", _yield),
    ("RETURN_CONST RETURN_VALUE", _return),
    ("LOAD_ATTR LOAD_METHOD", _attribute),
    ("KW_NAMES", _keywords),
    ("CALL CALL_KW", _call),
    ("MAKE_FUNCTION", _function),
    ("SET_FUNCTION_ATTRIBUTE", _function_attribute),
)
INSTRUCTIONS = frozenset(_STEPS)
