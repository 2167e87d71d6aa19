"""The critical path of a query: for each moment, what its answer was waiting for.

It is found backwards from the end. The answer comes from code of the original; that code went on when its call was
answered; the call was answered when a primitive ended; the primitive began when another one ended, or when the original
came to its place. So back to the beginning, without a gap: the seconds of the path add up to those of the query.

If code of the original waits for several calls at once, nobody knows which of them it needs next: the one that was
answered last counts. Steps (nodes, tools) have a known beginning and end, and the calls that they make are theirs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from teola_plugin.observe.steps import Step, Wait

if TYPE_CHECKING:
    from teola_plugin.observe.spans import QueryTrace, Span

CODE = "CODE"
"""Kind of a span that stands for code of the original."""
YOUR_CODE = "your code"
"""Name of such a span outside all steps."""


@dataclass(frozen=True, slots=True)
class PathStep:
    """One span of the critical path, and how long it held up the query, in seconds. No two of them overlap.

    Code of the original is a span of kind `CODE`, named after its node, tool or function.
    """

    span: Span
    idle: float
    """Time before it was queued, while nothing of the path ran and its inputs were put together."""
    waited: float
    """Time in the engine's queue."""
    seconds: float
    """Time it ran."""

    @property
    def total(self) -> float:
        """The sum of its times."""
        return self.idle + self.waited + self.seconds

    @property
    def is_code(self) -> bool:
        """True if the original's own code ran, and no engine was waited for."""
        return self.span.kind == CODE or (self.span.kind == "OPAQUE" and not self.span.engine)


def critical_path(trace: QueryTrace) -> tuple[PathStep, ...]:
    """Return the critical path in order, from the beginning of the query to its end."""
    return _PathFinder(trace).path()


@dataclass(slots=True)
class _OpenPathStep:
    """A step of the path that is still being found."""

    span: Span
    idle: float = 0.0
    waited: float = 0.0
    seconds: float = 0.0


@dataclass(slots=True)
class _CodeScope:
    """A step of the original, a provider call, or the query itself, with the waits and steps directly in it."""

    step: Step | None
    began: float
    waits: list[Wait] = field(default_factory=list)
    inner: list[Step] = field(default_factory=list)
    code: Span | None = None
    """The span as which its own code is shown, if there is one."""


class _PathFinder:
    """A walk back through one trace. `_at` is the moment that it has reached: everything later is explained."""

    def __init__(self, trace: QueryTrace) -> None:
        self._trace = trace
        self._at = max(trace.started, trace.ended)
        self._path: list[_OpenPathStep] = []
        self._spans = trace.finished()
        self._code = [
            s for s in trace.spans if s.done is not None and s.kind == "OPAQUE" and not s.engine and s.started is None
        ]
        self._seen: set[int] = set()
        """Identities of the waits, steps and spans that are done, so that none is walked through twice."""
        self._inner_waits: dict[str, list[Wait]] = {}
        """Calls of engines that provider calls have made, by the names of the provider calls' spans."""
        if trace.waits is not None:
            self._scopes = self._nest(trace.waits)
        else:
            self._scopes = {0: _CodeScope(None, trace.started, self._wait_for_graph())}

    def path(self) -> tuple[PathStep, ...]:
        """Walk back from the end of the query, and return the steps of the path from its beginning on.

        Return () if nothing was recorded: no waits, no spans and no steps.
        """
        if self._trace.waits is None and not self._spans and not self._trace.steps:
            return ()
        self._walk_code(self._scopes[0])
        return tuple(PathStep(step.span, step.idle, step.waited, step.seconds) for step in reversed(self._path))

    # ------------------------------------------------------------ scopes

    def _wait_for_graph(self) -> list[Wait]:
        """Return one wait for all spans, if no original reported its calls: the span that ended last counts."""
        used = [s for s in self._spans.values() if not s.unused] or list(self._spans.values())
        ends = [s.done for s in used if s.done is not None]
        return [Wait(self._trace.started, max(ends), tuple(s.primitive for s in used))] if ends else []

    def _nest(self, waits: Iterable[Wait]) -> dict[int, _CodeScope]:
        """Return the scope of the query (0) and those of the steps by id, with the waits and steps in each."""
        scopes = {0: _CodeScope(None, self._trace.started)}
        for step in self._trace.steps:
            scopes[step.id] = _CodeScope(step, step.began)
        for step in self._trace.steps:
            outer = 0 if step.parent >= step.id or step.parent not in scopes else step.parent
            if not step.is_prefetched:
                scopes[outer].inner.append(step)
        for prefetched in (step for step in self._trace.steps if step.is_prefetched and step.outcome == "claimed"):
            claimer = self._claimer_of(prefetched)
            if claimer is not None:
                scopes[claimer.id].inner.append(prefetched)
        for wait in waits:
            if wait.within in self._spans:
                self._inner_waits.setdefault(wait.within, []).append(wait)
                continue
            scopes[wait.step if wait.step in scopes else 0].waits.append(wait)
        return scopes

    def _claimer_of(self, prefetched: Step) -> Step | None:
        """Return the call of a tool that waited for the prefetched run of its function.

        Return None if no call of that tool was open when the prefetched run ended.
        """
        end = prefetched.ended if prefetched.ended is not None else self._trace.ended
        kind, name = prefetched.kind, prefetched.name
        calls = (s for s in self._trace.steps if s.kind == kind and s.name == name and not s.is_prefetched)
        return next((s for s in calls if s.began < end and (s.ended is None or end <= s.ended)), None)

    # ------------------------------------------------------------ code of the original

    def _walk_code(self, scope: _CodeScope, *, is_inside: bool = False) -> None:
        """Walk through the code of a scope, and everything that it waited for, to its beginning or before it.

        `is_inside`: `_at` is a moment in the middle of the scope, at which it let something begin.
        """
        while self._at > scope.began:
            last = self._last(scope, is_inside)
            if last is None:
                self._add_code(scope, scope.began)
                return
            self._seen.add(id(last))
            before = self._at
            self._add_code(scope, _end(last, self._trace))
            if isinstance(last, Wait):
                self._walk_wait(scope, last)
            else:
                self._walk_code(self._scopes[last.id], is_inside=_end(last, self._trace) > before)
            is_inside |= self._at < last.began

    def _last(self, scope: _CodeScope, is_inside: bool) -> Wait | Step | None:
        """Return the wait or inner step of a scope that ended last before `_at`; None if none is left.

        `_walk_code` goes back from one to the next. `is_inside`: `_at` is a moment in the middle of the scope, at
        which it let something begin. A wait or step that was still running then counts, too.
        """

        def is_candidate(item: Wait | Step) -> bool:
            is_running = is_inside and item.began < self._at
            return id(item) not in self._seen and (is_running or _end(item, self._trace) <= self._at)

        items: list[Wait | Step] = [*scope.waits, *scope.inner]
        candidates = filter(is_candidate, items)
        return max(candidates, key=lambda item: (min(self._at, _end(item, self._trace)), item.began), default=None)

    def _walk_wait(self, scope: _CodeScope, wait: Wait) -> None:
        """Walk through the primitives that a call waited for; through none, if its values were there before."""
        spans = [self._spans[name] for name in wait.spans if name in self._spans]
        span = max((s for s in spans if s.begin < self._at), key=lambda s: (s.done or 0.0, -s.depth), default=None)
        if span is None or span.done is None or span.done <= wait.began:
            self._add_code(scope, wait.began)
            return
        self._add_code(scope, min(span.done, self._at))
        self._walk_primitives(span, wait.began)

    def _add_code(self, scope: _CodeScope, since: float) -> None:
        """Add to the path what the original's code in a scope did from `since` to `_at`, after its last wait.

        Code that the trace has a span for keeps its name.
        """
        since = max(since, self._trace.started)  # a call may have been on its way before its query began here
        while self._at > since:
            inside = [s for s in self._code if s.queued < self._at and s.done is not None and s.done > since]
            last = max(inside, key=lambda s: s.done or 0.0, default=None)
            if last is None or last.done is None:
                self._add(self._code_span(scope), since)
            elif last.done < self._at:
                self._add(self._code_span(scope), last.done)
            else:
                self._add(last, max(since, last.queued))

    def _code_span(self, scope: _CodeScope) -> Span:
        """Return the span as which the path shows a scope's own code, named after the scope's step."""
        from teola_plugin.observe.spans import Span

        trace, step = self._trace, scope.step
        if scope.code is not None:
            return scope.code
        name = YOUR_CODE if step is None else f"{step.label}{' (early)' if step.is_prefetched else ''}"
        began = trace.started if step is None else step.began
        end = trace.ended if step is None or step.ended is None else step.ended
        step_id = 0 if step is None else step.id
        return Span(trace.query_id, trace.app, name, CODE, began, began, None, end, step=step_id)

    def _add(self, span: Span, since: float) -> None:
        """Add the time from `since` to `_at` to the span, and move `_at` back to `since`."""
        since = max(self._trace.started, since)
        last = self._path[-1] if self._path else None
        if last is None or (last.span.primitive, last.span.kind) != (span.primitive, span.kind):
            self._path.append(_OpenPathStep(span))
        self._path[-1].seconds += max(0.0, self._at - since)
        self._at = min(self._at, since)

    # ------------------------------------------------------------ primitives

    def _walk_primitives(self, span: Span | None, called_at: float) -> None:
        """Walk back along the primitives that let each other begin, to the one that the original let begin.

        The original made its call at `called_at`: a primitive that was queued later, and waited for nothing else then,
        was requested by this call.
        """
        while span is not None and id(span) not in self._seen:
            if span in self._code:  # the original ran it: its own code goes on from there
                self._at = min(self._at, max(self._trace.started, span.done or self._at))
                return
            self._seen.add(id(span))
            inner_waits = [wait for name in (span.primitive, *span.also) for wait in self._inner_waits.get(name, ())]
            if inner_waits:
                self._walk_code(_CodeScope(None, span.begin, inner_waits, code=span))
            if not self._path or self._path[-1].span is not span:
                self._path.append(_OpenPathStep(span))
            step = self._path[-1]
            step.seconds += self._back_to(span.begin)
            step.waited = self._back_to(span.queued)
            before = self._before(span)
            if before is not None and (before.done or called_at) < called_at <= span.queued:
                step.idle = self._back_to(called_at)
                return
            if before is not None:
                step.idle = self._back_to(min(self._at, before.done or self._at))
            span = before

    def _back_to(self, since: float) -> float:
        """Move `_at` back to `since`. Return the seconds in between.

        `since` is limited to the time between the query's start and `_at`, so that the path never goes forward.
        """
        since = min(self._at, max(self._trace.started, since))
        seconds, self._at = self._at - since, since
        return seconds

    def _before(self, span: Span) -> Span | None:
        """Return the span that let this one begin; None if the original's code did.

        It is the one that the scheduler names, else the last one that this one waited for. A parent that ends later
        than the start of this span has streamed to it.
        """
        cause = self._spans.get(span.cause)
        if cause is not None and cause is not span and _has_run(cause) and cause.begin <= span.queued:
            return cause
        parents = [self._spans[p] for p in span.parents if p in self._spans]
        earlier = [p for p in parents if _has_run(p) and p.begin <= span.queued and p is not span]
        finished = [p for p in earlier if (p.done or 0.0) <= span.queued]
        return max(finished or earlier, key=lambda p: p.done or 0.0, default=None)


def _has_run(span: Span) -> bool:
    """Return False for a span that never ran (a warm-up that waited in vain). Control primitives have no start time."""
    return span.started is not None or not (span.engine or span.unused)


def _end(item: Wait | Step, trace: QueryTrace) -> float:
    """Return the time at which a wait or a step ended, or the query's end if it never did.

    Times are seconds on the runtime's clock.
    """
    if isinstance(item, Wait):
        return item.answered
    return trace.ended if item.ended is None else item.ended
