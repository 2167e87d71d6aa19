"""How large a value can get: polynomials in the size of a function's argument.

The size of a value is its characters, digits and items, counted wherever they are held. Inside a loop a size may be
told in terms of the loop's item. So what is made of each item alone is known to be no larger, all together, than what
is made of the whole: `[text.strip() for text in texts]` is linear, `[text + question for text in texts]` is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Term(NamedTuple):
    """`factor * n ** degree`, times the size of an item where it stands for one."""

    degree: int
    factor: int


Size = Mapping[int, Term]
"""A sum of terms: under 0 the one of the argument alone, under k the one with the item of the k-th open loop."""

ARGUMENT: Size = {0: Term(1, 1)}


def constant(size: int) -> Size:
    return {0: Term(0, size)}


def item(level: int) -> Size:
    """The item of that loop."""
    return {level: Term(0, 1)}


def plus(*sizes: Size) -> Size:
    made: dict[int, Term] = {}
    for size in sizes:
        for level, term in size.items():
            old = made.get(level, Term(0, 0))
            made[level] = Term(max(old.degree, term.degree), old.factor + term.factor)
    return made


def either(one: Size, other: Size) -> Size:
    """Of two ways, whichever is taken."""
    made = dict(one)
    for level, term in other.items():
        old = made.get(level, Term(0, 0))
        made[level] = Term(max(old.degree, term.degree), max(old.factor, term.factor))
    return made


def scaled(size: Size, factor: int) -> Size:
    return {level: Term(term.degree, term.factor * factor) for level, term in size.items()}


class Loops:
    """The open loops, outermost first: what each runs over."""

    def __init__(self) -> None:
        self._over: list[Size] = []
        self._rounds = [Term(0, 1)]

    @property
    def depth(self) -> int:
        return len(self._over)

    def enter(self, over: Size) -> Size:
        """A loop over something of that size begins; the size of its item."""
        self._over.append(over)
        self._rounds.append(self.whole(self.in_all_rounds(constant(1))))
        return item(self.depth)

    @property
    def rounds(self) -> Term:
        """How often the place where the loops stand is come to."""
        return self._rounds[-1]

    def leave(self) -> Size:
        """The innermost loop ends."""
        self._rounds.pop()
        return self._over.pop()

    def times(self, one: Size, other: Size) -> Size:
        made: Size = {}
        for a, term in one.items():
            for b, term2 in other.items():
                product = Term(term.degree + term2.degree, term.factor * term2.factor)
                if a and b:  # two items: the one is no larger than all that its loop runs over
                    most = self.whole({a: Term(0, 1)})
                    product = Term(product.degree + most.degree, product.factor * most.factor)
                made = plus(made, {b or a: product})
        return made

    def whole(self, size: Size) -> Term:
        """The size in terms of the argument alone."""
        total = Term(0, 0)
        for level, term in size.items():
            most = self.whole(self._over[level - 1]) if level else Term(0, 1)
            degree = max(total.degree, term.degree + most.degree)
            total = Term(degree, total.factor + term.factor * most.factor)
        return total

    def collected(self, size: Size, level: int) -> Size:
        """What is made in each round of that loop, all together, seen from outside of it."""
        return self._outside(size, level, every_round=True)

    def outlasting(self, size: Size, level: int) -> Size:
        """What is made in one round of that loop, seen from outside of it."""
        return self._outside(size, level, every_round=False)

    def _outside(self, size: Size, level: int, *, every_round: bool) -> Size:
        over = self._over[level - 1]
        made: list[Size] = []
        for at, term in size.items():
            own = at == level
            made.append(self.times(over, {0 if own else at: term}) if own or every_round else {at: term})
        return plus(*made)

    def in_all_rounds(self, size: Size, down_to: int = 0) -> Size:
        """What is made where the loops stand, all together, seen from outside of those above `down_to`."""
        for level in range(self.depth, down_to, -1):
            size = self.collected(size, level)
        return size


def measured(values: Sequence[object]) -> int:
    """The size of plain values, as they are."""
    return sum(map(_measured, values))


def _measured(value: object) -> int:
    if isinstance(value, (str, bytes)):
        return 1 + len(value)
    if isinstance(value, (tuple, frozenset)):
        return 1 + sum(map(_measured, value))
    return 1 + value.bit_length() if isinstance(value, int) else 30
