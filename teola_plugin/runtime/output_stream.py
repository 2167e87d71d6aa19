"""Streaming of a query's output while a model writes it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from teola_plugin.graph import PrimitiveKind
from teola_plugin.runtime.engine_requests import EngineRequest
from teola_plugin.runtime.loop_thread import PieceLog
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.scheduling.live_query import LiveQuery

_Call = TypeVar("_Call", bound=Callable[..., Any])
_K = PrimitiveKind
_SINGLE = frozenset({_K.FOLD, _K.BRANCH})
"""Primitives whose value is that of one instance of a fragment, which is known when they are expanded."""


def hands_on(call: _Call) -> _Call:
    """Mark a function of one value, a generation, that returns its text unchanged.

    Pieces of the generation may then be streamed as the query's output before the function runs.
    """
    call.teola_hands_on = True  # type: ignore[attr-defined]
    return call


def attach(run: QueryRun, query: LiveQuery | None, read: Callable[[EngineRequest, PieceLog], None]) -> None:
    """Attach the log for the streamed value of `run` to the request that writes it, by `read`, once that is known."""
    log = run.streamed_into
    if log is None or query is None:
        return
    name = _writer(run, query, run.streamed)
    for live in run.primitives.values():
        if live.group is not None and any(member.id == name for member in live.group.members):
            if live.entries:
                run.streamed_into = None
                read(live.entries[0], log)
            return


def _writer(run: QueryRun, query: LiveQuery, name: str) -> str:
    """Return the decoding whose text is the value of `name`; empty if it is not known."""
    live = query.get(name)
    while live is not None:
        p = live.primitive
        if p.kind in _SINGLE and live.outputs:
            name = live.outputs[-1].producer
        elif p.kind is _K.CALL and getattr(run.calls_of(p.id).get(p.call), "teola_hands_on", False):
            name = p.inputs[0][1].producer
        else:
            return p.id if p.kind is _K.DECODING else ""
        live = query.get(name)
    return ""
