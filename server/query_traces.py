"""What happened to a query of the server: its own trace, with those of queries that its apps have begun."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from teola_plugin.observe.spans import QueryTrace, Span
from teola_plugin.server.live_queries import LiveQuery


def whole_trace(get: Callable[[str], QueryTrace | None], query: LiveQuery) -> QueryTrace | None:
    """None for a query that is not over, or whose trace is no longer kept."""
    own = get(query.trace)
    inner = [found for id in query.traces if (found := get(id)) is not None]
    if own is None or not inner:
        return own
    if len(inner) == 1 and not own.spans:
        [only] = inner
        return replace(only, query_id=own.query_id, app=own.app, started=own.started, ended=own.ended, wall=own.wall)
    spans = [_within(span, f"{number}/") for number, one in enumerate(inner, start=1) for span in one.spans]
    return replace(own, spans=(*own.spans, *sorted(spans, key=lambda span: span.queued)), graph=None)


def _within(span: Span, path: str) -> Span:
    """With names that no other trace has."""
    parents, also = (tuple(path + name for name in names) for names in (span.parents, span.also))
    cause = path + span.cause if span.cause else ""
    return replace(span, primitive=path + span.primitive, parents=parents, also=also, cause=cause)
