"""An engine of the shared pool at this client: the counterpart of `EnginePort`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from teola_plugin.cluster.client.link import HostLink
from teola_plugin.cluster.client.shared_engine import SharedEngine
from teola_plugin.cluster.remote_values import RayValue, ValueLost, fetch_or_remake, remote_values_in, with_values
from teola_plugin.cluster.wire import (
    Cancel,
    EngineFacts,
    Hello,
    Listen,
    Order,
    RequestEnded,
    RequestEvent,
    RequestPiece,
    RequestStarted,
    Submit,
    UpdateDepths,
    not_accepted,
    not_picklable,
    request_ids,
)
from teola_plugin.errors import EngineError, EngineUnavailable, pool_closed
from teola_plugin.graph import Primitive
from teola_plugin.requests.payloads import Piece, Request
from teola_plugin.runtime.engine_requests import EngineRequest, PendingCall, request_id
from teola_plugin.runtime.ports.port import Follow, ForwardingPort, PortListener, follower_of, follower_request
from teola_plugin.scheduling.engine_queue import DepthChanged, Enqueue
from teola_plugin.scheduling.live_query import Objective


@dataclass(slots=True)
class _Queued:
    """A queued primitive, and its requests that have not ended."""

    event: Enqueue
    requests: set[str] = field(default_factory=set)


class UnfinishedRequests:
    """The requests of a client that have not ended, by id, with their latest context: a new host gets these."""

    def __init__(self) -> None:
        self._entries: dict[str, tuple[EngineRequest, _Queued]] = {}
        self._queued: dict[tuple[str, str], _Queued] = {}
        """Queued primitives by query and primitive."""

    def __contains__(self, request: str) -> bool:
        return request in self._entries

    def __iter__(self) -> Iterator[tuple[EngineRequest, Enqueue]]:
        return iter([(entry, queued.event) for entry, queued in self._entries.values()])

    def add(self, entry: EngineRequest, event: Enqueue) -> None:
        """Record a request that is sent to the host, with the event that queues its primitive.

        `event` replaces the earlier event of the same primitive, so that a new host gets the latest depth and
        objective.
        """
        key = event.query, event.primitive
        queued = self._queued.get(key)
        if queued is None:
            queued = self._queued[key] = _Queued(event)
        queued.event = event
        queued.requests.add(entry.request.id)
        self._entries[entry.request.id] = entry, queued

    def get(self, request: str) -> tuple[EngineRequest, Enqueue] | None:
        """Return a request that has not ended, and the latest event that queues its primitive; None if it is unknown or
        has ended."""
        pair = self._entries.get(request)
        return (pair[0], pair[1].event) if pair is not None else None

    def end(self, request: str) -> None:
        """Forget a request that has ended, and its primitive once all requests of that have ended. Ignore unknown
        requests."""
        pair = self._entries.pop(request, None)
        if pair is None:
            return
        queued = pair[1]
        queued.requests.discard(request)
        if not queued.requests:
            self._queued.pop((queued.event.query, queued.event.primitive), None)

    def update_depth(self, event: DepthChanged) -> None:
        """Update depths, objectives and gangs that changed after their primitives were queued."""
        for primitive, depth in event.depths.items():
            if (queued := self._queued.get((event.query, primitive))) is not None:
                queued.event = replace(queued.event, depth=depth)
        for primitive, (objective, gang) in event.objectives.items():
            if (queued := self._queued.get((event.query, primitive))) is not None:
                queued.event = replace(queued.event, objective=objective, gang=gang)


log = logging.getLogger("teola_plugin")


class SharedPort(ForwardingPort):
    """Sends primitives to the engine's host, and reports to the runtime what became of their requests.

    The host schedules. When it is lost and comes back, requests that had not ended are sent again if they may be
    repeated.
    """

    def __init__(
        self,
        pool: str,
        engine: SharedEngine,
        hello: Hello,
        listener: PortListener,
        withdraw: Callable[[], None] = lambda: None,
        on_host_lost: Callable[[], None] = lambda: None,
    ) -> None:
        """Create the port; `open` connects it.

        `withdraw` takes back all followers that the graphs have not come to. `on_host_lost` is called when the host has
        come back without its state: what it would have sent on, to other engines too, never comes.
        """
        self.name, self._engine = engine.name, engine
        self._tasks: set[asyncio.Task[None]] = set()
        self._listener, self._withdraw, self._on_host_lost = listener, withdraw, on_host_lost
        self._unfinished = UnfinishedRequests()
        self._unclaimed_events: dict[str, list[RequestEvent]] = {}
        """Events of followers that the graph has not dispatched yet, by request."""
        self._expected: dict[str, Enqueue] = {}
        """Announced followers, by name, with the context that they were announced with."""
        self._adopted: set[str] = set()
        """Requests that another host was to send to this engine's host."""
        self._down_reason: BaseException | None = None
        self._link = HostLink(
            pool,
            engine.name,
            hello,
            on_events=self._receive_all,
            on_refused=self._order_refused,
            on_found=self._host_found,
            on_gone=self._fail_all,
        )

    @property
    def engine(self) -> SharedEngine:
        return self._engine

    @property
    def traffic(self) -> tuple[int, int]:
        """Bytes sent and received."""
        return self._link.sent_bytes, self._link.received_bytes

    async def open(self) -> EngineFacts:
        """Connect to the host. Raises `EngineUnavailable`."""
        return await self._link.open()

    async def close(self) -> None:
        """Disconnect. Requests that are left fail as unavailable."""
        for task in self._tasks:
            task.cancel()
        await self._link.close()
        self._fail_all(pool_closed(self.name))

    # ------------------------------------------------------------ orders

    def enqueue(
        self,
        entries: Sequence[EngineRequest],
        event: Enqueue,
        primitive: Primitive | None = None,
        followers: tuple[Follow, ...] = (),
    ) -> None:
        """Send the requests of one primitive, and what follows it."""
        if self._down_reason is not None:
            for entry in entries:
                self._listener.on_end(entry, None, self._down_reason)
            return
        for entry in entries:
            self._unfinished.add(entry, event)
        self._link.send(Submit(event, tuple(entry.request for entry in entries), primitive, followers))

    def expect(self, name: str, event: Enqueue) -> None:
        """Record that a follower was announced: events of its requests may come before the graph dispatches it."""
        self._expected[name] = event

    def adopt(self, name: str, entries: Sequence[EngineRequest], event: Enqueue) -> None:
        """Record that the graph has dispatched the follower: its requests are these entries, in order."""
        announced = self._expected.pop(name, None)
        for entry in entries:
            self._unfinished.add(entry, event)
            self._adopted.add(entry.request.id)
        if announced is not None and _urgency(announced) != _urgency(event):
            depth, objective, gang = _urgency(event)
            self.depths(
                DepthChanged(event.at, event.query, {event.primitive: depth}, {event.primitive: (objective, gang)})
            )
        for entry in entries:
            for news in self._unclaimed_events.pop(entry.request.id, ()):
                self._receive(news)

    def disown(self, name: str, count: int = 0) -> None:
        """Cancel a follower that is not needed, or whose requests are made otherwise."""
        self._expected.pop(name, None)
        requests = [key for key in self._unclaimed_events if follower_of(key) == name]
        for request in requests:
            del self._unclaimed_events[request]
        self._link.send(Cancel((name, *(follower_request(name, n) for n in range(count)))))

    def holds(self, entry: EngineRequest) -> bool:
        """Return True if the request has not ended."""
        return entry.request.id in self._unfinished

    def cancel(self, entries: Sequence[EngineRequest]) -> None:
        """Mark requests as cancelled, and send the engine's host the order to cancel them, without waiting for it."""
        for entry in entries:
            entry.is_cancelled = True
        self._link.send(Cancel(tuple(entry.request.id for entry in entries)))

    @property
    def takes_late_readers(self) -> bool:
        return bool(self._engine.facts.settings.get("takes_late_readers"))

    def announce_reader(self, entries: Sequence[EngineRequest]) -> None:
        self._link.send(Listen(tuple((entry.request.id, len(entry.stream.text)) for entry in entries)))

    def depths(self, event: DepthChanged) -> None:
        self._unfinished.update_depth(event)
        self._link.send(UpdateDepths(event))

    # ------------------------------------------------------------ events

    def _receive_all(self, messages: list[RequestEvent]) -> None:
        """Handle the events. One that the runtime cannot take fails its request alone."""
        for news in messages:
            try:
                self._receive(news)
            except Exception as error:
                log.exception("engine %s: news of request %s cannot be taken", self.name, news.request)
                if pair := self._unfinished.get(news.request):
                    self._end(pair[0], None, not_accepted(self.name, error))

    def _receive(self, news: RequestEvent) -> None:
        """Handle one event of the host: report to the runtime that a request started, made progress or ended.

        Events of announced followers that the graph has not dispatched yet are kept for `adopt`; those of other unknown
        requests, which have ended, are dropped. A request whose input values were lost is sent again with the values.
        """
        pair = self._unfinished.get(news.request)
        if pair is None:
            if follower_of(news.request) in self._expected:
                self._unclaimed_events.setdefault(news.request, []).append(news)
            return
        entry = pair[0]
        if isinstance(news, RequestStarted):
            self._listener.on_start(entry, news.replica, news.batch)
        elif isinstance(news, RequestPiece):
            self._on_piece(entry, news.piece)
        elif isinstance(news, RequestEnded) and isinstance(news.error, ValueLost):
            self._spawn(self._send_values(*pair))
        elif isinstance(news, RequestEnded):
            if isinstance(news.value, RayValue):
                news.value.remake = partial(self._request_again, entry.request, pair[1])
            self._on_end(entry, news)

    def _on_piece(self, entry: EngineRequest, piece: Piece) -> None:
        """Pass the new part of a streamed piece on to the runtime.

        Fail the request if, made again after its host was lost, it writes another text than it did before.
        """
        try:
            fresh = entry.new_part(piece)
        except EngineError as mismatch:  # after its host was lost
            self.cancel([entry])
            self._end(entry, None, mismatch)
        else:
            self._listener.on_piece(entry, fresh)

    def _on_end(self, entry: EngineRequest, news: RequestEnded) -> None:
        """End a request as its host reports it; with an error if a retry's result differs from what was delivered."""
        try:
            entry.check_result(news.value)
            entry.search.version, entry.stream.cuts = news.version, news.cuts
        except EngineError as mismatch:
            self._end(entry, None, mismatch)
        else:
            self._end(entry, news.value, news.error)

    def _end(self, entry: EngineRequest, value: Any, error: BaseException | None) -> None:
        """End a request with its value or error: forget it here, and tell the runtime."""
        self._unfinished.end(entry.request.id)
        self._adopted.discard(entry.request.id)
        self._listener.on_end(entry, value, error)

    def _order_refused(self, order: Order, error: Exception) -> None:
        """Fail the requests of an order that cannot be pickled."""
        for name in request_ids(order):
            if pair := self._unfinished.get(name):
                self._end(pair[0], None, not_picklable(self.name, error))

    # ------------------------------------------------------------ values that are kept elsewhere

    async def _request_again(self, request: Request, event: Enqueue) -> Any:
        """Return the value of an ended request, made again because it was lost. Raises what the engine raises."""
        repeated = replace(request, id=request_id(request.query), keep_remote=False)
        work, future = EngineRequest(repeated, self.name, None, event.primitive), Future[list[Any]]()
        work.claims.open_by_original = 1
        PendingCall([work], future)
        self.enqueue([work], replace(event, requests=()))
        [value] = await asyncio.wrap_future(future)
        return value

    async def _send_values(self, entry: EngineRequest, event: Enqueue) -> None:
        """Send a request again with the values that it reads in place of lost references. Withdraws its followers."""
        self._withdraw()
        try:
            payload = entry.request.payload
            entry.request = replace(
                entry.request, payload=with_values(payload, await fetch_or_remake(remote_values_in(payload)))
            )
        except Exception as error:
            self._end(entry, None, error)
        else:
            if entry.is_cancelled:
                self._end(entry, None, EngineError("the request was cancelled.", engine=self.name))
            elif self.holds(entry):
                self.enqueue([entry], replace(event, requests=()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    # ------------------------------------------------------------ loss of the host

    def _host_found(self, facts: EngineFacts) -> None:
        """Send unfinished requests to a new host if they may be repeated; fail the others."""
        self.engine.take(facts)
        self._withdraw()
        self._on_host_lost()
        unfinished, self._unfinished = list(self._unfinished), UnfinishedRequests()
        for entry, event in unfinished:
            if entry.can_be_repeated:
                entry.retry()
                self.enqueue([entry], replace(event, requests=()))
            else:
                self._end(entry, None, self._unrepeatable())

    def _fail_all(self, reason: BaseException) -> None:
        """Fail all unfinished requests with this reason, and from now on every new one as soon as it is enqueued."""
        self._down_reason = reason
        for entry, _ in self._unfinished:
            self._end(entry, None, reason)

    def resend(self) -> None:
        """Send adopted requests again after another engine's host was lost: it may not have sent them. A host takes a
        request once."""
        for name in self._adopted:
            if pair := self._unfinished.get(name):
                self._link.send(Submit(pair[1], (pair[0].request,)))

    def _unrepeatable(self) -> EngineError:
        """Return the error for a request that was lost with its host and may not be sent again, such as one that
        writes."""
        return EngineUnavailable(
            f"the line to the host of engine {self.name!r} was lost during a request that cannot be repeated.",
            engine=self.name,
            retryable=True,
            hint="ask again",
        )


def _urgency(event: Enqueue) -> tuple[int, Objective, str]:
    """Return the values that may have changed since a primitive was announced."""
    return event.depth, event.objective, event.gang
