"""One engine in the cluster: its scheduler, shared by every client, and its instances. An actor; no policy here.

The scheduler and the code that carries out its instructions are those of the local runtime (`EngineScheduler` in an
`EnginePort`); only the instances are elsewhere.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from teola_plugin.cluster.config import EngineConfig
from teola_plugin.cluster.connection import actor, was_restarted
from teola_plugin.cluster.host.batch_log import BatchLog
from teola_plugin.cluster.host.clients import SILENCE, Client, Clients
from teola_plugin.cluster.host.followers import Followers
from teola_plugin.cluster.host.health import EVERY, PATIENCE, Health
from teola_plugin.cluster.host.instance_starts import start_instances, stop_instances
from teola_plugin.cluster.host.remote_instance import RemoteInstance
from teola_plugin.cluster.host.scaling import Scaler
from teola_plugin.cluster.names import actor_name, engine_spec, instance_options
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
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Piece
from teola_plugin.runtime.engine_requests.engine_request import EngineRequest
from teola_plugin.runtime.ports.engine_port import EnginePort
from teola_plugin.runtime.ports.port import PortListener
from teola_plugin.runtime.ports.watchdog import Patience
from teola_plugin.scheduling import POLICIES
from teola_plugin.scheduling.engine_events import CacheUse, DepthChanged, Enqueue

log = logging.getLogger("teola_plugin")


class EngineHost:
    """The actor of one engine. Its methods are what clients, other hosts and `teola` call."""

    def __init__(self, pool: str, name: str, settings: Mapping[str, Any]) -> None:
        self.pool, self.name = pool, name
        self.config = EngineConfig.model_validate(settings)
        self.instances: dict[str, RemoteInstance] = {}
        self.clients = Clients()
        self.silence = SILENCE
        self._batches = BatchLog()
        self.facts: EngineFacts | None = None
        self._port: EnginePort | None = None
        self._followers = Followers(name, self._follow, self._forward)
        self._hosts: dict[str, Any] = {}
        self._health = Health(self._instances, self._lost, self._look_around)
        self._scaler = Scaler(self)
        self._starting = asyncio.Lock()
        self._coming: list[asyncio.Task[None]] = []

    # ------------------------------------------------------------ life

    async def start(self) -> EngineFacts:
        """Start all instances, side by side. Idempotent. Raises `EngineUnavailable`.

        A host that was lost and is here again goes on with the first that is up: with a node, the room for the others
        may be lost, too.
        """
        async with self._starting:
            if self._port is None:
                made = {str(n): self.make_instance(str(n)) for n in range(self.config.instances)}
                self.instances, coming = await start_instances(made, every=not was_restarted())
                self._open()
                self._coming = [asyncio.ensure_future(self._join(n, made[n], start)) for n, start in coming.items()]
        assert self.facts is not None
        return self.facts

    async def _join(self, number: str, instance: RemoteInstance, start: asyncio.Task[None]) -> None:
        try:
            await start
        except EngineUnavailable as error:
            log.warning("engine %s goes on without instance %s: %s", self.name, number, error)
        except asyncio.CancelledError:
            await stop_instances({number: instance}, {number: start})
            raise
        else:
            self.add(number, instance)

    def add(self, number: str, instance: RemoteInstance) -> None:
        """One more that is up: it gets work from now on."""
        self.instances[number] = instance
        self.port.add(number, instance)

    def make_instance(self, number: str) -> RemoteInstance:
        options = instance_options(self.config)
        return RemoteInstance(self.name, number, engine_spec(self.name, self.config), options)

    def _open(self) -> None:
        policy = POLICIES[self.config.policy]()
        listener = PortListener(self._started, self._said, self._ended)
        self._port = EnginePort(
            self.name,
            self.instances,
            listener,
            policy=policy,
            max_queued=self.config.max_queued,
            restarts=8,
            patience=Patience(cancel=Patience().silence),  # a batch may come back as one: health checks find what hangs
        )
        first = next(iter(self.instances.values()))
        if first.facts is not None:
            self.facts = replace(first.facts, name=self.name, instances=tuple(self.instances))
        self._health.begin()
        self._scaler.begin()

    async def stop(self) -> None:
        """End every instance; what clients still wait for fails as unavailable. Idempotent."""
        self._health.end()
        self._scaler.end()
        for task in self._coming:
            task.cancel()
        await asyncio.gather(*self._coming, return_exceptions=True)
        port, self._port = self._port, None
        if port is not None:
            await port.close()
        await asyncio.gather(*(instance.stop() for instance in self.instances.values()))
        self.clients.close()

    @property
    def port(self) -> EnginePort:
        if self._port is None:
            raise self._unavailable()
        return self._port

    # ------------------------------------------------------------ clients

    async def hello(self, hello: Hello) -> EngineFacts:
        """A client comes. Raises `EngineError` when it speaks another protocol."""
        if hello.protocol != PROTOCOL:
            raise EngineError(
                f"the pool {self.pool!r} speaks protocol {PROTOCOL}, this client {hello.protocol} "
                f"(teola-plugin {hello.package}).",
                engine=self.name,
                hint="use the same version of teola-plugin in the app and in the pool",
            )
        facts = await self.start()
        known = self.clients.get(hello.client)
        if known is None or known.greeting < hello.greeting:  # a greeting may come late, after the next one
            await self.leave(hello.client)  # one that comes again says anew what it wants
            self.clients.add(hello.client, hello.greeting)
        return facts

    async def news(self, client: str, greeting: int) -> Parcel | None:
        """What has happened to the client's requests since it heard the last time, as soon as something has: a parcel
        that begins with its number, from 1. None when the client is not known (any more): it has to greet.

        Clients keep asking, so that the host never waits for one of them. (Ray's streams wait for their owner when
        they end: the whole actor stood still when a client did.)
        """
        held = self.clients.get(client, greeting)
        if held is None:
            return None
        held.beat()
        taken = await held.outbox.take()
        return self._packed(*taken) if taken is not None else None

    def _packed(self, number: int, messages: Sequence[RequestEvent]) -> Parcel:
        try:
            return pack([number, *messages])
        except Exception:  # one of them cannot travel: the others must
            return pack([number, *(sendable(self.name, news) for news in messages)])

    async def leave(self, client: str) -> None:
        """The client is gone: nobody wants its requests."""
        gone = self.clients.remove(client)
        if gone is not None and self._port is not None:
            self._followers.forget(client)
            self._port.cancel(list(gone.entries.values()))

    async def beat(self, client: str) -> None:
        """The client lives."""
        if (held := self.clients.get(client)) is not None:
            held.beat()

    async def _look_around(self) -> None:
        """Beside every health check: how full the caches are, and who has not been heard of for long."""
        for name, instance in self.instances.items():
            if self._port is not None and instance.load().kv_used:
                self._port.tell(CacheUse(self._now(), name, instance.load().kv_used))
        for client in self.clients:
            if client.lost(self.silence):
                log.warning("engine %s: client %s has gone silent", self.name, client.id)
                await self.leave(client.id)

    async def orders(self, client: str, greeting: int, number: int, parcel: Parcel) -> None:
        """Messages of a client, numbered from 1: large parcels may overtake small ones on the way."""
        sender = self.clients.get(client, greeting)
        if sender is None:
            return  # it was given up; it learns so when it asks for news, and says again what it wants
        for ready in sender.in_order(number, parcel):
            for names, order in unpack_orders(ready):
                if isinstance(order, Exception):
                    self._refuse(sender, names, not_picklable(self.name, order))
                else:
                    self._take(sender, order)

    async def forwarded(self, client: str, parcel: Parcel) -> None:
        """What follows a primitive of another engine."""
        for order in unpack(parcel):
            self._follow(client, order)

    def _follow(self, client: str, order: Submit) -> None:
        """What follows a primitive of this engine or of another."""
        if (sender := self.clients.get(client)) is not None:
            self._take(sender, order)

    def _take(self, sender: Client, order: Order) -> None:
        """An order that raises fails alone: its requests, by their names, and nothing that comes after it."""
        try:
            self._obey(sender, order)
        except Exception as error:
            log.warning("engine %s cannot take an order of client %s", self.name, sender.id, exc_info=True)
            self._refuse(sender, request_ids(order), not_accepted(self.name, error))

    def _refuse(self, sender: Client, names: Sequence[str], error: BaseException) -> None:
        for name in names:
            entry = sender.entries.get(name)
            sender.let_go(name)
            sender.tell(RequestEnded(name, None, error))
            self._followers.ended(sender.id, name, None, error)
            if entry is not None and self._port is not None:
                self._port.cancel([entry])

    def _obey(self, sender: Client, order: Order) -> None:
        if isinstance(order, Submit):
            self._queue(sender, order)
        elif isinstance(order, Cancel):
            self._cancel(sender, order)
        elif isinstance(order, Listen):
            self._listen(sender, order)
        elif isinstance(order, UpdateDepths) and self._port is not None:
            event = order.event
            wanted = {name: (said, sender.own_group(gang)) for name, (said, gang) in event.objectives.items()}
            self._port.depths(DepthChanged(self._now(), sender.own(event.query), event.depths, wanted))

    def _listen(self, sender: Client, order: Listen) -> None:
        """What was written meanwhile goes out now, and from now on can no more be taken back."""
        for request, heard in order.requests:
            entry = sender.entries.get(request)
            if entry is None or entry.request.stream:
                continue
            entry.request, entry.stream.is_passed_on = replace(entry.request, stream=True), True
            if len(entry.stream.text) > heard:
                sender.tell(RequestPiece(request, Piece(request, entry.stream.text[heard:])))
            if self._port is not None:
                self._port.listen([entry])

    def _cancel(self, sender: Client, order: Cancel) -> None:
        self._followers.cancel(sender.id, order.requests)
        held = [sender.entries[request] for request in order.requests if request in sender.entries]
        if held and self._port is not None:
            self._port.cancel(held)

    def _queue(self, sender: Client, order: Submit) -> None:
        fresh = [request for request in order.requests if request.id not in sender.entries]  # it may be asked again
        entries = [self._entry(sender, request, order.event) for request in fresh]
        if order.then and order.primitive is not None:
            self._followers.expect(sender.id, order)
        event = order.event
        mine = replace(
            event,
            at=self._now(),
            query=sender.own(event.query),
            session=sender.own_group(event.session),
            gang=sender.own_group(event.gang),
        )
        if self._port is None:
            for entry in entries:
                self._ended(entry, None, self._unavailable())
            return
        self._port.enqueue(entries, mine)

    def _unavailable(self) -> EngineUnavailable:
        return EngineUnavailable(
            f"engine {self.name!r} of pool {self.pool!r} is not running.",
            engine=self.name,
            retryable=True,
            hint="`teola status` shows whether it is starting",
        )

    @staticmethod
    def _entry(sender: Client, request: Request, event: Enqueue) -> EngineRequest:
        """Ids are unique in one client only; here they get its name before them."""
        mine = replace(request, id=sender.own(request.id), query=sender.own(request.query))
        entry = EngineRequest(mine, "", None, event.primitive)
        entry.stream.is_passed_on = mine.stream
        sender.hold(request.id, entry, event.app)
        return entry

    def _forward(self, client: str, engine: str, order: Submit) -> None:
        host = self._hosts.get(engine)
        if host is None:
            host = self._hosts[engine] = actor(actor_name(self.pool, engine))
        host.forwarded.remote(client, pack([order]))

    # ------------------------------------------------------------ what the port tells

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()

    def _started(self, entry: EngineRequest, instance: str, batch: int) -> None:
        sender, request = self.clients.of(entry)
        if sender is not None:
            app = sender.apps.get(entry.request.id, "")
            self._batches.note(batch, instance, sender.id, app, entry.primitive)
            sender.tell(RequestStarted(request, instance, batch))

    def _said(self, entry: EngineRequest, piece: Piece) -> None:
        sender, request = self.clients.of(entry)
        if sender is None:
            return
        told = replace(piece, request_id=request)
        # That there is a first piece is told in any case: it ends the prefilling. What nobody reads stays here.
        sender.tell(RequestPiece(request, told if entry.request.stream else replace(told, text="")))

    def _ended(self, entry: EngineRequest, value: Any, error: BaseException | None) -> None:
        entry.resolve(value, error)
        sender, request = self.clients.of(entry)
        if sender is None:
            return
        sender.let_go(request)
        sender.tell(RequestEnded(request, value, error, entry.search.version, entry.stream.cuts))
        self._followers.ended(sender.id, request, value, error)

    # ------------------------------------------------------------ instances

    def _instances(self) -> Mapping[str, RemoteInstance]:
        return self.instances

    def _lost(self, instance: str, reason: str) -> None:
        """An instance hangs or is gone, seen by its health check: what runs there is done again elsewhere."""
        if self._port is not None:
            self._port.lose(instance, reason)

    def watch_closely(self, every: float = EVERY, patience: float = PATIENCE, silence: float = SILENCE) -> None:
        """Other seconds between two health checks, for the answer to one, and for a sign of life of a client."""
        self._health.every, self._health.patience, self.silence = every, patience, silence
        self._health.begin()

    async def scale(self, wanted: int) -> int:
        """Add or take away instances while queries run. Returns how many there are."""
        return await self._scaler.to(wanted)

    async def admin(self, method: str, args: tuple[Any, ...]) -> Any:
        """A coroutine method of the engine that is no request, on its first instance."""
        first = next(iter(self.instances.values()))
        return await first.admin(method, args)

    async def reset(self) -> None:
        await asyncio.gather(*(instance.reset() for instance in self.instances.values()))

    async def forget(self, tenant: str) -> None:
        await asyncio.gather(*(instance.forget(tenant) for instance in self.instances.values()))

    def status(self) -> dict[str, Any]:
        """Plain data for `teola status`."""
        port = self._port
        scheduler = port.scheduler if port is not None else None
        return {
            "engine": self.name,
            "running": port is not None,
            "kinds": sorted(kind.value for kind in self.facts.kinds) if self.facts else [],
            "versions": dict(self.facts.versions) if self.facts else {},
            "queued": sum(len(q.requests) for q in scheduler.queue) if scheduler else 0,
            "clients": len(self.clients),
            "instances": [
                {
                    "instance": name,
                    "up": scheduler is not None and name in scheduler.instances,
                    "node": instance.node,
                    "pid": instance.pid,
                    "running": len(scheduler.running.at(name).requests) if scheduler else 0,
                    "kv_used": instance.load().kv_used,
                }
                for name, instance in self.instances.items()
            ],
        }

    def recent_batches(self) -> list[dict[str, Any]]:
        """See `BatchLog.recent`."""
        return self._batches.recent()
