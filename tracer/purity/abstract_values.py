"""Abstract values: bounds of sizes, in place of the values that a function computes.

The size of a value is its characters, digits and items, counted wherever they are held. A bound is a polynomial in the
size of the function's argument. Inside a loop it may be expressed in the size of the loop's item. So what is made of
each item alone is known to be no larger, all together, than what is made of the whole:
`[text.strip() for text in texts]` is linear, `[text + question for text in texts]` is not.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from teola_plugin.tracer.purity.data_classes import DataClass
from teola_plugin.tracer.source import Definition


class Unbounded(Exception):
    """An error that is raised with the reason why a function has no bound."""


# ------------------------------------------------------------ sizes


class Term(NamedTuple):
    """The monomial `factor * n ** degree`, times the size of a loop's item if it stands under that loop's level."""

    degree: int
    factor: int


Size = Mapping[int, Term]
"""A sum of terms: under 0 the one in the argument alone, under k the one with the item of the k-th open loop."""

ARGUMENT_SIZE: Size = {0: Term(1, 1)}


def constant_size(size: int) -> Size:
    return {0: Term(0, size)}


def add(*sizes: Size) -> Size:
    """Return the sum of the sizes. Of terms at the same level, the higher degree counts for both."""
    total: dict[int, Term] = {}
    for size in sizes:
        for level, term in size.items():
            old = total.get(level, Term(0, 0))
            total[level] = Term(max(old.degree, term.degree), old.factor + term.factor)
    return total


def maximum(left: Size, right: Size) -> Size:
    """Return a bound for a value that has either of two sizes."""
    larger = dict(left)
    for level, term in right.items():
        old = larger.get(level, Term(0, 0))
        larger[level] = Term(max(old.degree, term.degree), max(old.factor, term.factor))
    return larger


def scale(size: Size, factor: int) -> Size:
    return {level: Term(term.degree, term.factor * factor) for level, term in size.items()}


def size_of_constants(values: Sequence[object]) -> int:
    """Return the total size of plain constants."""
    return sum(map(_size_of_constant, values))


def _size_of_constant(value: object) -> int:
    """Return the size of one plain constant: its characters, its bits, or its items and what they hold."""
    if isinstance(value, (str, bytes)):
        return 1 + len(value)
    if isinstance(value, (tuple, frozenset)):
        return 1 + size_of_constants(tuple(value))
    return 1 + value.bit_length() if isinstance(value, int) else 30


class Loops:
    """The loops that are open at an expression, outermost first, each with the size of what it iterates over."""

    def __init__(self) -> None:
        """Begin outside of all loops.

        For each open loop: the size of its iterable, and a bound for the number of items. `_iterations` has one entry
        more: the number of evaluations at each level, which is 1 outside of all loops.
        """
        self._iterable_sizes: list[Size] = []
        self._counts: list[Size] = []
        self._iterations = [Term(0, 1)]

    @property
    def depth(self) -> int:
        return len(self._iterable_sizes)

    @property
    def iterations(self) -> Term:
        """Return how often an expression in the innermost loop is evaluated, in terms of the argument."""
        return self._iterations[-1]

    def enter(self, iterable_size: Size, count: Size | None = None) -> Size:
        """Open a loop over an iterable of this size. Return the size of its item.

        `count`: a bound for the number of items, if there is a better one than the size.
        """
        self._iterable_sizes.append(iterable_size)
        self._counts.append(iterable_size if count is None else count)
        self._iterations.append(self.in_argument(self.sum_over_loops(constant_size(1))))
        return {self.depth: Term(0, 1)}

    def leave(self) -> None:
        """Close the innermost loop.

        Call it once for each `enter`. Sizes that name an item of this loop have no meaning afterwards.
        """
        self._iterations.pop()
        self._iterable_sizes.pop()
        self._counts.pop()

    def multiply(self, left: Size, right: Size) -> Size:
        """Return a bound for the product of two sizes. No term of it has the sizes of two items as factors."""
        total: Size = {}
        for left_level, left_term in left.items():
            for right_level, right_term in right.items():
                product = Term(left_term.degree + right_term.degree, left_term.factor * right_term.factor)
                if left_level and right_level:  # of two items, one is bounded by all that its loop iterates over
                    item = self.in_argument({left_level: Term(0, 1)})
                    product = Term(product.degree + item.degree, product.factor * item.factor)
                total = add(total, {right_level or left_level: product})
        return total

    def in_argument(self, size: Size) -> Term:
        """Return the size in terms of the argument alone."""
        total = Term(0, 0)
        for level, term in size.items():
            item = self.in_argument(self._iterable_sizes[level - 1]) if level else Term(0, 1)
            degree = max(total.degree, term.degree + item.degree)
            total = Term(degree, total.factor + term.factor * item.factor)
        return total

    def sum_over_loop(self, size: Size, level: int) -> Size:
        """Return the total size of what is made in all iterations of the loop at `level`, seen from outside of it."""
        iterable_size, count = self._iterable_sizes[level - 1], self._counts[level - 1]
        sums = [
            self.multiply(iterable_size, {0: term}) if of == level else self.multiply(count, {of: term})
            for of, term in size.items()
        ]
        return add(*sums)

    def sum_over_loops(self, size: Size, outermost: int = 0) -> Size:
        """Return the total size of what is made here in all iterations of the open loops above level `outermost`."""
        for level in range(self.depth, outermost, -1):
            size = self.sum_over_loop(size, level)
        return size


# ------------------------------------------------------------ values


@dataclass(frozen=True, slots=True)
class SizedValue:
    """A plain value that is not known, but no larger than `size`."""

    size: Size
    is_text: bool = False
    """True if it is certainly a text."""
    is_count: bool = False
    """True if it is a number that is itself no larger than `size`."""
    length: Size | None = None
    """A bound for the number of its items, if there is a better one than `size`."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A value that is known: a constant, a builtin, a function, a module."""

    value: Any


@dataclass(frozen=True, slots=True)
class ReadableFunction:
    """A function or lambda whose source is there."""

    definition: Definition
    variables: Mapping[str, AbstractValue]
    """Variables of the functions around it."""
    globals: Mapping[str, Any]
    defaults: tuple[Any, ...] = ()
    outer_names: frozenset[str] = frozenset()
    """Names that belong to the functions around it, whether they have a value yet or not."""


@dataclass(frozen=True, slots=True)
class Method:
    """A method of a plain value that has not been called yet."""

    receiver: AbstractValue | None
    """The object; None for a method that is taken from its class (`str.strip`)."""
    name: str


@dataclass(frozen=True, slots=True)
class SizedObject:
    """An object of a data class, of which nothing but its fields may be read."""

    size: Size
    """A bound for each of its fields, without its default value."""
    default_sizes: Mapping[str, int]
    """The sizes of the default values of the fields that may be read."""


AbstractValue = SizedValue | Constant | ReadableFunction | Method | DataClass | SizedObject
SMALL = SizedValue(constant_size(30))
"""A number, a truth value."""
REPR_FACTOR = 12
"""Characters that one character of a text may become where the text is quoted."""
_PLAIN = (str, int, float, bool, type(None), bytes)


def is_plain_constant(value: object) -> bool:
    return type(value) in _PLAIN or (type(value) is tuple and all(map(is_plain_constant, value)))


def _has_size(value: object) -> bool:
    """Return True for a plain constant, a class and a tuple of these."""
    parts = value if type(value) is tuple else (value,)
    return all(is_plain_constant(part) or isinstance(part, type) for part in parts)


def size_of(value: AbstractValue) -> Size:
    """Return the size of a plain value. Raise `Unbounded` for a function, a module, or an object of a data class."""
    if isinstance(value, SizedValue):
        return value.size
    if isinstance(value, Constant) and _has_size(value.value):
        return constant_size(size_of_constants([value.value]))
    raise Unbounded("a function, or an object of your own, is used as a value")


def length_of(value: AbstractValue) -> Size:
    """Return a bound for the number of items or characters of a plain value. Raise `Unbounded` for any other."""
    if isinstance(value, Constant) and isinstance(value.value, (str, bytes, tuple)):
        return constant_size(1 + len(value.value))
    length = value.length if isinstance(value, SizedValue) else None
    return size_of(value) if length is None else length


def printed_size(value: AbstractValue) -> Size:
    """Return the size of `str(value)`."""
    if isinstance(value, SizedValue) and value.is_text:
        return value.size
    if isinstance(value, Constant) and isinstance(value.value, str):
        return size_of(value)
    return scale(size_of(value), REPR_FACTOR)


def join_values(left: AbstractValue, right: AbstractValue) -> AbstractValue:
    """Return an abstract value that covers both, for two paths of control flow that meet."""
    if left == right:
        return left
    is_text = all(isinstance(value, SizedValue) and value.is_text for value in (left, right))
    length = maximum(length_of(left), length_of(right))
    return SizedValue(maximum(size_of(left), size_of(right)), is_text, length=length)


# ------------------------------------------------------------ machine


MAX_DEGREE, MAX_FACTOR = 2, 200_000
"""A function may take at most `MAX_FACTOR * n ** MAX_DEGREE` steps for an argument of size n."""
_MAX_NODES = 20_000
"""Expressions and statements that are interpreted for one function, with all that it calls."""


class Machine(ABC):
    """An abstract machine: it counts the steps of a function, and of what it calls."""

    def __init__(self) -> None:
        self.loops = Loops()
        self.cost = Term(0, 0)
        self._nodes_left = _MAX_NODES

    def spend(self, size: Size) -> None:
        """Count this many steps here. Raise `Unbounded` if these are too many."""
        self._add_cost(self.loops.in_argument(self.loops.sum_over_loops(size)))

    def tick(self) -> None:
        """Count one step here.

        In loops the step counts as often as the loops may run. Raise `Unbounded` if the code is longer than this
        analysis reads, or takes too many steps.
        """
        self._nodes_left -= 1
        if self._nodes_left < 0:
            raise Unbounded("it is long")
        self._add_cost(self.loops.iterations)

    def _add_cost(self, steps: Term) -> None:
        """Add steps to the bound of the whole function.

        Raise `Unbounded` once the bound grows with too high a power of the argument's size (`MAX_DEGREE`), or by too
        large a factor (`MAX_FACTOR`).
        """
        self.cost = Term(max(self.cost.degree, steps.degree), self.cost.factor + steps.factor)
        if self.cost.degree > MAX_DEGREE or self.cost.factor > MAX_FACTOR:
            raise Unbounded("it may take too many steps")

    def make(
        self, size: Size, *, is_text: bool = False, is_count: bool = False, length: Size | None = None
    ) -> SizedValue:
        """Return a value that is made here, and count the steps that making it takes.

        They are as many as the value is large, and one. Raise `Unbounded` if these are too many.
        """
        self.spend(add(constant_size(1), size))
        return SizedValue(size, is_text, is_count, length)

    def sum_over_items(self, items: AbstractValue, measure: Callable[[AbstractValue], Size]) -> Size:
        """Return the total of `measure(item)` over all items."""
        item_size = self.loops.enter(size_of(items), length_of(items))
        try:
            return self.loops.sum_over_loop(measure(SizedValue(item_size)), self.loops.depth)
        finally:
            self.loops.leave()

    @abstractmethod
    def call(
        self, func: ReadableFunction, args: Sequence[AbstractValue], kwargs: Mapping[str, AbstractValue]
    ) -> AbstractValue:
        """Return what a call of the function returns. Raise `Unbounded` if it has no bound."""
