"""The trace of a query's primitives: when they were queued and ran, how long, and whether their values were used.

The outcome of a primitive's requests is reported to the graph scheduler and the trace.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from teola_plugin.errors import QueryCancelled
from teola_plugin.graph import Graph, Primitive
from teola_plugin.observe.recorder import TraceRecorder
from teola_plugin.observe.spans import GENERATION, QueryTrace
from teola_plugin.observe.steps import OpenWait, TracedCall, Wait
from teola_plugin.requests.payloads import Generate, Generation, Piece, Warmed
from teola_plugin.runtime import primitive_requests
from teola_plugin.runtime.claims import Caller
from teola_plugin.runtime.driver.client_code import ClientCode
from teola_plugin.runtime.driver.generation_group import (
    DecodingBegan,
    GroupEvent,
    ItemNotNeeded,
    ListGrew,
    PrefillingEnded,
)
from teola_plugin.runtime.engine_requests import EngineRequest
from teola_plugin.runtime.ports.port import Port
from teola_plugin.runtime.prefetch_outcomes import note_use, warmed
from teola_plugin.runtime.query_run import LivePrimitiveRun, QueryRun
from teola_plugin.scheduling.events import Finished, GraphEvent, ItemClosed, Started, Unused
from teola_plugin.scheduling.live_query import LiveQuery

MAX_SHOWN_REQUESTS = 8
"""Requests of a primitive whose contents a trace shows, if the user wants prompts and documents in it."""


class RunTrace:
    """The writer of the traces of live queries: it adds the time, and passes events to the recorder."""

    def __init__(self, recorder: TraceRecorder, now: Callable[[], float]) -> None:
        self.recorder, self._now = recorder, now

    def queued(
        self, run: QueryRun, p: Primitive, depth: int = 0, payloads: Sequence[Any] | None = None, step: int = 0
    ) -> None:
        """Note that a primitive waits, with a request per payload; without payloads it counts as one."""
        details = payloads[:MAX_SHOWN_REQUESTS] if self.recorder.details and payloads is not None else ()
        self.recorder.queued(
            run.id,
            p.id,
            self._now(),
            kind=p.kind.name,
            engine=p.engine,
            scope=p.scope,
            depth=depth,
            size=1 if payloads is None else len(payloads),
            speculative=p.speculative,
            parents=Graph.edges_into(p),
            detail=tuple((f"request {i}", str(payload)) for i, payload in enumerate(details)),
            step=step or run.step_of(p.id),
            cause=run.causes.pop(p.id, ""),
        )

    def requested(self, run: QueryRun, live: LivePrimitiveRun, payloads: Sequence[Any]) -> None:
        """Note that a primitive has its requests.

        If another subplan, or the original, has made all of them before, it is shown as the primitive that made them.
        """
        p, graph = live.primitive, run.graph_of(live.primitive.id)
        makers = [
            entry.primitive
            for entry in live.entries
            if entry.claims.made_by is Caller.ORIGINAL or run.graph_of(entry.primitive) is not graph
        ]
        is_adopted = makers and len(makers) == len(live.entries)
        kind = p.kind.name if live.entries and live.entries[-1].claims.made_by is Caller.ORIGINAL else ""
        if not (is_adopted and self.recorder.share_span(run.id, p.id, makers[-1], kind=kind)):
            self.queued(run, p, live.depth, payloads)

    def called(self, run: QueryRun, name: str, entries: Sequence[EngineRequest], depth: int, step: int = 0) -> None:
        """Note a call of the original that no graph knows of."""
        request, engine = entries[0].request, entries[0].engine
        kind = GENERATION if isinstance(request.payload, Generate) else request.kind.name
        self.recorder.queued(
            run.id, name, self._now(), kind=kind, engine=engine, depth=depth, size=len(entries), step=step
        )

    def at_step(self, run: QueryRun, entry: EngineRequest, step: int) -> None:
        """Note the step of the original that has claimed a request: the primitives of the request belong to it."""
        for name in {entry.primitive, *run.waiters.get(entry.request.id, ())}:
            self.recorder.at_step(run.id, name, step)
            live = run.primitives.get(name)
            if live is not None:
                live.step = step
            for member in live.group.members if live is not None and live.group is not None else ():
                self.recorder.at_step(run.id, member.id, step)

    def collected(self, run: QueryRun, name: str, producers: tuple[str, ...]) -> None:
        """Trace the holder of a fragment, whose value was collected from its instances, as a span without duration."""
        now = self._now()
        cause = run.causes.pop(name, "")
        self.recorder.queued(run.id, name, now, kind="MAP", parents=producers, step=run.step_of(name), cause=cause)
        self.recorder.done(run.id, name, now)

    def started(self, run: QueryRun, name: str, replica: str = "", batch: int = -1) -> None:
        self.recorder.started(run.id, name, self._now(), replica=replica, batch=batch)

    def first(self, run: QueryRun, name: str) -> None:
        self.recorder.first(run.id, name, self._now())

    def done(self, run: QueryRun, name: str, outcome: str = "done", at: float | None = None) -> None:
        self.recorder.done(run.id, name, self._now() if at is None else at, outcome=outcome)

    def began_decoding(self, run: QueryRun, live: LivePrimitiveRun, p: Primitive) -> None:
        """Note that a decoding begins within its request. That of an adopted request may have a span already."""
        for name in dict.fromkeys(entry.primitive for entry in live.entries):
            first = run.primitives.get(name)
            if first is None or first is live or first.group is None:
                continue
            twin = next((m for m in first.group.members if (m.kind, m.item) == (p.kind, p.item)), None)
            if twin is not None and self.recorder.share_span(run.id, p.id, twin.id):
                return
        self.queued(run, p, live.depth, step=live.step)
        self.started(run, p.id)

    def requests_ended(
        self, run: QueryRun, name: str, values: Sequence[Any], *, decoding: bool = False, failed: bool = False
    ) -> None:
        """Note that requests have ended. A generation's prompt belongs to the prefilling, its text to the decoding."""
        tokens = cached = 0
        for value in values:
            if isinstance(value, Generation):
                tokens += value.completion_tokens if decoding else value.prompt_tokens
                cached += 0 if decoding else value.cached_tokens
            elif isinstance(value, Warmed):
                tokens += value.tokens
                cached += value.cached_tokens
        outcome = "failed" if failed else "done"
        self.recorder.done(run.id, name, self._now(), outcome=outcome, tokens=tokens, cached=cached)
        if decoding:
            self._verified(run, name, values)

    def _verified(self, run: QueryRun, name: str, values: Sequence[Any]) -> None:
        """Trace how many draft tokens of these generations were accepted, if any were drafted."""
        drafted_values = [value for value in values if isinstance(value, Generation) and value.drafted]
        if drafted_values:
            drafted = sum(value.drafted for value in drafted_values)
            accepted = sum(value.accepted for value in drafted_values)
            self.recorder.verified(run.id, name, drafted, accepted)

    def generated(self, run: QueryRun, live: LivePrimitiveRun, values: Sequence[Any]) -> None:
        """Note that generations have ended. If it is not known when their texts began, each is one span."""
        if live.group is not None and all(map(_has_unknown_begin, live.entries, values)):
            names = [member.id for member in live.group.members]
            component = live.primitive.id.removesuffix(".prefilling")
            self.recorder.merge(run.id, live.primitive.id, names, kind=GENERATION, name=component)

    def called_ended(self, run: QueryRun, entry: EngineRequest, value: Any, *, failed: bool) -> None:
        """Note the end of a request that no primitive of the graph waits for: a call of the original."""
        self.requests_ended(run, entry.primitive, [value], failed=failed)
        self.recorder.goes_on(run.id, entry.primitive, self._now())
        if isinstance(value, Generation):
            self.recorder.wrote(run.id, entry.primitive, value.completion_tokens)
            self._verified(run, entry.primitive, [value])
            if _has_unknown_begin(entry, value):
                self.recorder.merge(run.id, entry.primitive, (), kind=GENERATION)

    def request_ended(self, run: QueryRun, entry: EngineRequest, value: Any, tells: bool | None) -> None:
        """Note the end of a warm-up, or of a prompt that may have found one. `tells`: see `note_use`."""
        prefix = warmed(entry, value) if isinstance(value, Warmed) else None
        if prefix is not None:
            run.warmups.append(prefix)
        elif run.warmups:
            note_use(run.warmups, entry, value, tells=tells)

    def answered(self, run: QueryRun, wait: OpenWait, entries: Sequence[EngineRequest]) -> None:
        """Note that a call of the original has its values, made for it or claimed."""
        names: list[str] = []
        primitives = dict.fromkeys(entry.primitive for entry in entries)
        for name in (name for primitive in primitives for name in self.recorder.names(run.id, primitive)):
            live = run.primitives.get(name)
            members = live.group.members if live is not None and live.group is not None else ()
            names += (name, *(member.id for member in members))
        wait.answered, wait.spans = self._now(), tuple(dict.fromkeys(names))

    def finish(self, run: QueryRun, outcome: str) -> QueryTrace | None:
        """End the trace of a query and return it."""
        for warmup in run.warmups:
            self.recorder.settle(run.id, warmup.primitive, "done" if warmup.used else "wasted")
        provider_spans = {
            id(call): self._provider_span(run, call, number, outcome)
            for number, call in enumerate(run.waits.provider_calls, start=1)
        }
        now = self._now() if run.ended_at is None else run.ended_at
        open_waits = run.waits.waits()
        waits = tuple(_closed_wait(wait, provider_spans, now) for wait in open_waits)
        for open_wait, wait in zip(open_waits, waits, strict=False):
            if open_wait.within is None or not wait.within:
                continue
            # An engine has served the call: the user's own object is the code around it.
            self.recorder.merge(run.id, wait.within, (), kind="CALL", engine="")
            for name in wait.spans if not open_wait.within.used else ():
                self.recorder.settle(run.id, name, "wasted")
        usage, provider_calls = run.usage, run.waits.provider_calls
        return self.recorder.finish(
            run.id,
            now,
            outcome=outcome,
            steps=run.steps,
            waits=waits if run.has_original else None,
            cost_of=None if usage is None else (lambda spans: usage.end_run(provider_calls, spans)),
        )

    def _provider_span(self, run: QueryRun, call: TracedCall, number: int, outcome: str) -> str:
        """Return the name of the span of a provider call: that of the plan, if the plan has requested it."""
        names = [name for request in call.requests if (name := run.requests.get(request))]
        names = names or _primitives_behind(run, call)
        if not names:
            if call.began is None or not call.used:
                return ""
            names = [f"{call.name}.call#{number}"]
            self.recorder.queued(run.id, names[0], call.began, kind=call.kind, engine=call.engine)
            self.recorder.done(run.id, names[0], self._now() if call.ended_at is None else call.ended_at)
        component = names[0].removesuffix(".prefilling")  # in case the query ended before its decoding was recorded
        name = component if component != names[0] else ""
        self.recorder.merge(run.id, names[0], names[1:], kind=call.kind, name=name)
        self.recorder.correct_times(run.id, names[0], call.began, call.ended_at)
        if call.used:
            self.recorder.settle(run.id, names[0], "done")
        elif (
            outcome == "closed"
            and call.ended_at is not None
            and run.ended_at is not None
            and call.ended_at <= run.ended_at
        ):
            self.recorder.settle(run.id, names[0], "wasted")
        return names[0]

    def settled(self, run: QueryRun, entry: EngineRequest) -> None:
        """Note an unclaimed request as wasted, unless the original has claimed another one of its primitive."""
        live = run.primitives.get(entry.primitive)
        is_used = live is not None and any(other.claims.open_by_original for other in live.entries)
        self.recorder.settle(run.id, entry.primitive, "done" if is_used else "wasted")

    def used(self, run: QueryRun, name: str) -> None:
        """Note that others use a value that was made for a subplan that is over."""
        self.recorder.settle(run.id, name, "done")


def _primitives_behind(run: QueryRun, call: TracedCall) -> list[str]:
    """Return the primitive that would have requested this call, and had not come to it by the end; [] if none."""
    if call.is_requested_by is None or not call.used:
        return []
    entries = (entry for live in run.primitives.values() for entry in live.entries if entry.engine == call.engine)
    requesting = [entry for entry in entries if call.is_requested_by(entry.request.payload)]
    traced = {request for other in run.waits.provider_calls for request in other.requests} if requesting else set()
    return [entry.primitive for entry in requesting if entry.request.id not in traced][:1]


def _has_unknown_begin(entry: EngineRequest, value: Any) -> bool:
    """Return True if a text of several tokens came in one piece, or in none, so that nobody knows when it began."""
    if not entry.stream.piece_count or not isinstance(value, Generation):
        return not entry.stream.piece_count
    stream = entry.stream
    is_whole = stream.first_characters == len(value.text) or stream.first_tokens == value.completion_tokens
    return stream.piece_count == 1 and value.completion_tokens > 1 and is_whole


def _closed_wait(wait: OpenWait, provider_spans: Mapping[int, str], now: float) -> Wait:
    """Return a wait as it was at the end of its query. `provider_spans`: by identity of the call."""
    spans = wait.spans if wait.provider_call is None else (provider_spans.get(id(wait.provider_call), ""),)
    within = "" if wait.within is None else provider_spans.get(id(wait.within), "")
    return Wait(wait.began, now if wait.answered is None else min(now, wait.answered), spans, wait.step, within)


class Driver(Protocol):
    """The `GraphDriver`, as `RequestDriver` and its helpers use it."""

    runs: dict[str, QueryRun]
    ports: Mapping[str, Port]
    trace: RunTrace
    code: ClientCode

    def now(self) -> float: ...

    def post(self, event: GraphEvent) -> None: ...

    def fail(self, run: QueryRun, name: str, error: BaseException) -> None: ...

    def fail_in_client_code(self, run: QueryRun, p: Primitive, error: BaseException) -> None: ...

    def fail_by_bug(self, query: str, primitive: str, error: Exception) -> None: ...

    def finish(self, run: QueryRun, name: str) -> None: ...

    def note_dispatch(self, run: QueryRun, p: Primitive) -> None: ...

    def query(self, run: QueryRun) -> LiveQuery | None: ...


class PrimitiveReporter:
    """Reports the progress of dispatched primitives, for all live queries of one driver."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def note_start(self, run: QueryRun, live: LivePrimitiveRun, *, is_traced: bool = False) -> None:
        """Report that a request of a primitive has begun. `is_traced`: the trace knows that already."""
        if live.began:
            return
        live.began = True
        if not is_traced:
            self._driver.trace.started(run, live.primitive.id)
        self._driver.post(Started(self._driver.now(), run.id, live.primitive.id))

    def read_piece(self, run: QueryRun, live: LivePrimitiveRun, piece: Piece) -> None:
        """Report what a piece of a generation tells about its prefilling and decodings."""
        if live.group is not None:
            self._report(run, live, live.group.read_piece(piece.text))

    def finish(self, run: QueryRun, live: LivePrimitiveRun) -> None:
        """Report that all requests of a primitive have ended: its value, or its failure."""
        p, results = live.primitive, live.results
        failed = next((entry for entry in live.entries if entry.has_failed), None)
        if failed is not None:
            self._driver.fail(run, p.id, failed.error or QueryCancelled("cancelled"))
            return
        self._driver.trace.requests_ended(run, p.id, results)
        value = primitive_requests.value(p, results)
        if live.group is None:
            run.store.put(p.id, value)
            self._driver.finish(run, p.id)
            return
        self._report(run, live, live.group.finish(value))
        self._driver.trace.generated(run, live, results)

    def _report(self, run: QueryRun, live: LivePrimitiveRun, events: Iterator[GroupEvent]) -> None:
        """Carry the events of a generation's stream to the query's store, to the trace and to the graph scheduler."""
        driver = self._driver
        for event in list(events):
            now = driver.now()
            if isinstance(event, DecodingBegan):
                driver.trace.began_decoding(run, live, event.primitive)
            elif isinstance(event, PrefillingEnded):
                run.store.put(event.primitive, True)
                driver.trace.first(run, event.primitive)
                if event.has_decodings:
                    driver.trace.done(run, event.primitive)
                driver.post(Finished(now, run.id, event.primitive))
            elif isinstance(event, ItemNotNeeded):
                driver.post(Unused(now, run.id, event.primitive))
            elif isinstance(event, ListGrew):
                run.store.put(event.name, event.value)
                driver.post(ItemClosed(now, run.id, event.primitive, event.index, event.name))
            else:
                run.store.put(event.primitive, event.value)
                if event.is_whole_text:
                    driver.trace.requests_ended(run, event.primitive, [event.value], decoding=True)
                else:
                    driver.trace.done(run, event.primitive)
                driver.post(Finished(now, run.id, event.primitive))
