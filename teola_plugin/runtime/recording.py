"""What the trace of a query says of its primitives: when they were queued, what they took, whether it was of use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from teola_plugin.engines.payloads import Generation, Warmed
from teola_plugin.graph import Graph, Primitive, PrimitiveKind
from teola_plugin.observe.recorder import TraceRecorder
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.runtime.request_table import RequestEntry

SHOWN_REQUESTS = 8
"""Requests of a primitive whose contents a trace shows, where prompts and documents were asked for."""


def record_queued(
    recorder: TraceRecorder,
    now: float,
    run: QueryRun,
    p: Primitive,
    depth: int = 0,
    payloads: Sequence[Any] | None = None,
) -> None:
    """The primitive waits, with a request per payload; one that has none is one piece of work."""
    shown = payloads[:SHOWN_REQUESTS] if recorder.details and payloads is not None else ()
    recorder.queued(
        run.id,
        p.id,
        now,
        kind=p.kind.name,
        engine=p.engine,
        scope=p.scope,
        depth=depth,
        size=1 if payloads is None else len(payloads),
        tentative=p.tentative,
        parents=Graph.edges_into(p),
        detail=tuple((f"request {i}", str(payload)) for i, payload in enumerate(shown)),
    )


def record_ended(
    recorder: TraceRecorder,
    now: float,
    run: QueryRun,
    name: str,
    entries: Sequence[RequestEntry],
    *,
    decoding: bool = False,
) -> None:
    """Its requests have ended; a generation's prompt belongs to the prefilling, its text to the decoding."""
    tokens = cached = 0
    for entry in entries:
        value = entry.value
        if isinstance(value, Generation):
            tokens += value.completion_tokens if decoding else value.prompt_tokens
            cached += 0 if decoding else value.cached_tokens
        elif isinstance(value, Warmed):
            tokens += value.tokens
    outcome = "failed" if any(entry.failed for entry in entries) else "done"
    recorder.done(run.id, name, now, outcome=outcome, tokens=tokens, cached=cached)


def fate(run: QueryRun, entry: RequestEntry) -> str:
    """Work that only the graph asked for was used if another primitive or the plain object went on from it."""
    live = run.primitives.get(entry.primitive)
    if live is None:
        return "wasted"
    helper = live.primitive.kind is PrimitiveKind.PARTIAL_PREFILLING and not live.primitive.tentative
    return "done" if helper or any(e.by_plain for e in live.entries) else "wasted"
