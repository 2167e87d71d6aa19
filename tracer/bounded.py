"""Functions that are certain to end soon, by their bytecode: it is walked through once, with sizes in place of values.

A loop runs over the items of something whose size is known, and carries nothing from round to round; what is called is
known; what grows, grows by a bound. So how long a function takes, and how large what it makes gets, is a polynomial in
the size of its argument. Everything else, and every instruction of a Python that is not known here, has no bound.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from types import CodeType, FunctionType
from typing import Any, NamedTuple

from teola_plugin.tracer.bounds import ARGUMENT, Loops, Size, Term, constant, either, measured, plus, scaled

DEGREE, FACTOR = 2, 100_000
"""A function may take so many steps: at most `FACTOR * n ** DEGREE`, for an argument of size n."""
_FUEL = 20_000
"""Instructions that are looked at for one function, with all that it calls."""
REPR = 12
"""Characters that one of a text may become where it is quoted."""
PLAIN = (str, int, float, bool, type(None), bytes)
_GENERATOR, _OTHERS = 0x20, 0x04 | 0x08 | 0x80 | 0x200
"""Flags of a code: it yields; it takes any arguments, or is asynchronous."""


class Unbounded(Exception):
    """Why a function has no bound."""


@dataclass(frozen=True, slots=True)
class Data:
    """Any plain value, as large as that."""

    size: Size
    text: bool = False
    """Whether it is known to be a text."""
    count: bool = False
    """Whether it is a number no larger than `size`."""
    level: int = 0
    """Open loops where it was made."""


@dataclass(frozen=True, slots=True)
class Known:
    """A constant, a builtin, a function, a module."""

    value: Any


@dataclass(frozen=True, slots=True)
class Inner:
    """A function that is made by the function."""

    code: CodeType
    cells: Mapping[str, Value]
    names: Mapping[str, Any]
    """Globals."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a plain value, still to be called; `of` is None for one of a class (`str.strip`)."""

    of: Value | None
    name: str


Value = Data | Known | Inner | Method
NULL = Known(object())
SMALL = Data(constant(30))
"""A number, a truth value."""


def size_of(value: Value) -> Size:
    """Raises `Unbounded` for what is no plain value."""
    if isinstance(value, Data):
        return value.size
    if isinstance(value, Known) and is_plain(value.value):
        return constant(measured([value.value]))
    raise Unbounded("a function is used as a value")


def is_plain(value: object) -> bool:
    return type(value) in PLAIN or (type(value) is tuple and all(map(is_plain, value)))


def merged(one: Value, other: Value) -> Value:
    """Of two ways, whichever is taken."""
    if one == other:
        return one
    text = all(isinstance(v, Data) and v.text for v in (one, other))
    return Data(either(size_of(one), size_of(other)), text)


@dataclass(slots=True)
class State:
    """Before an instruction."""

    stack: list[Value]
    local: dict[str, Value]

    def copy(self) -> State:
        return State(list(self.stack), dict(self.local))

    def join(self, other: State) -> State:
        stack = [merged(a, b) for a, b in zip(self.stack, other.stack, strict=True)]
        local = {**self.local, **other.local}
        for name in self.local.keys() & other.local.keys():
            local[name] = merged(self.local[name], other.local[name])
        return State(stack, local)

    def mapped(self, change: Callable[[Value], Value]) -> State:
        return State([change(v) for v in self.stack], {name: change(v) for name, v in self.local.items()})


class Loop(NamedTuple):
    start: int
    end: int
    bound: frozenset[str]
    """Names that were there before it: setting one of them inside carries it from round to round."""


@dataclass(slots=True)
class Frame:
    """One call under way."""

    code: CodeType
    names: Mapping[str, Any]
    cells: Mapping[str, Value]
    base: int
    """Loops that were open when it began."""
    coming: dict[int, State] = field(default_factory=dict)
    """By the offset of an instruction that is jumped to."""
    loops: list[Loop] = field(default_factory=list)
    given: list[Value] = field(default_factory=list)
    """What it returns, on each way."""
    yielded: Size | None = None
    keywords: tuple[str, ...] = ()
    ended: int | None = None
    """Offset of the end of a loop."""


class Machine:
    """Walks through one function, and through what it calls."""

    def __init__(self) -> None:
        self.loops = Loops()
        self.cost = Term(0, 0)
        self._fuel = _FUEL
        self._above: list[CodeType] = []

    # ------------------------------------------------------------ costs

    def spend(self, size: Size) -> None:
        """So many steps are taken here. Raises `Unbounded` where that is too much."""
        steps = self.loops.whole(self.loops.in_all_rounds(size))
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
        from teola_plugin.tracer.bounded_steps import step

        if code in self._above or len(self._above) > 20:
            raise Unbounded("it calls itself")
        self._above.append(code)
        frame = Frame(code, names, cells, self.loops.depth)
        state: State | None = State([], _bound(code, given, keywords, defaults))
        try:
            for at in _instructions(code):
                state = self._arrive(frame, at, state)
                if state is not None:
                    self._fuel -= 1
                    if self._fuel < 0:
                        raise Unbounded("it is long")
                    self.spend(constant(1))
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


def trusted(value: Any) -> Value:
    """A global, or what a closure holds. Raises `Unbounded` for what user code may change, or has made."""
    from teola_plugin.tracer.bounded_calls import CALLABLES, MODULES, is_getter

    if is_plain(value) or type(value) is FunctionType or is_getter(value):
        return Known(value)
    if any(value is known for known in (*MODULES, *CALLABLES)):
        return Known(value)
    raise Unbounded("it reads a value of your own")


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


def _instructions(code: CodeType) -> Iterable[dis.Instruction]:
    from teola_plugin.tracer.bounded_steps import INSTRUCTIONS

    found = list(dis.get_instructions(code))
    if other := next((one.opname for one in found if one.opname not in INSTRUCTIONS), ""):
        raise Unbounded(f"the instruction {other}")
    return found


def bound(func: FunctionType) -> Term | None:
    """How many steps `func(value)` takes at most, for a value of size n; None without a bound. Runs nothing."""
    machine = Machine()
    try:
        result = machine.function(func, [Data(ARGUMENT)], {})
        machine.spend(size_of(result))
    except Unbounded:
        return None
    return machine.cost


def quoted(value: Value) -> Size:
    """As it is where it is printed."""
    if isinstance(value, Data) and value.text:
        return value.size
    if isinstance(value, Known) and isinstance(value.value, str):
        return size_of(value)
    return scaled(size_of(value), REPR)
