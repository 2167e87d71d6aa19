"""Pre-scheduling: followers of a primitive that need no code of the client are sent along with it.

A follower's engine begins when the value before it is there. The graph scheduler dispatches it later, as ever, and the
requests that run by then are adopted. Values that only engines read may stay where they are made. Only
`ForwardingPort`s take part, since it saves messages between processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from teola_plugin.graph import InstancePath, Primitive, PrimitiveKind, Ref
from teola_plugin.runtime.engine_requests.engine_request import EngineRequest
from teola_plugin.runtime.ports.port import Follow, ForwardingPort, Port
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.scheduling.engine_events import Enqueue
from teola_plugin.scheduling.live_query import LivePrimitive, LiveQuery, Status

_K = PrimitiveKind
FOLLOWING = frozenset({_K.EMBEDDING, _K.INGESTION, _K.SEARCHING, _K.RERANKING})
"""Kinds whose payloads are made of values alone."""
MAX_CHAIN = 32
"""Primitives of one chain that are sent together."""
_numbers = itertools.count(1)


class PreScheduling:
    """The choice of followers. `enqueue_event` makes the event with which a primitive is queued."""

    def __init__(
        self, ports: Callable[[], Mapping[str, Port]], enqueue_event: Callable[[QueryRun, Primitive, int], Enqueue]
    ) -> None:
        self._ports, self._enqueue_event = ports, enqueue_event

    def withdraw(self, run: QueryRun, subplan: str = "") -> None:
        """Give up the followers that the query, or a subplan of it, has not dispatched."""
        primitives = [p for p in run.sent_followers if not subplan or InstancePath(p).inside(subplan) is not None]
        names = [run.sent_followers.pop(p) for p in primitives]
        for port in self._ports().values() if names else ():
            if isinstance(port, ForwardingPort):
                for name in names:
                    port.disown(name)

    def drop_follower(self, run: QueryRun, p: Primitive, requests: int) -> None:
        """Give up the follower for a primitive that is dispatched now, since others have made all of its requests."""
        name, port = run.sent_followers.pop(p.id, None), self._ports()[p.engine]
        if name is not None and isinstance(port, ForwardingPort):
            port.disown(name, requests)

    def keep_remote(self, query: LiveQuery, p: Primitive, entries: Iterable[EngineRequest]) -> None:
        """Mark the requests of a primitive if only engines read its value."""
        if self._is_kept_remote(query, p):
            for entry in entries:
                entry.request = replace(entry.request, keep_remote=True)

    def _is_kept_remote(self, query: LiveQuery, p: Primitive) -> bool:
        """Return True for vectors that are only ingested: nothing here looks at them, not even a request key."""
        if not p.batchable or query.output.producer == p.id or not self._forwards(p):
            return False
        reads = [(r.primitive, key, ref) for r in query.readers(p.id) for key, ref in _reads(r.primitive, p)]
        return bool(reads) and all(
            q.kind is _K.INGESTION and key == "vectors" and len(ref.path) < 2 and not q.call and self._forwards(q)
            for q, key, ref in reads
        )

    def _forwards(self, p: Primitive) -> bool:
        return isinstance(self._ports().get(p.engine), ForwardingPort)

    def followers(
        self, run: QueryRun, query: LiveQuery, before: Primitive, max_length: int = MAX_CHAIN
    ) -> tuple[Follow, ...]:
        """Return the followers of `before`: primitives that wait for it alone, each with its own followers."""
        if before.prefills or before.decodes or max_length < 1:
            return ()
        fitting = (live for live in query.children(before.id) if self._can_follow(run, live, before))
        followers = (self._follow(run, query, live, before, max_length) for live in fitting)
        return tuple(follow for follow in followers if follow is not None)

    @staticmethod
    def _can_follow(run: QueryRun, live: LivePrimitive, before: Primitive) -> bool:
        p = live.primitive
        if p.kind not in FOLLOWING or p.call or p.attributes.wrapped or p.tentative:
            return False
        if p.kind is _K.INGESTION and run.has_original:  # only the original starts writes
            return False
        if live.status is not Status.WAITING or live.waits != {before.id} or live.id in run.sent_followers:
            return False
        return all(ref.producer == before.id or ref.producer in run.store for _, ref in p.inputs)

    def _follow(
        self, run: QueryRun, query: LiveQuery, live: LivePrimitive, before: Primitive, max_length: int
    ) -> Follow | None:
        p = live.primitive
        port = self._ports().get(p.engine)
        if not isinstance(port, ForwardingPort):
            return None
        name = f"{run.id}-ahead{next(_numbers)}"
        run.sent_followers[p.id] = name
        inputs = {key: run.store.read(ref) for key, ref in p.inputs if ref.producer != before.id}
        pending = tuple((key, ref.path) for key, ref in p.inputs if ref.producer == before.id)
        event = self._enqueue_event(run, p, live.depth)
        port.expect(name, event)
        followers = self.followers(run, query, p, max_length - 1)
        is_kept_remote = self._is_kept_remote(query, p)
        return Follow(p, name, inputs, pending, event, run.query.tenant, followers, is_kept_remote)


def _reads(reader: Primitive, p: Primitive) -> list[tuple[str, Ref]]:
    """Return the references of `reader` to the value of `p`, by input name; the name of an early one is empty."""
    refs = [*reader.inputs, *(("", ref) for ref in reader.early_refs)]
    return [(key, ref) for key, ref in refs if ref.producer == p.id]
