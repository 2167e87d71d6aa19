"""What the trace of a query says of its primitives: when they were queued, what they took, whether it was of use."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from teola_plugin.graph import Graph, Primitive, PrimitiveKind
from teola_plugin.observe.recorder import TraceRecorder
from teola_plugin.requests.payloads import Generation, Warmed
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.runtime.works.work import Work

SHOWN_REQUESTS = 8
"""Requests of a primitive whose contents a trace shows, where prompts and documents were asked for."""


class RunTrace:
    """Hears what happens to the primitives of live queries, and writes it down with the time."""

    def __init__(self, recorder: TraceRecorder, now: Callable[[], float]) -> None:
        self.recorder, self._now = recorder, now

    def queued(
        self, run: QueryRun, p: Primitive, depth: int = 0, payloads: Sequence[Any] | None = None, step: int = 0
    ) -> None:
        """The primitive waits, with a request per payload; one that has none is one piece of work."""
        shown = payloads[:SHOWN_REQUESTS] if self.recorder.details and payloads is not None else ()
        self.recorder.queued(
            run.id,
            p.id,
            self._now(),
            kind=p.kind.name,
            engine=p.engine,
            scope=p.scope,
            depth=depth,
            size=1 if payloads is None else len(payloads),
            tentative=p.tentative,
            parents=Graph.edges_into(p),
            detail=tuple((f"request {i}", str(payload)) for i, payload in enumerate(shown)),
            step=step or run.step_of(p.id),
        )

    def called(self, run: QueryRun, name: str, works: Sequence[Work], depth: int, step: int = 0) -> None:
        """The plain object calls, and no graph knows of it."""
        kind, engine = works[0].request.kind.name, works[0].engine
        self.recorder.queued(
            run.id, name, self._now(), kind=kind, engine=engine, depth=depth, size=len(works), step=step
        )

    def at_step(self, run: QueryRun, work: Work, step: int) -> None:
        """A step of the plain object has claimed it: now it is known what its primitives are for."""
        for name in {work.primitive, *run.waiters.get(work.request.id, ())}:
            self.recorder.at_step(run.id, name, step)
            live = run.primitives.get(name)
            if live is not None:
                live.step = step
            for member in live.group.members if live is not None and live.group is not None else ():
                self.recorder.at_step(run.id, member.id, step)

    def collected(self, run: QueryRun, name: str, producers: tuple[str, ...]) -> None:
        now = self._now()
        self.recorder.queued(run.id, name, now, kind="MAP", parents=producers, step=run.step_of(name))
        self.recorder.done(run.id, name, now)

    def started(self, run: QueryRun, name: str, instance: str = "", batch: int = -1) -> None:
        self.recorder.started(run.id, name, self._now(), instance=instance, batch=batch)

    def first(self, run: QueryRun, name: str) -> None:
        self.recorder.first(run.id, name, self._now())

    def done(self, run: QueryRun, name: str, outcome: str = "done") -> None:
        self.recorder.done(run.id, name, self._now(), outcome=outcome)

    def ended(
        self, run: QueryRun, name: str, values: Sequence[Any], *, decoding: bool = False, failed: bool = False
    ) -> None:
        """Its requests have ended; a generation's prompt belongs to the prefilling, its text to the decoding."""
        tokens = cached = 0
        for value in values:
            if isinstance(value, Generation):
                tokens += value.completion_tokens if decoding else value.prompt_tokens
                cached += 0 if decoding else value.cached_tokens
            elif isinstance(value, Warmed):
                tokens += value.tokens
        outcome = "failed" if failed else "done"
        self.recorder.done(run.id, name, self._now(), outcome=outcome, tokens=tokens, cached=cached)

    def settled(self, run: QueryRun, work: Work) -> None:
        """What came of work that nobody claimed: other primitives, or the plain object, may have gone on from it."""
        self.recorder.settle(run.id, work.primitive, _fate(run, work))

    def used(self, run: QueryRun, name: str) -> None:
        """A part is over, and what was made for it is of use to others."""
        self.recorder.settle(run.id, name, "done")


def _fate(run: QueryRun, work: Work) -> str:
    live = run.primitives.get(work.primitive)
    if live is None:
        return "wasted"
    helper = live.primitive.kind is PrimitiveKind.PARTIAL_PREFILLING and not live.primitive.tentative
    return "done" if helper or any(w.plain for w in live.works) else "wasted"
