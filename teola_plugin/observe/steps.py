"""Steps of the plain object itself, where it tells of them: supersteps of a graph, nodes, calls of tools."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

Fact = str | int | float | bool
Facts = tuple[tuple[str, Fact], ...]
"""(key, value) pairs."""


@dataclass(frozen=True, slots=True)
class Step:
    """One of them, from its begin to its end. Times as in a `Span`."""

    id: int
    """Within its query, from 1, in the order in which they began."""
    kind: str
    """`superstep`, `node`, `tool` or another word."""
    name: str
    began: float
    ended: float | None = None
    """None where it had not ended when its query did."""
    parent: int = 0
    """Id of the step around it; 0 for none."""
    outcome: str = "done"
    """done, failed, or another word of who told of it."""
    facts: Facts = ()

    @property
    def seconds(self) -> float:
        """0 when it did not end."""
        return 0.0 if self.ended is None else max(0.0, self.ended - self.began)

    @property
    def label(self) -> str:
        """The name with the kind in front of it."""
        return f"{self.kind} {self.name}"

    @property
    def early(self) -> bool:
        """True if it ran before the original reached it, as a read-only tool may."""
        return dict(self.facts).get("early") is True


def nested(steps: Iterable[Step]) -> tuple[tuple[int, Step], ...]:
    """Each with how many steps are around it; those inside of one come after it, in the order in which they began."""
    found = sorted(steps, key=lambda step: step.id)
    known = {step.id for step in found}
    inside: dict[int, list[Step]] = {}
    for step in found:
        around = step.parent if step.parent in known and step.parent < step.id else 0
        inside.setdefault(around, []).append(step)
    order: list[tuple[int, Step]] = []
    todo = [(0, step) for step in reversed(inside.get(0, ()))]
    while todo:
        level, step = todo.pop()
        order.append((level, step))
        todo += [(level + 1, inner) for inner in reversed(inside.get(step.id, ()))]
    return tuple(order)


class OpenStep:
    """A step under way: what its `step_began` gave, for its `step_ended`."""

    __slots__ = ("began", "ended", "facts", "id", "kind", "log", "name", "outcome", "parent")

    def __init__(
        self, log: StepLog, id: int, kind: str, name: str, began: float, parent: int, facts: Mapping[str, object]
    ) -> None:
        self.log, self.id, self.kind, self.name, self.began, self.parent = log, id, kind, name, began, parent
        self.ended: float | None = None
        self.outcome = ""
        self.facts = facts

    def told(self) -> Step:
        """Return the step as it is now."""
        outcome = self.outcome or ("done" if self.ended is not None else "cancelled")
        facts = tuple((key, _fact(value)) for key, value in self.facts.items())
        return Step(self.id, self.kind, self.name, self.began, self.ended, self.parent, outcome, facts)


def _fact(value: object) -> Fact:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return value if isinstance(value, str | int | float | bool) else str(value)


MOST_STEPS = 1024
"""Steps of one query that are kept."""


class StepLog:
    """The steps of one query. May be told of them from any thread; of more than `most`, the first half and the latest
    are kept."""

    def __init__(self, most: int = MOST_STEPS) -> None:
        self._half = max(1, most // 2)
        self._first: list[OpenStep] = []
        self._latest: deque[OpenStep] = deque(maxlen=self._half)
        self._count = 0
        self._lock = threading.Lock()

    def id_of(self, step: OpenStep | None) -> int:
        """0 for none, and for that of another query."""
        return step.id if step is not None and step.log is self else 0

    def began(self, kind: str, name: str, at: float, parent: OpenStep | None, facts: Mapping[str, object]) -> OpenStep:
        """A step begins, inside of `parent` if there is one."""
        with self._lock:
            self._count += 1
            step = OpenStep(self, self._count, kind, name, at, self.id_of(parent), facts)
            (self._first if len(self._first) < self._half else self._latest).append(step)
        return step

    @staticmethod
    def ended(step: OpenStep, at: float, outcome: str, facts: Mapping[str, object]) -> None:
        """Record the end of a step, with facts that are known at its end. Only the first call counts."""
        if step.ended is None:
            step.facts = {**step.facts, **facts}
            step.outcome, step.ended = outcome, at

    def told(self) -> tuple[Step, ...]:
        """Return the steps that are kept, in the order in which they began."""
        with self._lock:
            return tuple(step.told() for step in (*self._first, *self._latest))

    @property
    def left_out(self) -> int:
        """Return the number of steps that are not kept."""
        return self._count - len(self._first) - len(self._latest)
