"""The requests to the engines of a pool, by query, and how often collections have been written to."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from teola_plugin.graph import RequestContext
from teola_plugin.requests.payloads import IngestRow, SearchVector
from teola_plugin.runtime.claims import MAX_REMEMBERED, OWN_GRAPH, Caller, ClaimTable, PlannerGraph
from teola_plugin.runtime.engine_requests.engine_request import EngineRequest
from teola_plugin.runtime.engine_requests.keys import RequestKey


class _QueryRequests:
    """The requests of one query."""

    def __init__(self, max_remembered: int) -> None:
        self.claims = ClaimTable[EngineRequest](max_remembered)
        self.open: dict[str, EngineRequest] = {}
        """Those that have not ended, by id."""
        self.prefetched: dict[str, EngineRequest] = {}
        """Those that the planner made, by id, until their graphs are over."""

    def add(self, request: EngineRequest) -> EngineRequest:
        self.open[request.request.id] = request
        if request.claims.made_by is Caller.PLANNER:
            self.prefetched[request.request.id] = request
        return request


class RequestTable:
    """The table of all requests of a pool to its engines. Queries share nothing: each has claims of its own."""

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._queries: dict[str, _QueryRequests] = {}
        self._max_remembered = max_remembered

    def join(
        self,
        query: str,
        key: RequestKey | None,
        caller: Caller,
        terms: RequestContext,
        make: Callable[[], EngineRequest],
        graph: PlannerGraph = OWN_GRAPH,
    ) -> EngineRequest:
        """Return the request that `caller` gets for a key: an earlier one that it may claim, or else a new one.

        Whoever gets a request that `is_expected` has to send it, unless it is a write that the planner waits for.
        `graph`: the graph that asks, if the caller is the planner.
        """
        requests = self._of(query)
        request = requests.claims.claim_or_add(key, caller, lambda: requests.add(make()), graph)
        request.take_terms(terms)
        return request

    def end(self, request: EngineRequest, value: Any, error: BaseException | None) -> None:
        """End a request for everybody who waits for it. Forget it if nobody can claim it any more."""
        requests = self._queries.get(request.request.query)
        request.resolve(value, error)
        if requests is not None and requests.open.pop(request.request.id, None) is not None:
            requests.claims.end(request)

    def drop_writes(self, engine: str, collection: str) -> None:
        """Forget the rows that the original has written to a collection: it writes or deletes there again."""

        def is_there(request: EngineRequest) -> bool:
            return request.engine == engine and request.request.payload.collection == collection

        for requests in self._queries.values():
            requests.claims.drop_writes(is_there)

    def release(self, query: str, ended_requests: Iterable[EngineRequest]) -> None:
        """Forget ended requests of subplans that are over, unless a later subplan may claim them."""
        requests = self._queries.get(query)
        if requests is None:
            return
        for request in ended_requests:
            if request.has_ended and requests.prefetched.pop(request.request.id, None) is not None:
                requests.claims.release(request)

    def of(self, query: str) -> Iterator[EngineRequest]:
        """Iterate over the requests of a query that are under way, and over those that the planner made."""
        requests = self._queries.get(query)
        if requests is not None:
            yield from (requests.prefetched | requests.open).values()

    def forget(self, query: str) -> None:
        """End a query. Whoever still waits for a request has it."""
        self._queries.pop(query, None)

    def __len__(self) -> int:
        return len(self._queries)

    def _of(self, query: str) -> _QueryRequests:
        requests = self._queries.get(query)
        if requests is None:
            requests = self._queries[query] = _QueryRequests(self._max_remembered)
        return requests


class Writes:
    """The numbers of writes of this process, ingestions and deletions, by engine and collection.

    A search made before a write is not used after it.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()

    def note_end(self, engine: str, payload: Any) -> None:
        """Count a request that has ended, well or not."""
        if isinstance(payload, IngestRow):
            self._counts[engine, payload.collection] += 1

    def note_call(self, engine: str, method: str, args: Sequence[Any]) -> bool:
        """Count a call of an engine's method, with the collection first. Return True if it may have written."""
        writes = method.startswith(("delete", "forget")) and bool(args) and isinstance(args[0], str)
        if writes:
            self._counts[engine, args[0]] += 1
        return writes

    def version(self, engine: str, payload: Any) -> int:
        """Return the number of writes to the collection of a search; -1 for any other request."""
        return self._counts[engine, payload.collection] if isinstance(payload, SearchVector) else -1
