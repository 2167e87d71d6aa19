"""Steps of the original, as its framework reports them, and the waits of its calls.

A step is a superstep of a graph, a node, or a call of a tool. A wait lasts from the time a call of the original is made
to the time it has its values.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Fact = str | int | float | bool
Facts = tuple[tuple[str, Fact], ...]
"""(key, value) pairs."""


@dataclass(frozen=True, slots=True)
class Step:
    """A step of the original, from its beginning to its end. Times as in a `Span`."""

    id: int
    """Number within its query, from 1, in the order in which steps began."""
    kind: str
    """`superstep`, `node`, `tool` or another word."""
    name: str
    began: float
    ended: float | None = None
    """None if it had not ended when its query did."""
    parent: int = 0
    """Id of the step around it; 0 for none."""
    outcome: str = "done"
    """done, failed, or another word of the reporter."""
    facts: Facts = ()

    @property
    def seconds(self) -> float:
        """The time it took; 0 if it did not end."""
        return 0.0 if self.ended is None else max(0.0, self.ended - self.began)

    @property
    def label(self) -> str:
        """The name with the kind in front of it."""
        return f"{self.kind} {self.name}"

    @property
    def is_prefetched(self) -> bool:
        """True if it ran before the original reached it, as a read-only tool may."""
        return dict(self.facts).get("early") is True


def nested(steps: Iterable[Step]) -> tuple[tuple[int, Step], ...]:
    """Return (nesting level, step) for each step, in the order in which they began, but inner ones after outer ones."""
    ordered = sorted(steps, key=lambda step: step.id)
    ids = {step.id for step in ordered}
    inner_steps: dict[int, list[Step]] = {}
    for step in ordered:
        outer = step.parent if step.parent in ids and step.parent < step.id else 0
        inner_steps.setdefault(outer, []).append(step)
    order: list[tuple[int, Step]] = []
    stack = [(0, step) for step in reversed(inner_steps.get(0, ()))]
    while stack:
        level, step = stack.pop()
        order.append((level, step))
        stack += [(level + 1, inner) for inner in reversed(inner_steps.get(step.id, ()))]
    return tuple(order)


class OpenStep:
    """A step under way: the result of `step_began`, and the argument of `step_ended`."""

    __slots__ = ("began", "ended_at", "facts", "id", "kind", "log", "name", "outcome", "parent")

    def __init__(
        self, log: StepLog, id: int, kind: str, name: str, began: float, parent: int, facts: Mapping[str, object]
    ) -> None:
        self.log, self.id, self.kind, self.name, self.began, self.parent = log, id, kind, name, began, parent
        self.ended_at: float | None = None
        self.outcome = ""
        self.facts = facts

    def snapshot(self) -> Step:
        """Return the step as it is now.

        Without an outcome it counts as `done` if it has ended, else as `cancelled`.
        """
        outcome = self.outcome or ("done" if self.ended_at is not None else "cancelled")
        facts = tuple((key, _fact(value)) for key, value in self.facts.items())
        return Step(self.id, self.kind, self.name, self.began, self.ended_at, self.parent, outcome, facts)


def _fact(value: object) -> Fact:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return value if isinstance(value, str | int | float | bool) else str(value)


MAX_STEPS = 1024
"""Steps of one query that are kept."""


class StepLog:
    """The steps of one query, written from any thread.

    If there are more than `max_steps`, the first half of that number is kept, and the latest.
    """

    def __init__(self, max_steps: int = MAX_STEPS) -> None:
        """Create an empty log that keeps at most `max_steps` steps: half of them the first ones, half the latest."""
        self._half = max(1, max_steps // 2)
        self._first: list[OpenStep] = []
        self._latest: deque[OpenStep] = deque(maxlen=self._half)
        self._count = 0
        self._lock = threading.Lock()

    def id_of(self, step: OpenStep | None) -> int:
        """Return the id of a step; 0 for None, and for a step of another query."""
        return step.id if step is not None and step.log is self else 0

    def begin(self, kind: str, name: str, at: float, parent: OpenStep | None, facts: Mapping[str, object]) -> OpenStep:
        """Record that a step begins, inside `parent` if there is one."""
        with self._lock:
            self._count += 1
            step = OpenStep(self, self._count, kind, name, at, self.id_of(parent), facts)
            (self._first if len(self._first) < self._half else self._latest).append(step)
        return step

    @staticmethod
    def end(step: OpenStep, at: float, outcome: str, facts: Mapping[str, object]) -> None:
        """Record the end of a step, with facts that are known at its end. Only the first call counts."""
        if step.ended_at is None:
            step.facts = {**step.facts, **facts}
            step.outcome, step.ended_at = outcome, at

    def steps(self) -> tuple[Step, ...]:
        """Return the steps that are kept, in the order in which they began.

        Of a long query, the log keeps the first and the latest ones, `max_steps` in all. May be called from any thread.
        """
        with self._lock:
            return tuple(step.snapshot() for step in (*self._first, *self._latest))

    @property
    def left_out(self) -> int:
        """Return the number of steps that are not kept."""
        return self._count - len(self._first) - len(self._latest)


@dataclass(frozen=True, slots=True)
class Wait:
    """One call of the original. Times as in a `Span`."""

    began: float
    answered: float
    """Time at which it had its values or raised an error; the end of the query for a call that never ended."""
    spans: tuple[str, ...] = ()
    """The primitives that it waited for, by the names of their spans."""
    step: int = 0
    """Id of the step that made the call; 0 if that is not known."""
    within: str = ""
    """The span of the provider call in which it was made, if any."""


PROVIDER = "wrapped"
"""Name of the engine that makes provider calls."""


@dataclass(slots=True, eq=False)
class TracedCall:
    """A provider call (of the user's own model, retriever or tool) as the trace has it. Written from any thread."""

    name: str
    kind: str
    """Kind of its `Span`."""
    engine: str
    began: float | None = None
    ended_at: float | None = None
    requests: list[str] = field(default_factory=list)
    """Ids of the requests with which plans have prefetched it."""
    used: bool = False
    """True once the original has made or claimed it."""
    is_requested_by: Callable[[Any], bool] | None = None
    """Returns True if the payload of a request is for this very call: a plan's request may not have come to it by the
    end."""


class OpenWait:
    """A call under way. The spans that it waits for are known at its end, since failed requests are made again."""

    __slots__ = ("answered", "began", "provider_call", "spans", "step", "within")

    def __init__(self, began: float, step: int) -> None:
        self.began, self.step = began, step
        self.answered: float | None = None
        self.spans: tuple[str, ...] = ()
        self.provider_call: TracedCall | None = None
        """The call itself, if it is a provider call."""
        self.within: TracedCall | None = None
        """The provider call in which it is made."""


MAX_WAITS = 1024
"""Calls of one query that are kept."""


class WaitLog:
    """The calls of one query, written from any thread. If there are more than `max_waits`, the latest are kept."""

    def __init__(self, max_waits: int = MAX_WAITS) -> None:
        """Create an empty log that keeps the latest `max_waits` waits, and as many of the latest provider calls."""
        self._waits: deque[OpenWait] = deque(maxlen=max_waits)
        self._provider_calls: deque[TracedCall] = deque(maxlen=max_waits)
        self._lock = threading.Lock()

    def add_provider_call(self, call: TracedCall) -> None:
        """Add a provider call that the original or a plan requests."""
        with self._lock:
            self._provider_calls.append(call)

    @property
    def provider_calls(self) -> tuple[TracedCall, ...]:
        """The provider calls that are kept, in the order in which they were requested."""
        with self._lock:
            return tuple(self._provider_calls)

    def begin(self, at: float, step: int = 0) -> OpenWait:
        """Note that the original makes a call, and waits from now on.

        Args:
            at: Seconds on the runtime's clock.
            step: The id of the original's step that makes the call; 0 if there is none.
        """
        wait = OpenWait(at, step)
        with self._lock:
            self._waits.append(wait)
        return wait

    def waits(self) -> tuple[OpenWait, ...]:
        """Return the calls that are kept, in the order in which they began."""
        with self._lock:
            return tuple(self._waits)
