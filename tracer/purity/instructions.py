"""The effect of each instruction of CPython 3.11 to 3.13 on abstract values. See `interpreter`."""

from __future__ import annotations

import builtins
import dis
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import CodeType

from teola_plugin.tracer.purity.abstract_values import (
    CELL,
    NULL,
    REPR_FACTOR,
    SMALL,
    AbstractValue,
    CodeFrame,
    Constant,
    ForLoop,
    FrameState,
    Machine,
    NestedFunction,
    SizedValue,
    Unbounded,
    add,
    constant_size,
    is_plain_constant,
    printed_size,
    scale,
    size_of,
)
from teola_plugin.tracer.purity.calls import (
    BUILTINS,
    LARGEST_CONSTANT,
    call_value,
    field_width,
    read_attribute,
    trusted_constant,
)

_CLOSURE = 0x08
_METHODS_ARE_FLAGGED = sys.version_info >= (3, 12)
_HAS_POP_AFTER_LOOP = sys.version_info >= (3, 13)
_LARGEST_FLOAT_SIZE = 32
"""More digits than any float has."""

TransferFunction = Callable[[Machine, CodeFrame, dis.Instruction, FrameState], FrameState | None]
"""Returns the state after an instruction, or None if control never falls through to the next one."""


def execute(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState | None:
    """Return the state after the instruction, None if nothing falls through. Raise `Unbounded` if it has no bound."""
    return _TRANSFER_FUNCTIONS[instruction.opname](machine, frame, instruction, state)


def _do_nothing(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    if instruction.opname == "RERAISE":
        raise Unbounded(f"the instruction {instruction.opname}")
    if instruction.opname == "END_FOR":  # `_for_iter` has left the iterator out of the state behind the loop
        frame.loop_end_offset = instruction.offset if _HAS_POP_AFTER_LOOP else None
    return state


# ------------------------------------------------------------ variables and the stack


def _load(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    argument = instruction.argval
    match instruction.opname:
        case "LOAD_CONST":
            if not is_plain_constant(argument) and not isinstance(argument, (CodeType, slice, frozenset)):
                raise Unbounded("a constant of another kind")
            state.stack.append(Constant(tuple(argument) if isinstance(argument, frozenset) else argument))
        case "LOAD_FAST_LOAD_FAST":
            state.stack += [_variable(frame, state, name) for name in argument]
        case "LOAD_FAST_AND_CLEAR":
            state.stack.append(state.variables.pop(argument, NULL))
        case "LOAD_CLOSURE":
            state.stack.append(CELL)
        case "PUSH_NULL":
            state.stack.append(NULL)
        case _:
            state.stack.append(_variable(frame, state, argument))
    return state


def _load_global(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    name = instruction.argval
    if name in frame.globals:
        value = trusted_constant(frame.globals[name])
    elif name in BUILTINS:
        value = Constant(getattr(builtins, name))
    else:
        raise Unbounded(f"{name} is not known")
    pushes_null = (instruction.arg or 0) & 1
    state.stack += [NULL, value] if pushes_null else [value]
    return state


def _store(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    value = state.pop(1)[0]
    match instruction.opname:
        case "STORE_FAST_LOAD_FAST":
            stored_name, loaded_name = instruction.argval
            _set_variable(frame, state, stored_name, value)
            state.stack.append(_variable(frame, state, loaded_name))
        case "STORE_FAST_STORE_FAST":
            _set_variable(frame, state, instruction.argval[0], value)
            _set_variable(frame, state, instruction.argval[1], state.pop(1)[0])
        case _ if value is NULL:
            state.variables.pop(instruction.argval, None)
        case _:
            _set_variable(frame, state, instruction.argval, value)
    return state


def _variable(frame: CodeFrame, state: FrameState, name: str) -> AbstractValue:
    value = state.variables.get(name, frame.cells.get(name))
    if value is None:
        raise Unbounded(f"{name} is not there yet")
    return value


def _set_variable(frame: CodeFrame, state: FrameState, name: str, value: AbstractValue) -> None:
    if frame.loops and name in frame.loops[-1].outer_variables:
        raise Unbounded(f"{name} is carried from round to round")
    state.variables[name] = value


def _rearrange(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    i = -(instruction.arg or 0)
    match instruction.opname:
        case "COPY":
            state.stack.append(state.stack[i])
        case "SWAP":
            state.stack[-1], state.stack[i] = state.stack[i], state.stack[-1]
        case "POP_TOP" if frame.loop_end_offset != instruction.offset - 2:  # else it pops an iterator: see `END_FOR`
            state.pop(1)
    return state


# ------------------------------------------------------------ jumps, loops


def _jump_to(frame: CodeFrame, target: int, state: FrameState) -> None:
    """Remember the state for an instruction further down."""
    earlier = frame.jump_states.get(target)
    frame.jump_states[target] = state.copy() if earlier is None else earlier.join(state)


def _check_backward_jump(frame: CodeFrame, target: int) -> None:
    """Raise `Unbounded` unless the jump goes to the next iteration of a loop over items."""
    if all(loop.start != target for loop in frame.loops):
        raise Unbounded("a loop without a bound")


def _jump(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> None:
    if instruction.argval > instruction.offset:
        _jump_to(frame, instruction.argval, state)
    else:
        _check_backward_jump(frame, instruction.argval)


def _jump_if(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    (value,) = state.pop(1)
    machine.spend(add(constant_size(1), size_of(value)))
    if instruction.argval <= instruction.offset:
        _check_backward_jump(frame, instruction.argval)
        return state
    target_state = state.copy()
    if instruction.opname.endswith("_OR_POP"):
        target_state.stack.append(value)
    _jump_to(frame, instruction.argval, target_state)
    return state


def _for_iter(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    (items,) = state.pop(1)
    _jump_to(frame, instruction.argval, state)
    item_size = machine.loops.enter(add(constant_size(1), size_of(items)))
    frame.loops.append(ForLoop(instruction.offset, instruction.argval, frozenset(state.variables)))
    state.stack += [items, SizedValue(item_size, level=machine.loops.depth)]
    return state


def _yield_value(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    if instruction.opname == "RETURN_GENERATOR":
        frame.yielded_size = constant_size(1)
    else:
        (value,) = state.pop(1)
        size = machine.loops.sum_over_loops(add(constant_size(1), size_of(value)), frame.outer_loops)
        frame.yielded_size = add(frame.yielded_size or constant_size(1), size)
    state.stack.append(NULL)
    return state


def _return(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> None:
    is_constant = instruction.opname == "RETURN_CONST"
    frame.return_values.append(Constant(instruction.argval) if is_constant else state.pop(1)[0])


# ------------------------------------------------------------ calls


def _load_attribute(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    (receiver,) = state.pop(1)
    is_flagged = _METHODS_ARE_FLAGGED and bool((instruction.arg or 0) & 1)
    if instruction.opname == "LOAD_METHOD" or is_flagged:
        state.stack.append(NULL)
    state.stack.append(read_attribute(receiver, instruction.argval))
    return state


def _call(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    if instruction.opname == "KW_NAMES":
        frame.keywords = frame.code.co_consts[instruction.arg or 0]
        return state
    keywords, frame.keywords = frame.keywords, ()
    if instruction.opname == "CALL_KW":
        (names,) = state.pop(1)
        keywords = names.value if isinstance(names, Constant) else ()
    args = state.pop(instruction.arg or 0)
    lower, upper = state.pop(2)
    if lower is NULL:
        callee = upper
    elif upper is NULL:
        callee = lower
    else:
        callee, args = lower, [upper, *args]
    split = len(args) - len(keywords)
    machine.tick()
    state.stack.append(call_value(machine, callee, args[:split], dict(zip(keywords, args[split:], strict=True))))
    return state


def _make_function(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    if instruction.arg and instruction.arg != _CLOSURE:
        raise Unbounded("a function with defaults")
    if instruction.opname == "SET_FUNCTION_ATTRIBUTE":
        state.stack.append(state.pop(2)[1])
        return state
    (code,) = state.pop(1)
    if not isinstance(code, Constant) or not isinstance(code.value, CodeType):
        raise Unbounded("a function that is not known")
    if instruction.arg:
        state.pop(1)
    cells = {name: state.variables.get(name, frame.cells.get(name)) for name in code.value.co_freevars}
    set_cells = {name: cell for name, cell in cells.items() if cell is not None}
    state.stack.append(NestedFunction(code.value, set_cells, frame.globals))
    return state


# ------------------------------------------------------------ containers


def _build(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    count = instruction.arg or 0
    match instruction.opname:
        case "BUILD_MAP":
            count *= 2
        case "BUILD_CONST_KEY_MAP":
            count += 1
    parts = state.pop(count)
    types = [part.value for part in parts if isinstance(part, Constant) and isinstance(part.value, type)]
    if instruction.opname == "BUILD_TUPLE" and parts and len(types) == count:
        state.stack.append(Constant(tuple(types)))  # for `isinstance`
    elif parts and all(part is CELL for part in parts):
        state.stack.append(NULL)  # `MAKE_FUNCTION` looks for what the cells hold by name
    elif instruction.opname == "BUILD_STRING":
        state.stack.append(machine.make(add(constant_size(1), *map(size_of, parts)), is_text=True))
    else:
        state.stack.append(machine.make(add(constant_size(1 + count), *map(size_of, parts))))
    return state


def _build_slice(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    for part in state.pop(instruction.arg or 0):
        size_of(part)
    state.stack.append(SMALL)
    return state


def _grow_container(machine: Machine, state: FrameState, depth: int, value: AbstractValue) -> None:
    """Add to a container on the stack what every iteration of the loops opened since it was made adds to it."""
    container = state.stack[-depth]
    if not isinstance(container, SizedValue):
        raise Unbounded("a container that is not understood")
    growth = machine.loops.sum_over_loops(add(constant_size(1), size_of(value)), container.level)
    state.stack[-depth] = replace(container, size=add(container.size, growth))


def _extend(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    """Add an item, a key and its value, or all items of another container to a container."""
    for value in state.pop(2 if instruction.opname == "MAP_ADD" else 1):
        machine.spend(size_of(value))
        _grow_container(machine, state, instruction.arg or 0, value)
    return state


def _copy_value(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    if instruction.opname == "CALL_INTRINSIC_1" and instruction.arg not in (5, 6):  # unary plus; list to tuple
        raise Unbounded("an intrinsic that is not known")
    (value,) = state.pop(1)
    state.stack.append(machine.make(size_of(value)))
    return state


def _unpack_sequence(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    (value,) = state.pop(1)
    size = size_of(value)
    state.stack += [SizedValue(size)] * (instruction.arg or 0)
    return state


# ------------------------------------------------------------ operators


def _test(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    values = state.pop(1 if instruction.opname.startswith(("UNARY", "TO_BOOL")) else 2)
    if instruction.opname != "IS_OP":
        for value in values:
            machine.spend(size_of(value))
    state.stack.append(SMALL)
    return state


def _negate(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    (value,) = state.pop(1)
    is_count = isinstance(value, SizedValue) and value.is_count
    state.stack.append(machine.make(add(constant_size(1), size_of(value)), is_count=is_count))
    return state


def _subscript(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    is_slice = instruction.opname == "BINARY_SLICE"
    container, *keys = state.pop(3 if is_slice else 2)
    for key in keys:
        if isinstance(key, Constant) and isinstance(key.value, slice):
            is_slice = True
        else:
            machine.spend(size_of(key))
    size = size_of(container)
    if is_slice or keys[0] == SMALL:  # `SMALL` may be a slice, too
        machine.spend(size)
    state.stack.append(SizedValue(size, isinstance(container, SizedValue) and container.is_text))
    return state


def _binary_op(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    left, right = state.pop(2)
    operator = _OPERATORS.get(instruction.argrepr)
    if operator is None:
        raise Unbounded(f"the operator {instruction.argrepr}")
    state.stack.append(operator(machine, left, right))
    return state


def _are_counts(*values: AbstractValue) -> bool:
    """Return True if the values are numbers that are themselves no larger than their sizes."""
    return all(isinstance(value, SizedValue) and value.is_count for value in values)


def _constant_number(value: AbstractValue) -> float | None:
    """Return a small constant number, None for any other value."""
    number = value.value if isinstance(value, Constant) else None
    return number if isinstance(number, (int, float)) and abs(number) <= LARGEST_CONSTANT else None


def _add(machine: Machine, left: AbstractValue, right: AbstractValue) -> AbstractValue:
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
    return machine.make(add(*map(size_of, operands)), is_text=are_texts, is_count=_are_counts(*operands))


def _multiply(machine: Machine, left: AbstractValue, right: AbstractValue) -> AbstractValue:
    for factor, value in ((_constant_number(left), right), (_constant_number(right), left)):
        if factor is not None:
            size = scale(size_of(value), max(1, abs(int(factor)) + 1))
            is_count = _are_counts(value) and isinstance(factor, int)
            return machine.make(add(constant_size(30), size), is_count=is_count)
    if _are_counts(left) or _are_counts(right):
        return machine.make(machine.loops.multiply(size_of(left), size_of(right)), is_count=_are_counts(left, right))
    raise Unbounded("a product of what is not known")


def _divide(machine: Machine, left: AbstractValue, right: AbstractValue) -> AbstractValue:
    if _constant_number(right) is None and not _are_counts(right):
        machine.spend(machine.loops.multiply(size_of(left), size_of(right)))
    return machine.make(add(constant_size(30), size_of(left), size_of(right)))


def _modulo(machine: Machine, left: AbstractValue, right: AbstractValue) -> AbstractValue:
    if _constant_number(left) is None and not _are_counts(left):
        raise Unbounded("a text may be formatted so")
    return _divide(machine, left, right)


_OPERATORS: Mapping[str, Callable[[Machine, AbstractValue, AbstractValue], AbstractValue]] = {
    "+": _add,
    "*": _multiply,
    "/": _divide,
    "//": _divide,
    "%": _modulo,
    **dict.fromkeys(("-", "&", "|", "^", ">>"), _add),
}


# ------------------------------------------------------------ texts


def _print(machine: Machine, frame: CodeFrame, instruction: dis.Instruction, state: FrameState) -> FrameState:
    argument = instruction.arg or 0
    flags, has_spec = 0, False
    match instruction.opname:
        case "FORMAT_VALUE":
            flags, has_spec = argument & 3, bool(argument & 4)
        case "CONVERT_VALUE":
            flags = argument
        case "FORMAT_WITH_SPEC":
            has_spec = True
    width = field_width(state.pop(1)[0]) if has_spec else 0
    (value,) = state.pop(1)
    size = scale(size_of(value), REPR_FACTOR) if flags in (2, 3) else printed_size(value)
    state.stack.append(machine.make(add(constant_size(30 + width), size), is_text=True))
    return state


# ------------------------------------------------------------ table


_ROWS: tuple[tuple[str, TransferFunction], ...] = (
    ("CACHE COPY_FREE_VARS END_FOR EXTENDED_ARG GET_ITER MAKE_CELL NOP PRECALL RERAISE RESUME", _do_nothing),
    ("LOAD_CLOSURE LOAD_CONST LOAD_DEREF LOAD_FAST LOAD_FAST_AND_CLEAR LOAD_FAST_CHECK LOAD_FAST_LOAD_FAST", _load),
    ("PUSH_NULL", _load),
    ("LOAD_GLOBAL", _load_global),
    ("STORE_FAST STORE_FAST_LOAD_FAST STORE_FAST_STORE_FAST", _store),
    ("COPY POP_TOP SWAP", _rearrange),
    ("BUILD_CONST_KEY_MAP BUILD_LIST BUILD_MAP BUILD_SET BUILD_STRING BUILD_TUPLE", _build),
    ("BUILD_SLICE", _build_slice),
    ("DICT_MERGE DICT_UPDATE LIST_APPEND LIST_EXTEND MAP_ADD SET_ADD SET_UPDATE", _extend),
    ("CALL_INTRINSIC_1 LIST_TO_TUPLE", _copy_value),
    ("UNPACK_SEQUENCE", _unpack_sequence),
    ("COMPARE_OP CONTAINS_OP IS_OP TO_BOOL UNARY_NOT", _test),
    ("UNARY_INVERT UNARY_NEGATIVE", _negate),
    ("BINARY_SLICE BINARY_SUBSCR", _subscript),
    ("BINARY_OP", _binary_op),
    ("CONVERT_VALUE FORMAT_SIMPLE FORMAT_VALUE FORMAT_WITH_SPEC", _print),
    ("JUMP_BACKWARD JUMP_FORWARD", _jump),
    ("JUMP_IF_FALSE_OR_POP JUMP_IF_TRUE_OR_POP", _jump_if),
    ("POP_JUMP_BACKWARD_IF_FALSE POP_JUMP_BACKWARD_IF_NONE POP_JUMP_BACKWARD_IF_NOT_NONE", _jump_if),
    ("POP_JUMP_BACKWARD_IF_TRUE POP_JUMP_FORWARD_IF_FALSE POP_JUMP_FORWARD_IF_NONE", _jump_if),
    ("POP_JUMP_FORWARD_IF_NOT_NONE POP_JUMP_FORWARD_IF_TRUE POP_JUMP_IF_FALSE POP_JUMP_IF_NONE", _jump_if),
    ("POP_JUMP_IF_NOT_NONE POP_JUMP_IF_TRUE", _jump_if),
    ("FOR_ITER", _for_iter),
    ("RETURN_GENERATOR YIELD_VALUE", _yield_value),
    ("RETURN_CONST RETURN_VALUE", _return),
    ("LOAD_ATTR LOAD_METHOD", _load_attribute),
    ("CALL CALL_KW KW_NAMES", _call),
    ("MAKE_FUNCTION SET_FUNCTION_ATTRIBUTE", _make_function),
)
_TRANSFER_FUNCTIONS: Mapping[str, TransferFunction] = {name: func for names, func in _ROWS for name in names.split()}
INSTRUCTIONS = frozenset(_TRANSFER_FUNCTIONS)
