"""The critical path of a query: for each moment, what its answer was waiting for.

Walked from the end. The answer comes from code of the plain object; that code went on when a call of it was answered;
the call was answered when a primitive ended; the primitive began when another ended, or when the code of the plain
object came to its place. So back to the begin, without a gap: the seconds of the path are those of the query.

Code of the plain object that waits for several calls at once tells nobody which of them it needs next: taken is the one
that was answered last. Steps (nodes, tools) are known to begin and to end, and what they call is theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teola_plugin.observe.steps import Step
from teola_plugin.observe.waits import Wait

if TYPE_CHECKING:
    from teola_plugin.observe.spans import QueryTrace, Span

CODE = "CODE"
"""The kind of a span that stands for code of the plain object."""
YOUR_CODE = "your code"
"""Its name where no step tells of a better one."""


@dataclass(frozen=True, slots=True)
class PathStep:
    """One span of the critical path, and how long it held up the query. All in seconds, none overlaps another.

    Code of the plain object is a span of kind `CODE`, named after the node, the tool or the function that it is of.
    """

    span: Span
    idle: float
    """Before it was queued, while nothing of the path ran: what it is asked with was put together."""
    waited: float
    """In the engine's queue."""
    seconds: float
    """Running."""

    @property
    def total(self) -> float:
        return self.idle + self.waited + self.seconds

    @property
    def is_code(self) -> bool:
        """True if the original's own code ran, and no engine was waited for."""
        return self.span.kind == CODE or (self.span.kind == "OPAQUE" and not self.span.engine)


def critical_path(trace: QueryTrace) -> tuple[PathStep, ...]:
    """In order, from the begin of the query to its end."""
    return _Walk(trace).path()


@dataclass(slots=True)
class _Held:
    """A step of the path as it is found."""

    span: Span
    idle: float = 0.0
    waited: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class _Around:
    """A step of the plain object, a call of the user's own object, or the query itself: what is directly in it."""

    step: Step | None
    began: float
    waits: list[Wait] = field(default_factory=list)
    inner: list[Step] = field(default_factory=list)
    code: Span | None = None
    """What its own code is shown as, where that is a span."""


class _Walk:
    """Back through one trace. `_at` is the moment that it has come to; what is later is explained."""

    def __init__(self, trace: QueryTrace) -> None:
        self._trace = trace
        self._at = max(trace.started, trace.ended)
        self._found: list[_Held] = []
        self._spans = trace.finished()
        self._code = [
            s for s in trace.spans if s.done is not None and s.kind == "OPAQUE" and not s.engine and s.started is None
        ]
        self._seen: set[int] = set()
        """What was walked through, by identity: nothing is twice, whatever a trace says."""
        self._within: dict[str, list[Wait]] = {}
        """Calls of engines that calls of the user's own objects have made, by the names of their spans."""
        if trace.waits is not None:
            self._around = self._nested(trace.waits)
        else:
            self._around = {0: _Around(None, trace.started, self._only_graph())}

    def path(self) -> tuple[PathStep, ...]:
        if self._trace.waits is None and not self._spans and not self._trace.steps:
            return ()
        self._plain(self._around[0])
        return tuple(PathStep(one.span, one.idle, one.waited, one.seconds) for one in reversed(self._found))

    # ------------------------------------------------------------ what is known

    def _only_graph(self) -> list[Wait]:
        """Return one wait for all spans, if no original reported its calls: the span that ended last counts."""
        used = [s for s in self._spans.values() if not s.unused] or list(self._spans.values())
        ended = [s.done for s in used if s.done is not None]
        return [Wait(self._trace.started, max(ended), tuple(s.primitive for s in used))] if ended else []

    def _nested(self, waits: Iterable[Wait]) -> dict[int, _Around]:
        found = {0: _Around(None, self._trace.started)}
        for step in self._trace.steps:
            found[step.id] = _Around(step, step.began)
        for step in self._trace.steps:
            around = 0 if step.parent >= step.id or step.parent not in found else step.parent
            if not step.early:
                found[around].inner.append(step)
        for early in (step for step in self._trace.steps if step.early and step.outcome == "claimed"):
            place = self._place_of(early)
            if place is not None:
                found[place.id].inner.append(early)
        for wait in waits:
            if wait.within in self._spans:
                self._within.setdefault(wait.within, []).append(wait)
                continue
            found[wait.step if wait.step in found else 0].waits.append(wait)
        return found

    def _place_of(self, early: Step) -> Step | None:
        """The call of a tool that waited for its function, which ran early."""
        end = early.ended if early.ended is not None else self._trace.ended
        places = (s for s in self._trace.steps if s.kind == early.kind and s.name == early.name and not s.early)
        return next((s for s in places if s.began < end and (s.ended is None or end <= s.ended)), None)

    # ------------------------------------------------------------ code of the plain object

    def _plain(self, around: _Around, *, jumped: bool = False) -> None:
        """Through the code of a step, and all that it waited for, to its begin, or to what began before it. `jumped`:
        now is a moment in the middle of it, at which it let something begin."""
        while self._at > around.began:
            last = self._last(around, jumped)
            if last is None:
                self._ran(around, around.began)
                return
            self._seen.add(id(last))
            came_to = self._at
            self._ran(around, _end(last, self._trace))
            came = last.asked if isinstance(last, Wait) else last.began
            if isinstance(last, Wait):
                self._answered(around, last)
            else:
                self._plain(self._around[last.id], jumped=_end(last, self._trace) > came_to)
            jumped |= self._at < came

    def _last(self, around: _Around, jumped: bool) -> Wait | Step | None:
        """Return the wait or step that ended last before `_at`. After a jump, one that was running then counts, too."""

        def known(one: Wait | Step) -> bool:
            under_way = jumped and _begin(one) < self._at
            return id(one) not in self._seen and (under_way or _end(one, self._trace) <= self._at)

        both: list[Wait | Step] = [*around.waits, *around.inner]
        found = [one for one in both if known(one)]
        return max(found, key=lambda one: (min(self._at, _end(one, self._trace)), _begin(one)), default=None)

    def _answered(self, around: _Around, wait: Wait) -> None:
        """Through what a call waited for; nothing, if that was there before."""
        named = [self._spans[name] for name in wait.spans if name in self._spans]
        span = max((s for s in named if s.begin < self._at), key=lambda s: (s.done or 0.0, -s.depth), default=None)
        if span is None or span.done is None or span.done <= wait.asked:
            self._ran(around, wait.asked)
            return
        self._ran(around, min(span.done, self._at))
        self._engines(span, wait.asked)

    def _ran(self, around: _Around, since: float) -> None:
        """Code of that step ran since then; functions that the plan knows by name are named."""
        since = max(since, self._trace.started)  # a call may have been on its way before its query was heard of
        while self._at > since:
            inside = [s for s in self._code if s.queued < self._at and s.done is not None and s.done > since]
            last = max(inside, key=lambda s: s.done or 0.0, default=None)
            if last is None or last.done is None:
                self._hold(self._code_of(around), since)
            elif last.done < self._at:
                self._hold(self._code_of(around), last.done)
            else:
                self._hold(last, max(since, last.queued))

    def _code_of(self, around: _Around) -> Span:
        from teola_plugin.observe.spans import Span

        trace, step = self._trace, around.step
        if around.code is not None:
            return around.code
        name = YOUR_CODE if step is None else f"{step.label}{' (early)' if step.early else ''}"
        began = trace.started if step is None else step.began
        ended = trace.ended if step is None or step.ended is None else step.ended
        return Span(
            trace.query_id, trace.app, name, CODE, began, began, None, ended, step=0 if step is None else step.id
        )

    def _hold(self, span: Span, since: float) -> None:
        """Add the time from `since` to `_at` to the span, and move `_at` back to `since`."""
        since = max(self._trace.started, since)
        last = self._found[-1] if self._found else None
        if last is None or (last.span.primitive, last.span.kind) != (span.primitive, span.kind):
            self._found.append(_Held(span))
        self._found[-1].seconds += max(0.0, self._at - since)
        self._at = min(self._at, since)

    # ------------------------------------------------------------ primitives

    def _engines(self, span: Span | None, asked: float) -> None:
        """Back along what let each primitive begin, to where the plain object's code did, which `asked` for the last.
        What was queued after that, and did not wait for anything else then, is what it asked for."""
        while span is not None and id(span) not in self._seen:
            if span in self._code:  # the plain object ran it: its own code goes on from there
                self._at = min(self._at, max(self._trace.started, span.done or self._at))
                return
            self._seen.add(id(span))
            inside = [wait for name in (span.primitive, *span.also) for wait in self._within.get(name, ())]
            if inside:
                self._plain(_Around(None, span.begin, inside, code=span))
            if not self._found or self._found[-1].span is not span:
                self._found.append(_Held(span))
            held = self._found[-1]
            held.seconds += self._back_to(span.begin)
            held.waited = self._back_to(span.queued)
            before = self._before(span)
            if before is not None and (before.done or asked) < asked <= span.queued:
                held.idle = self._back_to(asked)
                return
            if before is not None:
                held.idle = self._back_to(min(self._at, before.done or self._at))
            span = before

    def _back_to(self, since: float) -> float:
        """The seconds from then until now."""
        since = min(self._at, max(self._trace.started, since))
        seconds, self._at = self._at - since, since
        return seconds

    def _before(self, span: Span) -> Span | None:
        """Return the span that let this one begin; None if the original's code did.

        It is the one that the scheduler names, else the last one that this one waited for. A parent that ends later
        than the start of this span has streamed to it.
        """
        told = self._spans.get(span.cause)
        if told is not None and told is not span and _ran(told) and told.begin <= span.queued:
            return told
        parents = [self._spans[p] for p in span.parents if p in self._spans]
        ready = [p for p in parents if _ran(p) and p.begin <= span.queued and p is not span]
        ended = [p for p in ready if (p.done or 0.0) <= span.queued]
        return max(ended or ready, key=lambda p: p.done or 0.0, default=None)


def _ran(span: Span) -> bool:
    """Return True unless the span never ran (a warm-up that waited in vain). Control primitives have no start time."""
    return span.started is not None or not (span.engine or span.unused)


def _begin(one: Wait | Step) -> float:
    return one.asked if isinstance(one, Wait) else one.began


def _end(one: Wait | Step, trace: QueryTrace) -> float:
    if isinstance(one, Wait):
        return one.answered
    return trace.ended if one.ended is None else one.ended
