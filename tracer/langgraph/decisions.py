"""Which plan of a node holds for a state: one for each way that conditions on the state have gone.

A plan is made for the answers to the conditions that were asked while it was made, in their order. Whoever comes with
another state goes the same way as far as its answers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from teola_plugin.tracer.functions.pure_expressions import Condition, Decide

T = TypeVar("T")
Make = Callable[[Decide | None], T]
"""Makes a plan; without `Decide` both ways of each condition are open."""
MOST = 16
"""Plans for one node; for a state beyond, that in which nothing is decided."""
BEFORE = 4
"""Of them, how many are made before there is a state."""


@dataclass(slots=True)
class _Fork(Generic[T]):
    """A condition that was asked, and where each answer leads; without one, the plan."""

    condition: Condition | None = None
    plan: T | None = None
    answers: dict[bool | None, _Fork[T]] = field(default_factory=dict)


class Decided(Generic[T]):
    """Plans of one node, by the answers of conditions on the state."""

    def __init__(self, make: Make[T]) -> None:
        self._make = make
        self._first: _Fork[T] | None = None
        self._open: T | None = None
        self._count = 0

    def plan(self, value: Any) -> T | None:
        """For a template's input. Makes it when it is wanted first; raises what `make` raises."""
        fork = self._known(lambda condition: condition.holds(value))
        if fork is not None:
            return fork.plan
        return self._made(value) if self._count < MOST else self._undecided()

    def made(self, value: Any) -> tuple[T | None, bool]:
        """What there is already for this input, if only the plan in which nothing is decided; and whether `plan` would
        give another."""
        fork = self._known(lambda condition: condition.holds(value))
        if fork is not None:
            return fork.plan, False
        if self._count >= MOST and self._open is not None:
            return self._open, False
        undecided = self._known(lambda condition: None)
        return (undecided.plan if undecided is not None else self._open), True

    def before(self) -> None:
        """Makes the plan in which nothing is decided, and some of the others: no state that comes has to wait for
        them. Raises what `make` raises."""
        if self._first is None:
            self.plan(None)
        asks = self._first is not None and self._first.condition is not None
        todo: list[tuple[bool | None, ...]] = [()] if asks else []
        while todo and self._count <= BEFORE:
            given = todo.pop(0)
            _, answers = self._asking(partial(_answer, given))
            todo += [(*answers[:number], False) for number in range(len(given), len(answers))]

    @property
    def empty(self) -> bool:
        """Whether it is known that there is no plan, whatever the state."""
        fork = self._first
        return fork is not None and fork.condition is None and fork.plan is None

    def _known(self, answer: Callable[[Condition], bool | None]) -> _Fork[T] | None:
        """Where these answers lead, as far as that is known."""
        fork = self._first
        while fork is not None and fork.condition is not None:
            fork = fork.answers.get(answer(fork.condition))
        return fork

    def _made(self, value: Any) -> T:
        return self._asking(lambda condition, _: condition.holds(value))[0]

    def _asking(self, answer: Callable[[Condition, int], bool | None]) -> tuple[T, list[bool | None]]:
        """A plan, and the answers that it is made for; `answer` gets each condition that is asked, and its number."""
        asked: list[tuple[Condition, bool | None]] = []

        def decide(condition: Condition) -> bool | None:
            asked.append((condition, answer(condition, len(asked))))
            return asked[-1][1]

        made = self._make(decide)
        self._count += 1
        self._keep(asked, made)
        return made, [one for _, one in asked]

    def _keep(self, asked: Sequence[tuple[Condition, bool | None]], made: T) -> None:
        """Whole at once: other threads look meanwhile."""
        if self._first is None:
            self._first = _way(asked, made)
            return
        fork = self._first
        for place, (_, answer) in enumerate(asked):
            following = fork.answers.get(answer)
            if following is None:
                fork.answers[answer] = _way(asked[place + 1 :], made)
                return
            fork = following

    def _undecided(self) -> T:
        if self._open is None:
            self._open = self._make(None)
        return self._open


def _way(asked: Sequence[tuple[Condition, bool | None]], made: T) -> _Fork[T]:
    """From condition to condition, to a plan."""
    fork = _Fork(plan=made)
    for condition, answer in reversed(asked):
        fork = _Fork(condition, answers={answer: fork})
    return fork


def _answer(given: Sequence[bool | None], condition: Condition, number: int) -> bool | None:
    """The answers that are given; from then on, that the condition holds."""
    return given[number] if number < len(given) else True
