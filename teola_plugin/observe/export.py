"""Traces in the Chrome trace-event format, which Perfetto (ui.perfetto.dev) and chrome://tracing open."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from teola_plugin.observe.layout import pack_lanes
from teola_plugin.observe.spans import QueryTrace, Span
from teola_plugin.observe.steps import Step, nested

Event = dict[str, Any]
_Thread = tuple[int, int]
"""(process id, thread id)"""


def chrome_trace(traces: Iterable[QueryTrace], *, by: Literal["query", "engine"] = "query") -> dict[str, Any]:
    """Return `traces` as one JSON-ready object; times in microseconds since the earliest query's start.

    With `by="query"` each process is a query, with the engines as threads; with `by="engine"` each process is an
    engine, with the queries as threads. A thread is a lane: its slices never overlap. Flow arrows lead from the
    primitives that others waited for. Each kind of step of the original has threads of its own.
    """
    traces = list(traces)
    origin = min((t.started for t in traces), default=0.0)
    groups: dict[tuple[str, str], list[tuple[QueryTrace, Span | Step]]] = {}
    for trace in traces:
        query = f"{trace.app} {trace.query_id}".strip()
        of_engines: list[tuple[str, Span | Step]] = [(span.engine or "client", span) for span in trace.spans]
        for thread, one in [*_steps(trace), *of_engines]:
            key = (query, thread) if by == "query" else (thread, query)
            groups.setdefault(key, []).append((trace, one))
    events: list[Event] = []
    threads: dict[int, _Thread] = {}
    """By identity of the span or step."""
    pids: dict[str, int] = {}
    next_tid = 1
    for (process, thread), members in groups.items():
        if process not in pids:
            pids[process] = len(pids) + 1
            events.append(_meta("process_name", pids[process], 0, process))
        lanes = pack_lanes([_extent(trace, one) for trace, one in members])
        for lane in range(max(lanes) + 1):
            name = thread if lane == 0 else f"{thread} ({lane + 1})"
            events.append(_meta("thread_name", pids[process], next_tid + lane, name))
        for (trace, one), lane in zip(members, lanes, strict=True):
            slice_thread = threads[id(one)] = (pids[process], next_tid + lane)
            if isinstance(one, Step):
                events.append(_step_slice(trace, one, slice_thread, origin))
            else:
                events.extend(_slices(trace, one, slice_thread, origin))
        next_tid += max(lanes) + 1
    events.extend(_flows(traces, threads, origin))
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"queries": len(traces)}}


def _steps(trace: QueryTrace) -> Iterator[tuple[str, Span | Step]]:
    """Yield (name of the thread, step): a thread for each kind of step, the outermost first."""
    kinds = dict.fromkeys(step.kind for _, step in sorted(nested(trace.steps), key=lambda item: item[0]))
    for kind in kinds:
        yield from ((f"{kind}s", step) for step in trace.steps if step.kind == kind)


def _step_slice(trace: QueryTrace, step: Step, thread: _Thread, origin: float) -> Event:
    begin, end = (_micros(at, origin) for at in _extent(trace, step))
    args = {"query": trace.query_id, "kind": step.kind, "outcome": step.outcome, "step": step.id, "in": step.parent}
    return _slice(step.name, step.kind, thread, begin, end, {**dict(step.facts), **args})


def write_chrome_trace(
    path: str | os.PathLike[str], traces: Iterable[QueryTrace], *, by: Literal["query", "engine"] = "query"
) -> Path:
    """Write `chrome_trace(traces)` to `path` and return that path."""
    target = Path(path)
    target.write_text(json.dumps(chrome_trace(traces, by=by), separators=(",", ":")), encoding="utf-8")
    return target


def _extent(trace: QueryTrace, one: Span | Step) -> tuple[float, float]:
    """Return the beginning and the end of a span or step, in seconds; one that never ended goes on to the query's end.

    The end is never before the beginning. A span begins when it was queued.
    """
    if isinstance(one, Step):
        return one.began, max(one.began, trace.ended if one.ended is None else one.ended)
    return one.queued, max(one.begin, trace.ended if one.done is None else one.done)


def _micros(seconds: float, origin: float) -> float:
    """Return microseconds since `origin`, in whole nanoseconds, so that slices which touch do so exactly."""
    return round((seconds - origin) * 1e9) / 1e3


def _meta(name: str, pid: int, tid: int, value: str) -> Event:
    return {"ph": "M", "name": name, "pid": pid, "tid": tid, "ts": 0, "args": {"name": value}}


def _slices(trace: QueryTrace, span: Span, thread: _Thread, origin: float) -> Iterator[Event]:
    """Yield the events of a span: its time in the queue, its run, and a mark where its first piece came."""
    queued, end = (_micros(at, origin) for at in _extent(trace, span))
    begin = _micros(span.begin, origin) if span.started is not None else end
    if begin > queued:
        yield _slice(f"{span.primitive} (queued)", "queued", thread, queued, begin, {})
    if span.started is not None or begin == queued:
        yield _slice(span.primitive, span.kind, thread, begin, end, _args(trace, span))
    if span.first is not None:
        at = _micros(span.first, origin)
        yield {"ph": "i", "s": "t", "name": "first piece", "cat": span.kind, "ts": at, **_ids(thread)}


def _slice(name: str, cat: str, thread: _Thread, begin: float, end: float, args: Event) -> Event:
    dur = max(0, round((end - begin) * 1e3)) / 1e3
    return {"ph": "X", "name": name, "cat": cat, "ts": begin, "dur": dur, **_ids(thread), "args": args}


def _ids(thread: _Thread) -> Event:
    return {"pid": thread[0], "tid": thread[1]}


def _args(trace: QueryTrace, span: Span) -> Event:
    """Return the details of a span that viewers show when its slice is selected."""
    return {
        "query": trace.query_id,
        "kind": span.kind,
        "engine": span.engine or "client",
        "replica": span.replica,
        "batch": span.batch,
        "scope": "/".join(span.scope),
        "depth": span.depth,
        "outcome": span.outcome,
        "requests": span.size,
        "tokens": span.tokens,
        "cached": span.cached,
        "speculative": span.speculative,
        **({"step": span.step} if span.step else {}),
        **({"written": span.written} if span.written else {}),
        **({"drafted": span.drafted, "accepted": span.accepted} if span.drafted else {}),
        **({"also": list(span.also)} if span.also else {}),
        **{f"detail.{key}": value for key, value in span.detail},
    }


def _flows(traces: Sequence[QueryTrace], threads: dict[int, _Thread], origin: float) -> Iterator[Event]:
    """Yield the arrows between slices: from each primitive to those that waited for it."""
    number = 0
    for trace in traces:
        latest = {name: s for name, s in trace.finished().items() if s.started is not None}
        for child in {id(s): s for s in latest.values()}.values():
            for parent in (latest[p] for p in child.parents if p in latest):
                assert parent.done is not None
                # An arrow must leave from inside its slice and may not point back in time.
                leave = min(_micros(parent.done, origin) - 0.001, _micros(child.begin, origin))
                if parent is child or leave < _micros(parent.begin, origin):
                    continue
                number += 1
                common = {"name": "waits for", "cat": "flow", "id": number}
                yield {"ph": "s", "ts": leave, **common, **_ids(threads[id(parent)])}
                yield {"ph": "f", "bp": "e", "ts": _micros(child.begin, origin), **common, **_ids(threads[id(child)])}
