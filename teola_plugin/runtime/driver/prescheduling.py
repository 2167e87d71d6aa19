"""Pre-scheduling: what follows a primitive and needs no code of the client is sent along with it.

Its engine begins when the value before it is there; the graph scheduler dispatches it later, as ever, and the requests
that run by then are adopted. Values that only engines read may stay where they are made. Only `ForwardingPort`s take
part: in one process there is no way to be saved.
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
LONGEST = 32
"""Primitives of one chain that are sent together."""
_numbers = itertools.count(1)


class PreScheduling:
    """Chooses what follows. `enqueue_event` makes the event with which a primitive is queued."""

    def __init__(
        self, ports: Callable[[], Mapping[str, Port]], enqueue_event: Callable[[QueryRun, Primitive, int], Enqueue]
    ) -> None:
        self._ports, self._enqueue_event = ports, enqueue_event

    def withdraw(self, run: QueryRun, part: str = "") -> None:
        """Followers that the graph, or a part of it, has not come to are not wanted any more."""
        ahead = [p for p in run.sent_ahead if not part or InstancePath(p).inside(part) is not None]
        names = [run.sent_ahead.pop(p) for p in ahead]
        for port in self._ports().values() if names else ():
            if isinstance(port, ForwardingPort):
                for name in names:
                    port.disown(name)

    def unneeded(self, run: QueryRun, p: Primitive, requests: int) -> None:
        """The graph has come to it, and all that it asks for was asked for by others."""
        name, port = run.sent_ahead.pop(p.id, None), self._ports()[p.engine]
        if name is not None and isinstance(port, ForwardingPort):
            port.disown(name, requests)

    def leave(self, query: LiveQuery, p: Primitive, entries: Iterable[EngineRequest]) -> None:
        """Mark the requests of a primitive whose value nobody but engines reads."""
        if self._stays(query, p):
            for entry in entries:
                entry.request = replace(entry.request, keep_remote=True)

    def _stays(self, query: LiveQuery, p: Primitive) -> bool:
        """Vectors that are ingested: an ingestion is told from others without them, so nothing here looks at them."""
        if not p.batchable or query.output.producer == p.id or not self._forwards(p):
            return False
        reads = [(r.primitive, key, ref) for r in query.readers(p.id) for key, ref in _reads(r.primitive, p)]
        return bool(reads) and all(
            q.kind is _K.INGESTION and key == "vectors" and len(ref.path) < 2 and not q.call and self._forwards(q)
            for q, key, ref in reads
        )

    def _forwards(self, p: Primitive) -> bool:
        return isinstance(self._ports().get(p.engine), ForwardingPort)

    def followers(self, run: QueryRun, query: LiveQuery, before: Primitive, room: int = LONGEST) -> tuple[Follow, ...]:
        """What waits for `before` alone; each with what waits for it alone."""
        if before.prefills or before.decodes or room < 1:
            return ()
        fitting = (live for live in query.children(before.id) if self._fits(run, live, before))
        made = (self._follow(run, query, live, before, room) for live in fitting)
        return tuple(follow for follow in made if follow is not None)

    @staticmethod
    def _fits(run: QueryRun, live: LivePrimitive, before: Primitive) -> bool:
        p = live.primitive
        if p.kind not in FOLLOWING or p.call or p.attributes.wrapped or p.tentative:
            return False
        if p.kind is _K.INGESTION and run.ahead:  # rows wait for the plain object
            return False
        if live.status is not Status.WAITING or live.waits != {before.id} or live.id in run.sent_ahead:
            return False
        return all(ref.producer == before.id or ref.producer in run.store for _, ref in p.inputs)

    def _follow(
        self, run: QueryRun, query: LiveQuery, live: LivePrimitive, before: Primitive, room: int
    ) -> Follow | None:
        p = live.primitive
        port = self._ports().get(p.engine)
        if not isinstance(port, ForwardingPort):
            return None
        name = f"{run.id}-ahead{next(_numbers)}"
        run.sent_ahead[p.id] = name
        known = {key: run.store.read(ref) for key, ref in p.inputs if ref.producer != before.id}
        pending = tuple((key, ref.path) for key, ref in p.inputs if ref.producer == before.id)
        event = self._enqueue_event(run, p, live.depth)
        port.expect(name, event)
        then = self.followers(run, query, p, room - 1)
        return Follow(p, name, known, pending, event, run.query.tenant, then, self._stays(query, p))


def _reads(reader: Primitive, p: Primitive) -> list[tuple[str, Ref]]:
    """What `reader` reads of the value of `p`, by input name; the name is empty for what it reads early."""
    found = [*reader.inputs, *(("", ref) for ref in reader.early)]
    return [(key, ref) for key, ref in found if ref.producer == p.id]
