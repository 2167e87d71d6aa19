"""One engine in the cluster: its scheduler, shared by every client, and its replicas. An actor without policy of its
own.

The scheduler and the code that carries out its instructions are those of the local runtime (`EngineScheduler` in an
`EnginePort`); only the replicas are elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from teola_plugin.cluster.config import EngineConfig
from teola_plugin.cluster.connection import actor, was_restarted
from teola_plugin.cluster.host.clients import SILENCE, Client, Clients
from teola_plugin.cluster.host.followers import Followers
from teola_plugin.cluster.host.remote_replica import RemoteReplica, start_replicas, stop_replicas
from teola_plugin.cluster.host.scaling import ANSWER_TIMEOUT_S, HEALTH_CHECK_INTERVAL_S, Health, Scaler
from teola_plugin.cluster.names import actor_name, engine_spec, replica_options
from teola_plugin.cluster.wire import (
    PROTOCOL,
    Cancel,
    EngineFacts,
    Hello,
    Listen,
    Order,
    Parcel,
    RequestEnded,
    RequestEvent,
    RequestPiece,
    RequestStarted,
    Submit,
    UpdateDepths,
    not_accepted,
    not_picklable,
    pack,
    request_ids,
    sendable,
    unpack,
    unpack_orders,
)
from teola_plugin.errors import EngineError, EngineUnavailable
from teola_plugin.requests.payloads import Piece, Request
from teola_plugin.runtime.engine_requests import EngineRequest
from teola_plugin.runtime.ports.batches import Patience
from teola_plugin.runtime.ports.engine_port import EnginePort
from teola_plugin.runtime.ports.port import PortListener
from teola_plugin.scheduling import POLICIES
from teola_plugin.scheduling.engine_queue import CacheUse, DepthChanged, Enqueue

MAX_BATCHES = 512


class BatchLog:
    """The last batches of an engine, oldest first, as plain data: they show queries of several apps in one batch."""

    def __init__(self) -> None:
        self._batches: deque[dict[str, Any]] = deque(maxlen=MAX_BATCHES)

    def add_request(self, batch: int, replica: str, client: str, app: str, primitive: str) -> None:
        """Record a request of the batch with that number."""
        if not self._batches or self._batches[-1]["batch"] != batch:
            self._batches.append({"batch": batch, "replica": replica, "at": time.time(), "apps": [], "members": []})
        last = self._batches[-1]
        last["members"].append((client, app, primitive))
        if app not in last["apps"]:
            last["apps"].append(app)

    def rows(self) -> list[dict[str, Any]]:
        """Return number, replica, wall time, apps, and (client, app, primitive) of each request."""
        return list(self._batches)


log = logging.getLogger("teola_plugin")


class EngineHost:
    """The actor of one engine. Its methods are called by clients, other hosts and `teola`."""

    def __init__(self, pool: str, name: str, settings: Mapping[str, Any]) -> None:
        self.pool, self.name = pool, name
        self.config = EngineConfig.model_validate(settings)
        self.replicas: dict[str, RemoteReplica] = {}
        self.clients = Clients()
        self.silence = SILENCE
        self._batches = BatchLog()
        self.facts: EngineFacts | None = None
        self._port: EnginePort | None = None
        self._followers = Followers(name, self._follow, self._forward)
        self._hosts: dict[str, Any] = {}
        self._health = Health(self._replicas, self._lose_replica, self._check_caches_and_clients)
        self._scaler = Scaler(self)
        self._starting = asyncio.Lock()
        self._pending_starts: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------ life

    async def start(self) -> EngineFacts:
        """Start all replicas, side by side. Idempotent. Raises `EngineUnavailable`.

        A host that was lost and made again goes on with the first replica that is up: the room for the others may be
        lost with a node.
        """
        async with self._starting:
            if self._port is None:
                replicas = {str(n): self.make_replica(str(n)) for n in range(self.config.replicas)}
                self.replicas, pending = await start_replicas(replicas, all_needed=not was_restarted())
                self._open()
                self._pending_starts = [
                    asyncio.ensure_future(self._join(n, replicas[n], start)) for n, start in pending.items()
                ]
        assert self.facts is not None
        return self.facts

    async def _join(self, number: str, replica: RemoteReplica, start: asyncio.Task[None]) -> None:
        """Add a replica once its start has succeeded, for replicas that still start when the engine is already in use.

        If the start fails, go on without the replica; if it is cancelled, stop the replica.
        """
        try:
            await start
        except EngineUnavailable as error:
            log.warning("engine %s goes on without replica %s: %s", self.name, number, error)
        except asyncio.CancelledError:
            await stop_replicas({number: replica}, {number: start})
            raise
        else:
            self.add(number, replica)

    def add(self, number: str, replica: RemoteReplica) -> None:
        """Add a replica that is up: it gets work from now on."""
        self.replicas[number] = replica
        self.port.add(number, replica)

    def make_replica(self, number: str) -> RemoteReplica:
        options = replica_options(self.config)
        return RemoteReplica(self.name, number, engine_spec(self.name, self.config), options)

    def _open(self) -> None:
        """Create the port, with the scheduler, over the replicas that are up; start health checks and autoscaling."""
        policy = POLICIES[self.config.policy]()
        listener = PortListener(self._request_started, self._piece_came, self._request_ended)
        self._port = EnginePort(
            self.name,
            self.replicas,
            listener,
            policy=policy,
            max_queued=self.config.max_queued,
            restarts=8,
            patience=Patience(
                cancel=Patience().silence
            ),  # a batch may come back whole: health checks find replicas that hang
        )
        first = next(iter(self.replicas.values()))
        if first.facts is not None:
            self.facts = replace(first.facts, name=self.name, replicas=tuple(self.replicas))
        self._health.begin()
        self._scaler.begin()

    async def stop(self) -> None:
        """End every replica; requests that clients still wait for fail as unavailable. Idempotent."""
        self._health.end()
        self._scaler.end()
        for task in self._pending_starts:
            task.cancel()
        await asyncio.gather(*self._pending_starts, return_exceptions=True)
        port, self._port = self._port, None
        if port is not None:
            await port.close()
        await asyncio.gather(*(replica.stop() for replica in self.replicas.values()))
        self.clients.close()

    @property
    def port(self) -> EnginePort:
        """The port that schedules the engine's requests on the replicas that are up.

        Raise `EngineUnavailable` before the host has started the engine, and after it was stopped.
        """
        if self._port is None:
            raise self._unavailable()
        return self._port

    # ------------------------------------------------------------ clients

    async def hello(self, hello: Hello) -> EngineFacts:
        """Greet a client. Raises `EngineError` if it speaks another protocol."""
        if hello.protocol != PROTOCOL:
            raise EngineError(
                f"the pool {self.pool!r} speaks protocol {PROTOCOL}, this client {hello.protocol} "
                f"(teola-plugin {hello.package}).",
                engine=self.name,
                hint="use the same version of teola-plugin in the app and in the pool",
            )
        facts = await self.start()
        client = self.clients.get(hello.client)
        if client is None or client.greeting < hello.greeting:  # a greeting may come late, after the next one
            await self.leave(hello.client)  # one that greets again sends its requests again
            self.clients.add(hello.client, hello.greeting)
        return facts

    async def news(self, client: str, greeting: int) -> Parcel | None:
        """Return the events of the client's requests since its last call, as soon as there are any.

        They are a parcel that begins with its number, from 1; None if the client is not known (any more) and has to
        greet. Clients keep calling, so that the host never waits for one of them. (Ray's streams wait for their owner
        when they end: the whole actor stood still when a client did.)
        """
        known_client = self.clients.get(client, greeting)
        if known_client is None:
            return None
        known_client.beat()
        numbered_events = await known_client.outbox.take()
        return self._pack_events(*numbered_events) if numbered_events is not None else None

    def _pack_events(self, number: int, messages: Sequence[RequestEvent]) -> Parcel:
        """Return a numbered parcel of events; an event that cannot be pickled becomes a failure of its request."""
        try:
            return pack([number, *messages])
        except Exception:  # one of them cannot be pickled: the others are sent
            return pack([number, *(sendable(self.name, event) for event in messages)])

    async def leave(self, client: str) -> None:
        """Forget a client, and cancel its requests."""
        former_client = self.clients.remove(client)
        if former_client is not None and self._port is not None:
            self._followers.forget(client)
            self._port.cancel(list(former_client.entries.values()))

    async def beat(self, client: str) -> None:
        """Record a sign of life of the client."""
        if (known_client := self.clients.get(client)) is not None:
            known_client.beat()

    async def _check_caches_and_clients(self) -> None:
        """Report how full the caches are, and give up silent clients. Runs after every health check."""
        for name, replica in self.replicas.items():
            if self._port is not None and replica.load().kv_used:
                self._port.tell(CacheUse(self._now(), name, replica.load().kv_used))
        for client in self.clients:
            if client.is_lost(self.silence):
                log.warning("engine %s: client %s has gone silent", self.name, client.id)
                await self.leave(client.id)

    async def orders(self, client: str, greeting: int, number: int, parcel: Parcel) -> None:
        """Handle a parcel of a client. Parcels are numbered from 1: large ones may be overtaken by small ones."""
        sender = self.clients.get(client, greeting)
        if sender is None:
            return  # it was given up: it learns so at its next call, greets and sends its requests again
        for ready in sender.in_order(number, parcel):
            for names, order in unpack_orders(ready):
                if isinstance(order, Exception):
                    self._refuse(sender, names, not_picklable(self.name, order))
                else:
                    self._carry_out_or_refuse(sender, order)

    async def forwarded(self, client: str, parcel: Parcel) -> None:
        """Queue followers of primitives of another engine.

        The host of another engine calls this with orders of type `Submit`: the engines' hosts pass them on to each
        other, so that a follower need not wait for its client.
        """
        for order in unpack(parcel):
            self._follow(client, order)

    def _follow(self, client: str, order: Submit) -> None:
        """Queue the follower of a primitive of this engine or of another."""
        if (sender := self.clients.get(client)) is not None:
            self._carry_out_or_refuse(sender, order)

    def _carry_out_or_refuse(self, sender: Client, order: Order) -> None:
        """Carry out an order. One that raises fails alone: its requests, and nothing that comes after it."""
        try:
            self._carry_out(sender, order)
        except Exception as error:
            log.warning("engine %s cannot take an order of client %s", self.name, sender.id, exc_info=True)
            self._refuse(sender, request_ids(order), not_accepted(self.name, error))

    def _refuse(self, sender: Client, names: Sequence[str], error: BaseException) -> None:
        """Fail requests that cannot be read or queued: tell the client, and cancel those that the port already has."""
        for name in names:
            entry = sender.entries.get(name)
            sender.remove_request(name)
            sender.send_event(RequestEnded(name, None, error))
            self._followers.end_request(sender.id, name, None, error)
            if entry is not None and self._port is not None:
                self._port.cancel([entry])

    def _carry_out(self, sender: Client, order: Order) -> None:
        """Carry out an order of a client: queue requests, cancel them, begin to stream them, or change depths."""
        if isinstance(order, Submit):
            self._queue(sender, order)
        elif isinstance(order, Cancel):
            self._cancel(sender, order)
        elif isinstance(order, Listen):
            self._listen(sender, order)
        elif isinstance(order, UpdateDepths) and self._port is not None:
            event = order.event
            objectives = {
                name: (objective, sender.unique_group(gang)) for name, (objective, gang) in event.objectives.items()
            }
            self._port.depths(DepthChanged(self._now(), sender.unique_name(event.query), event.depths, objectives))

    def _listen(self, sender: Client, order: Listen) -> None:
        """Send the text that exists already, and stream the rest: it can no longer be taken back."""
        for request, known_length in order.requests:
            entry = sender.entries.get(request)
            if entry is None or entry.request.stream:
                continue
            entry.request, entry.stream.is_passed_on = replace(entry.request, stream=True), True
            if len(entry.stream.text) > known_length:
                sender.send_event(RequestPiece(request, Piece(request, entry.stream.text[known_length:])))
            if self._port is not None:
                self._port.announce_reader([entry])

    def _cancel(self, sender: Client, order: Cancel) -> None:
        """Cancel the requests of a client's order, and the followers that are not queued yet."""
        self._followers.cancel(sender.id, order.requests)
        entries = [sender.entries[request] for request in order.requests if request in sender.entries]
        if entries and self._port is not None:
            self._port.cancel(entries)

    def _queue(self, sender: Client, order: Submit) -> None:
        """Queue the requests of one primitive in the scheduler, and remember the primitives that follow it.

        Requests that the host has already are left out, since clients repeat orders. Names of queries, sessions and
        gangs are made unique among clients.
        """
        new_requests = [
            request for request in order.requests if request.id not in sender.entries
        ]  # requests may be repeated
        entries = [self._entry(sender, request, order.event) for request in new_requests]
        if order.then and order.primitive is not None:
            self._followers.expect(sender.id, order)
        event = order.event
        own_event = replace(
            event,
            at=self._now(),
            query=sender.unique_name(event.query),
            session=sender.unique_group(event.session),
            gang=sender.unique_group(event.gang),
        )
        if self._port is None:
            for entry in entries:
                self._request_ended(entry, None, self._unavailable())
            return
        self._port.enqueue(entries, own_event)

    def _unavailable(self) -> EngineUnavailable:
        """Return the error for the use of an engine that is not started or has been stopped."""
        return EngineUnavailable(
            f"engine {self.name!r} of pool {self.pool!r} is not running.",
            engine=self.name,
            retryable=True,
            hint="`teola status` shows whether it is starting",
        )

    @staticmethod
    def _entry(sender: Client, request: Request, event: Enqueue) -> EngineRequest:
        """Return the entry for a request. Ids are unique in one client only; here they are prefixed with its name."""
        own_request = replace(request, id=sender.unique_name(request.id), query=sender.unique_name(request.query))
        entry = EngineRequest(own_request, "", None, event.primitive)
        entry.stream.is_passed_on = own_request.stream
        sender.add_request(request.id, entry, event.app)
        return entry

    def _forward(self, client: str, engine: str, order: Submit) -> None:
        """Send a follower to the host of another engine of the pool, which queues it for the same client."""
        host = self._hosts.get(engine)
        if host is None:
            host = self._hosts[engine] = actor(actor_name(self.pool, engine))
        host.forwarded.remote(client, pack([order]))

    # ------------------------------------------------------------ events of the port

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _request_started(self, entry: EngineRequest, replica: str, batch: int) -> None:
        """Report to the client that a replica began its request, and record the request in the log of batches.

        The port calls it. Nothing is reported for a client that has left.
        """
        sender, request = self.clients.of(entry)
        if sender is not None:
            app = sender.apps.get(entry.request.id, "")
            self._batches.add_request(batch, replica, sender.id, app, entry.primitive)
            sender.send_event(RequestStarted(request, replica, batch))

    def _piece_came(self, entry: EngineRequest, piece: Piece) -> None:
        """Send a streamed piece to the client, without its text if the client does not stream the request."""
        sender, request = self.clients.of(entry)
        if sender is None:
            return
        client_piece = replace(piece, request_id=request)
        # The first piece is reported in any case: it ends the prefilling. Text that nobody reads stays here.
        sender.send_event(
            RequestPiece(request, client_piece if entry.request.stream else replace(client_piece, text=""))
        )

    def _request_ended(self, entry: EngineRequest, value: Any, error: BaseException | None) -> None:
        """Send a request's value or error to its client, and queue the followers that waited for it."""
        entry.resolve(value, error)
        sender, request = self.clients.of(entry)
        if sender is None:
            return
        sender.remove_request(request)
        sender.send_event(RequestEnded(request, value, error, entry.search.version, entry.stream.cuts))
        self._followers.end_request(sender.id, request, value, error)

    # ------------------------------------------------------------ replicas

    def _replicas(self) -> Mapping[str, RemoteReplica]:
        return self.replicas

    def _lose_replica(self, replica: str, reason: str) -> None:
        """Repeat elsewhere the requests of a replica that hangs or is gone, as its health check found."""
        if self._port is not None:
            self._port.lose(replica, reason)

    def watch_closely(
        self, every: float = HEALTH_CHECK_INTERVAL_S, patience: float = ANSWER_TIMEOUT_S, silence: float = SILENCE
    ) -> None:
        """Change the seconds between two health checks, for an answer, and for a sign of life of a client.

        All are in seconds. Tests call this to see a lost replica or client sooner.
        """
        self._health.every, self._health.patience, self.silence = every, patience, silence
        self._health.begin()

    async def scale(self, target: int) -> int:
        """Add or remove replicas while queries run. Returns their number."""
        return await self._scaler.scale_to(target)

    async def admin(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call a coroutine method of the engine that is no request, on its first replica."""
        first = next(iter(self.replicas.values()))
        return await first.admin(method, args)

    async def reset(self) -> None:
        await asyncio.gather(*(replica.reset() for replica in self.replicas.values()))

    async def forget(self, tenant: str) -> None:
        await asyncio.gather(*(replica.forget(tenant) for replica in self.replicas.values()))

    def status(self) -> dict[str, Any]:
        """Return plain data for `teola status`."""
        port = self._port
        scheduler = port.scheduler if port is not None else None
        return {
            "engine": self.name,
            "running": port is not None,
            "kinds": sorted(kind.value for kind in self.facts.kinds) if self.facts else [],
            "versions": dict(self.facts.versions) if self.facts else {},
            "queued": sum(len(q.requests) for q in scheduler.queue) if scheduler else 0,
            "clients": len(self.clients),
            "replicas": [
                {
                    "replica": name,
                    "up": scheduler is not None and name in scheduler.replicas,
                    "node": replica.node,
                    "pid": replica.pid,
                    "running": len(scheduler.running.at(name).requests) if scheduler else 0,
                    "kv_used": replica.load().kv_used,
                }
                for name, replica in self.replicas.items()
            ],
        }

    def recent_batches(self) -> list[dict[str, Any]]:
        """Return the last batches (see `BatchLog.rows`)."""
        return self._batches.rows()
