"""One replica of an engine, in an actor of its own. It executes batches and streams results; it never schedules."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from teola_plugin.cluster.client.shared_engine import settings_of
from teola_plugin.cluster.coalescing import coalesced
from teola_plugin.cluster.deployment.engine_factory import build_engine
from teola_plugin.cluster.remote_values import fetch_inputs, store_large
from teola_plugin.cluster.wire import EngineFacts, Parcel, pack, unpack
from teola_plugin.engines.base import Engine, announce_reader, forget
from teola_plugin.engines.profiles import calibrate
from teola_plugin.errors import EngineError
from teola_plugin.graph.device import on_host
from teola_plugin.graph.prefix_blocks import PrefixesCleared, PrefixEvents, PrefixRemoved, PrefixStored
from teola_plugin.requests.payloads import Failed, Request, Result
from teola_plugin.runtime.failures import too_large_error, unqueueable_error

MAX_EVENTS = 10_000
"""Events that wait for a parcel; beyond, the host is told that nothing is known."""


@dataclass(frozen=True, slots=True)
class CacheReport:
    """Events of a prefix cache, as one more message of a parcel."""

    news: PrefixEvents


class CacheReports:
    """The replica's end: collects the events of its engine, if it publishes any, until a parcel leaves."""

    def __init__(self, engine: Engine) -> None:
        self._events: list[PrefixStored | PrefixRemoved | PrefixesCleared] = []
        if hasattr(engine, "on_prefix_events"):
            engine.on_prefix_events = self._add_events

    def _add_events(self, events: PrefixEvents) -> None:
        """Collect events of the engine's prefix cache for the next report.

        More than `MAX_EVENTS` (10,000) are replaced by one that says that all prefixes were removed: an unknown prefix
        counts as not cached, so that the host's picture of the cache stays safe.
        """
        self._events.extend(events)
        if len(self._events) > MAX_EVENTS:
            self._events = [PrefixesCleared()]

    def take(self) -> list[CacheReport]:
        """Return the report for the next parcel, in a list; empty if there are no events."""
        events, self._events = tuple(self._events), []
        return [CacheReport(events)] if events else []


def without_reports(messages: Iterable[Any], on_events: Callable[[PrefixEvents], None] | None) -> Iterator[Any]:
    """Yield the results among the messages (the host's end), and pass the events of reports to `on_events`."""
    for message in messages:
        if not isinstance(message, CacheReport):
            yield message
        elif on_events is not None:
            on_events(message.news)


# ------------------------------------------------------------ the actor of a replica

PARCEL_INTERVAL_S = 0.02
"""Seconds of pieces that travel together: one message for each token would cost more than the token."""


class ReplicaHost:
    """The actor around an `Engine`. Errors leave it as this package's own, never as an engine library's."""

    def __init__(self, spec: Mapping[str, Any], replica: str) -> None:
        self.replica = replica
        self.engine: Engine = build_engine(spec, int(replica))
        self._reports = CacheReports(self.engine)
        self._is_read: dict[str, bool] = {}
        """Running requests, and whether somebody reads their pieces."""

    async def start(self) -> EngineFacts:
        """Start and calibrate the engine. Idempotent. Raises `EngineUnavailable`."""
        await self.engine.start()
        await calibrate(self.engine)
        return self.facts()

    def facts(self) -> EngineFacts:
        """Return the engine's facts, with the node in the name of its device: every node has a `cuda:0`."""
        engine, settings = self.engine, settings_of(self.engine)
        versions = dict(engine.versions())
        profile = replace(engine.profile, device=on_host(engine.profile.device, _node()))
        return EngineFacts(engine.name, engine.kinds, profile, versions, (self.replica,), settings)

    async def stop(self) -> None:
        await self.engine.stop()

    async def restart(self) -> None:
        """Restart the engine inside this actor, if it can be."""
        restart = getattr(self.engine, "restart", None)
        if restart is None:
            await self.engine.stop()
            await self.engine.start()
        else:
            await restart()

    def where(self) -> tuple[str, int]:
        """Return the ids of the node and the process."""
        return _node(), os.getpid()

    def ping(self) -> tuple[int, float, list[CacheReport]]:
        """Return the number of running requests, the share of the KV cache in use, and the reports on its prefixes."""
        load = self.engine.load()
        return load.requests, load.kv_used, self._reports.take()

    async def run(self, parcel: Parcel) -> Parcel:
        """Run a whole batch; return all results in the order in which they ended. Large values may stay here."""
        batch = unpack(parcel)
        results = [result async for result in self._results(batch)]
        stored_results = store_large(results, {request.id for request in batch if request.keep_remote})
        return pack([*stored_results, *self._reports.take()])

    async def stream(self, parcel: Parcel) -> AsyncIterator[Parcel]:
        """Yield results as they come, in parcels by time."""
        async for results in coalesced(self._results(unpack(parcel)), PARCEL_INTERVAL_S):
            yield pack([*results, *self._reports.take()])

    async def _results(self, requests: list[Request]) -> AsyncIterator[Result]:
        """Yield the results of a batch, and know meanwhile which of its requests have a reader for their pieces."""
        self._is_read.update({request.id: request.stream for request in requests})
        try:
            async for result in self._run_checked(requests):
                yield result
        finally:
            for request in requests:
                self._is_read.pop(request.id, None)

    async def _run_checked(self, requests: list[Request]) -> AsyncIterator[Result]:
        """Run a batch on the engine and yield its results.

        First fetch input values that other replicas keep. Requests with lost inputs, unusable payloads or more than the
        engine's `max_request_size` fail alone.
        """
        batch, failures = await fetch_inputs(requests)
        batch = [r if r.stream == self._is_read.get(r.id, r.stream) else replace(r, stream=True) for r in batch]
        for failed in failures:
            yield failed
        limit = self.engine.profile.max_request_size
        fitting = []
        for request in batch:
            try:
                size = self.engine.size(request)
            except Exception as error:
                yield _portable(Failed(request.id, unqueueable_error(error, request.kind, self.engine.name)))
                continue
            if limit is not None and size > limit:
                yield Failed(request.id, too_large_error(request.kind, size, limit, self.engine.name, self.replica))
            else:
                fitting.append(request)
        if fitting:
            async for result in self.engine.execute(fitting):
                yield _portable(result)

    async def announce_reader(self, request: str) -> None:
        """Record that somebody reads the request's pieces from now on.

        An unknown id is ignored: the request may have ended.
        """
        if request in self._is_read:
            self._is_read[request] = True
            announce_reader(self.engine, request)

    async def cancel(self, requests: list[str]) -> None:
        await asyncio.gather(*(self.engine.cancel(request) for request in requests))

    async def reset(self) -> None:
        await self.engine.reset()

    async def forget(self, tenant: str) -> None:
        await forget(self.engine, tenant)

    async def admin(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call a coroutine method of the engine that is no request, e.g. `count` of a store."""
        return await getattr(self.engine, method)(*args)


def _node() -> str:
    """Return Ray's id of this node; empty outside of a cluster."""
    import ray

    return str(ray.get_runtime_context().get_node_id()) if ray.is_initialized() else ""


def _portable(result: Result) -> Result:
    """Return the result without causes from engine libraries: to unpickle one, a client would import its library."""
    if isinstance(result, Failed):
        error = result.error
        cause, error.__cause__, error.__context__ = error.__cause__, None, None
        error.__traceback__ = None
        if cause is not None and not isinstance(cause, EngineError):
            error.add_note(f"caused by {type(cause).__name__}: {cause}")
    return result
