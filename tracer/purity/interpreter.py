"""An abstract interpreter that finds out how long a function may take, without running it.

It walks through the bytecode once, on sizes in place of values. A loop has a bound if it iterates over the items of
something whose size is known and carries nothing from iteration to iteration; a call, if the callee is known; what
grows has to grow by a bound. So the time that a function takes, and the size of what it makes, is a polynomial in the
size of its argument. Everything else, and every instruction of an unknown Python version, has no bound.
"""

from __future__ import annotations

import dis
from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache, partial, reduce
from types import CodeType, FunctionType
from typing import Any

from teola_plugin.tracer.purity.abstract_values import (
    ARGUMENT_SIZE,
    AbstractValue,
    CodeFrame,
    FrameState,
    Machine,
    Method,
    NestedFunction,
    SizedValue,
    Term,
    Unbounded,
    join_values,
    size_of,
)
from teola_plugin.tracer.purity.calls import trusted_constant
from teola_plugin.tracer.purity.instructions import INSTRUCTIONS, execute

_MAX_CALL_DEPTH = 20
_GENERATOR = 0x20
_UNSUPPORTED = 0x04 | 0x08 | 0x80 | 0x200
"""Flags of code that takes `*args` or `**kwargs`, or is asynchronous."""


def step_bound(func: FunctionType) -> Term | None:
    """Return how many steps `func(value)` takes at most, for a value of size n; None without a bound. Run nothing."""
    interpreter = Interpreter()
    try:
        result = interpreter.call(func, [SizedValue(ARGUMENT_SIZE)], {})
        interpreter.spend(size_of(result))
    except Exception:  # `Unbounded`, or bytecode of a shape that is not known here
        return None
    return interpreter.cost


class Interpreter(Machine):
    """An abstract machine that runs the bytecode of one function, and of what it calls."""

    def __init__(self) -> None:
        super().__init__()
        self._callers: list[CodeType] = []

    def call(self, func: FunctionType, args: list[AbstractValue], kwargs: Mapping[str, AbstractValue]) -> AbstractValue:
        cells = {}
        for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=True):
            try:
                cells[name] = trusted_constant(cell.cell_contents)
            except ValueError:
                raise Unbounded(f"{name} is not there yet") from None
        if func.__kwdefaults__:
            raise Unbounded("it has defaults")
        return self.run(func.__code__, func.__globals__, cells, args, kwargs, func.__defaults__ or ())

    def run(
        self,
        code: CodeType,
        global_values: Mapping[str, Any],
        cells: Mapping[str, AbstractValue],
        args: list[AbstractValue],
        kwargs: Mapping[str, AbstractValue],
        defaults: tuple[Any, ...] = (),
    ) -> AbstractValue:
        if code in self._callers or len(self._callers) > _MAX_CALL_DEPTH:
            raise Unbounded("it calls itself")
        self._callers.append(code)
        frame = CodeFrame(code, global_values, cells, self.loops.depth)
        state: FrameState | None = FrameState([], _parameters(code, args, kwargs, defaults))
        try:
            for instruction in _instructions(code):
                state = self._state_before(frame, instruction, state)
                if state is not None:
                    self.tick()
                    state = execute(self, frame, instruction, state)
            return self._returned(frame)
        finally:
            while self.loops.depth > frame.outer_loops:
                self.loops.leave()
            self._callers.pop()

    def _state_before(
        self, frame: CodeFrame, instruction: dis.Instruction, state: FrameState | None
    ) -> FrameState | None:
        """Join the state that falls through with those that jump here, and close the loops that end here."""
        jump_state = frame.jump_states.pop(instruction.offset, None)
        if jump_state is not None:
            state = jump_state if state is None else state.join(jump_state)
        while frame.loops and frame.loops[-1].end == instruction.offset:
            frame.loops.pop()
            outside = partial(self._outside_loop, level=self.loops.depth)
            state = None if state is None else state.map(outside)
            frame.jump_states = {target: jumping.map(outside) for target, jumping in frame.jump_states.items()}
            frame.return_values = [outside(value) for value in frame.return_values]
            self.loops.leave()
        return state

    def _outside_loop(self, value: AbstractValue, level: int) -> AbstractValue:
        """Return a value that was made inside the loop at `level`, as it is seen from outside of it."""
        if isinstance(value, SizedValue):
            size = self.loops.after_loop(value.size, level)
            return replace(value, size=size, level=min(value.level, level - 1))
        if isinstance(value, NestedFunction):
            cells = {name: self._outside_loop(cell, level) for name, cell in value.cells.items()}
            return replace(value, cells=cells)
        if isinstance(value, Method) and value.receiver:
            return Method(self._outside_loop(value.receiver, level), value.name)
        return value

    def _returned(self, frame: CodeFrame) -> AbstractValue:
        if frame.yielded_size is not None:
            return SizedValue(frame.yielded_size)
        if not frame.return_values:
            raise Unbounded("it returns nothing")
        return reduce(join_values, frame.return_values)


def _parameters(
    code: CodeType, args: list[AbstractValue], kwargs: Mapping[str, AbstractValue], defaults: tuple[Any, ...]
) -> dict[str, AbstractValue]:
    """Return the parameters of a call by name. Raise `Unbounded` if the arguments do not fit them."""
    is_generator = code.co_flags & _GENERATOR and code.co_name != "<genexpr>"
    if code.co_flags & _UNSUPPORTED or is_generator:
        raise Unbounded("it takes any arguments, or gives its values one by one")
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    values = {name: trusted_constant(default) for name, default in zip(names[::-1], defaults[::-1], strict=False)}
    values |= dict(zip(names, args, strict=False)) | dict(kwargs)
    if len(args) > code.co_argcount or values.keys() != set(names) or code.co_posonlyargcount:
        raise Unbounded("it is called with other arguments")
    return values


@lru_cache(maxsize=256)
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    instructions = tuple(dis.get_instructions(code))
    if unknown := next((item.opname for item in instructions if item.opname not in INSTRUCTIONS), ""):
        raise Unbounded(f"the instruction {unknown}")
    return instructions
