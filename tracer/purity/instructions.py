"""What each instruction of CPython 3.11 to 3.13 does to sizes. See `bounded`."""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Callable, Mapping
from types import CodeType

from teola_plugin.tracer.purity import operators
from teola_plugin.tracer.purity.calls import BUILTINS, attribute, called, trusted
from teola_plugin.tracer.purity.machine import Machine
from teola_plugin.tracer.purity.operators import CELL
from teola_plugin.tracer.purity.size_bounds import constant, plus
from teola_plugin.tracer.purity.values import (
    NULL,
    Data,
    Frame,
    Inner,
    Known,
    Loop,
    State,
    Unbounded,
    Value,
    is_plain,
    pops,
    size_of,
)

_CLOSURE = 0x08
_METHODS_ARE_FLAGGED = sys.version_info >= (3, 12)

Step = Callable[[Machine, Frame, dis.Instruction, State], State | None]
"""What comes after it; None where nothing falls through."""


def step(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State | None:
    """Raises `Unbounded`."""
    return _STEPS[at.opname](machine, frame, at, state)


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
    (value,) = pops(state, 1)
    if value is NULL:
        state.local.pop(at.argval, None)
    else:
        _set(frame, state, at.argval, value)
    return state


def _store_load(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    (value,) = pops(state, 1)
    _set(frame, state, at.argval[0], value)
    state.stack.append(_named(frame, state, at.argval[1]))
    return state


def _store_store(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    second, first = pops(state, 2)
    _set(frame, state, at.argval[0], first)
    _set(frame, state, at.argval[1], second)
    return state


def _load_deref(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    state.stack.append(_named(frame, state, at.argval))
    return state


def _load_cell(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    state.stack.append(CELL)
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
        pops(state, 1)
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
    (value,) = pops(state, 1)
    machine.spend(plus(constant(1), size_of(value)))
    if at.argval <= at.offset:
        _again(frame, at)
    else:
        target = state.copy()
        target.stack += [value] if keeps else []
        _come(frame, at.argval, target)
    return state


def _for(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    (items,) = pops(state, 1)
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
    (value,) = pops(state, 1)
    more = machine.loops.in_all_rounds(plus(constant(1), size_of(value)), frame.base)
    frame.yielded = plus(frame.yielded or constant(1), more)
    state.stack.append(NULL)
    return state


def _return(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> None:
    found = Known(at.argval) if at.opname == "RETURN_CONST" else pops(state, 1)[0]
    frame.given.append(found)


# ------------------------------------------------------------ calls


def _attribute(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    (of,) = pops(state, 1)
    method = at.opname == "LOAD_METHOD" or (_METHODS_ARE_FLAGGED and bool((at.arg or 0) & 1))
    state.stack += [*([NULL] if method else []), attribute(of, at.argval)]
    return state


def _keywords(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    frame.keywords = frame.code.co_consts[at.arg or 0]
    return state


def _call(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    keywords, frame.keywords = frame.keywords, ()
    if at.opname == "CALL_KW":
        (names,) = pops(state, 1)
        keywords = names.value if isinstance(names, Known) else ()
    given = pops(state, at.arg or 0)
    below, above = pops(state, 2)
    if below is NULL:
        what = above
    elif above is NULL:
        what = below
    else:
        what, given = below, [above, *given]
    split = len(given) - len(keywords)
    machine.tick()
    state.stack.append(called(machine, what, given[:split], dict(zip(keywords, given[split:], strict=True))))
    return state


def _function(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    (code,) = pops(state, 1)
    if not isinstance(code, Known) or not isinstance(code.value, CodeType):
        raise Unbounded("a function that is not known")
    if at.arg:
        if at.arg != _CLOSURE:
            raise Unbounded("a function with defaults")
        pops(state, 1)
    cells = {name: state.local.get(name, frame.cells.get(name)) for name in code.value.co_freevars}
    state.stack.append(Inner(code.value, {name: cell for name, cell in cells.items() if cell is not None}, frame.names))
    return state


def _function_attribute(machine: Machine, frame: Frame, at: dis.Instruction, state: State) -> State:
    _, function = pops(state, 2)
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
    ("BUILD_LIST BUILD_MAP BUILD_SET BUILD_TUPLE", operators.build),
    ("BUILD_CONST_KEY_MAP", operators.build_const_map),
    ("BUILD_STRING", operators.build_string),
    ("BUILD_SLICE", operators.build_slice),
    ("DICT_MERGE DICT_UPDATE LIST_APPEND LIST_EXTEND SET_ADD SET_UPDATE", operators.append),
    ("MAP_ADD", operators.map_add),
    ("LIST_TO_TUPLE", operators.same),
    ("CALL_INTRINSIC_1", operators.intrinsic),
    ("UNPACK_SEQUENCE", operators.unpack),
    ("COMPARE_OP CONTAINS_OP TO_BOOL UNARY_NOT", operators.truth),
    ("IS_OP", operators.is_same),
    ("UNARY_INVERT UNARY_NEGATIVE", operators.negative),
    ("BINARY_SLICE BINARY_SUBSCR", operators.subscript),
    ("BINARY_OP", operators.operator),
    ("FORMAT_VALUE", operators.format_value),
    ("FORMAT_SIMPLE FORMAT_WITH_SPEC", operators.format_simple),
    ("CONVERT_VALUE", operators.convert),
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
