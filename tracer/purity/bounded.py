"""Functions that are certain to end soon, by their bytecode: it is walked through once, with sizes in place of values.

A loop runs over the items of something whose size is known, and carries nothing from round to round; what is called is
known; what grows, grows by a bound. So how long a function takes, and how large what it makes gets, is a polynomial in
the size of its argument. Everything else, and every instruction of a Python that is not known here, has no bound.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from types import CodeType, FunctionType
from typing import Any

from teola_plugin.tracer.purity.calls import trusted
from teola_plugin.tracer.purity.instructions import INSTRUCTIONS, step
from teola_plugin.tracer.purity.size_bounds import ARGUMENT, Loops, Size, Term, constant, plus
from teola_plugin.tracer.purity.values import Data, Frame, Inner, Method, State, Unbounded, Value, merged, size_of

DEGREE, FACTOR = 2, 100_000
"""A function may take so many steps: at most `FACTOR * n ** DEGREE`, for an argument of size n."""
_FUEL = 20_000
"""Instructions that are looked at for one function, with all that it calls."""
_GENERATOR, _OTHERS = 0x20, 0x04 | 0x08 | 0x80 | 0x200
"""Flags of a code: it yields; it takes any arguments, or is asynchronous."""


class Interpreter:
    """A `Machine`: walks through one function, and through what it calls."""

    def __init__(self) -> None:
        self.loops = Loops()
        self.cost = Term(0, 0)
        self._fuel = _FUEL
        self._above: list[CodeType] = []

    # ------------------------------------------------------------ costs

    def spend(self, size: Size) -> None:
        """So many steps are taken here. Raises `Unbounded` where that is too much."""
        self._took(self.loops.whole(self.loops.in_all_rounds(size)))

    def tick(self) -> None:
        """One step is taken here."""
        self._fuel -= 1
        if self._fuel < 0:
            raise Unbounded("it is long")
        self._took(self.loops.rounds)

    def _took(self, steps: Term) -> None:
        self.cost = Term(max(self.cost.degree, steps.degree), self.cost.factor + steps.factor)
        if self.cost.degree > DEGREE or self.cost.factor > FACTOR:
            raise Unbounded("it may take too many steps")

    def made(self, size: Size, *, text: bool = False, count: bool = False) -> Data:
        """A value that is made here."""
        self.spend(plus(constant(1), size))
        return Data(size, text, count, self.loops.depth)

    def each(self, over: Value, act: Callable[[Value], Size]) -> Size:
        """What `act` makes of the items, all together."""
        first = self.loops.enter(size_of(over))
        try:
            return self.loops.collected(act(Data(first)), self.loops.depth)
        finally:
            self.loops.leave()

    # ------------------------------------------------------------ calls

    def function(self, func: FunctionType, given: list[Value], keywords: Mapping[str, Value]) -> Value:
        cells = {}
        for name, cell in zip(func.__code__.co_freevars, func.__closure__ or (), strict=True):
            try:
                cells[name] = trusted(cell.cell_contents)
            except ValueError:
                raise Unbounded(f"{name} is not there yet") from None
        if func.__kwdefaults__:
            raise Unbounded("it has defaults")
        return self.run(func.__code__, func.__globals__, cells, given, keywords, func.__defaults__ or ())

    def run(
        self,
        code: CodeType,
        names: Mapping[str, Any],
        cells: Mapping[str, Value],
        given: list[Value],
        keywords: Mapping[str, Value],
        defaults: tuple[Any, ...] = (),
    ) -> Value:
        """What the code returns. Raises `Unbounded`."""
        if code in self._above or len(self._above) > 20:
            raise Unbounded("it calls itself")
        self._above.append(code)
        frame = Frame(code, names, cells, self.loops.depth)
        state: State | None = State([], _bound(code, given, keywords, defaults))
        try:
            for at in _instructions(code):
                state = self._arrive(frame, at, state)
                if state is not None:
                    self.tick()
                    state = step(self, frame, at, state)
            return self._result(frame)
        finally:
            while self.loops.depth > frame.base:
                self.loops.leave()
            self._above.pop()

    def _arrive(self, frame: Frame, at: dis.Instruction, state: State | None) -> State | None:
        """The state before an instruction: what falls through, and what jumps here."""
        jumped = frame.coming.pop(at.offset, None)
        if jumped is not None:
            state = jumped if state is None else state.join(jumped)
        while frame.loops and frame.loops[-1].end == at.offset:
            frame.loops.pop()
            leaving = self._leaving(self.loops.depth)
            state = None if state is None else state.mapped(leaving)
            frame.coming = {where: one.mapped(leaving) for where, one in frame.coming.items()}
            frame.given = [leaving(value) for value in frame.given]
            self.loops.leave()
        return state

    def _leaving(self, level: int) -> Callable[[Value], Value]:
        def outside(value: Value) -> Value:
            if isinstance(value, Data):
                return replace(value, size=self.loops.outlasting(value.size, level), level=min(value.level, level - 1))
            if isinstance(value, Inner):
                return replace(value, cells={name: outside(cell) for name, cell in value.cells.items()})
            return Method(outside(value.of), value.name) if isinstance(value, Method) and value.of else value

        return outside

    def _result(self, frame: Frame) -> Value:
        if frame.yielded is not None:
            return Data(frame.yielded)
        if not frame.given:
            raise Unbounded("it returns nothing")
        found = frame.given[0]
        for other in frame.given[1:]:
            found = merged(found, other)
        return found


def _bound(
    code: CodeType, given: list[Value], keywords: Mapping[str, Value], defaults: tuple[Any, ...]
) -> dict[str, Value]:
    if code.co_flags & _OTHERS or (code.co_flags & _GENERATOR and code.co_name != "<genexpr>"):
        raise Unbounded("it takes any arguments, or gives its values one by one")
    wanted = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    found: dict[str, Value] = {name: trusted(one) for name, one in zip(wanted[::-1], defaults[::-1], strict=False)}
    found |= dict(zip(wanted, given, strict=False)) | dict(keywords)
    if len(given) > code.co_argcount or found.keys() != set(wanted) or code.co_posonlyargcount:
        raise Unbounded("it is called with other arguments")
    return found


@lru_cache(maxsize=256)
def _instructions(code: CodeType) -> tuple[dis.Instruction, ...]:
    found = tuple(dis.get_instructions(code))
    if other := next((one.opname for one in found if one.opname not in INSTRUCTIONS), ""):
        raise Unbounded(f"the instruction {other}")
    return found


def bound(func: FunctionType) -> Term | None:
    """How many steps `func(value)` takes at most, for a value of size n; None without a bound. Runs nothing."""
    machine = Interpreter()
    try:
        result = machine.function(func, [Data(ARGUMENT)], {})
        machine.spend(size_of(result))
    except Exception:  # `Unbounded`, or bytecode of a shape that is not known here
        return None
    return machine.cost
