"""A replica as its engine host sees it, an `Engine` whose work is done by an actor; and the start of several."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from teola_plugin.cluster.host.replica_host import without_reports
from teola_plugin.cluster.ray_errors import translated
from teola_plugin.cluster.wire import EngineFacts, Parcel, pack, unpack
from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.sentence_transformers.static_batching import text_size
from teola_plugin.errors import EngineUnavailable
from teola_plugin.graph import LLM_KINDS, Batching, EngineProfile, PrimitiveKind
from teola_plugin.graph.prefix_blocks import PrefixEvents
from teola_plugin.requests.payloads import Generate, Request, Result, Warmup

log = logging.getLogger("teola_plugin")
_PING_TIMEOUT_S = 5.0
"""Seconds within which an actor answers that is worth keeping."""
CHARACTERS_PER_TOKEN = 4.0
"""Estimates the size of prompts. The replica counts tokens, and refuses prompts that are too large."""


class RemoteReplica:
    """Implements `Engine` for an `EnginePort`. Every failure of the actor becomes `EngineUnavailable`, retryable."""

    def __init__(self, name: str, replica: str, spec: Mapping[str, Any], actor_options: Mapping[str, Any]) -> None:
        self.name = name
        self.replica = replica
        self.kinds: frozenset[PrimitiveKind] = frozenset()
        self.facts: EngineFacts | None = None
        self.node, self.pid = "", 0
        self._spec, self._options = spec, actor_options
        self._actor: Any = None
        self._is_silent = False
        """True if it did not answer the last ping."""
        self.on_prefix_events: Callable[[PrefixEvents], None] | None = None
        self._load = EngineLoad()
        self._profile = EngineProfile()

    @property
    def profile(self) -> EngineProfile:
        return self._profile

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Make the actor and start the engine in it. Raises `EngineUnavailable`."""
        if self._actor is None:
            self._actor = self._create_actor()
        try:
            self._set_facts(await self._actor.start.remote())
            self.node, self.pid = await self._actor.where.remote()
        except Exception as error:
            await self.kill()
            raise translated(error, self.name, self.replica) from None

    def _create_actor(self) -> Any:
        """Create the Ray actor that will hold the engine, with the resources that it reserves."""
        import ray

        from teola_plugin.cluster.host.replica_host import ReplicaHost

        return ray.remote(ReplicaHost).options(**self._options).remote(dict(self._spec), self.replica)

    def _set_facts(self, facts: EngineFacts) -> None:
        self.facts, self.kinds = facts, facts.kinds
        # The host's sizes are estimates: only the replica, which counts, may refuse a request for its size.
        self._profile = replace(facts.profile, max_request_size=None)

    async def stop(self) -> None:
        """End engine and actor. Idempotent."""
        if self._actor is not None:
            try:
                await asyncio.wait_for(self._actor.stop.remote(), 15)
            except Exception as error:
                log.debug("replica %s of %s did not stop by itself: %r", self.replica, self.name, error)
        await self.kill()

    async def kill(self) -> None:
        """End the actor's process at once."""
        actor, self._actor, self._is_silent = self._actor, None, False
        if actor is not None:
            import ray

            ray.kill(actor, no_restart=True)

    async def restart(self) -> None:
        """Restart a dead engine: inside its actor if that lives, otherwise in a new one."""
        if not self._is_silent and await self.is_alive(_PING_TIMEOUT_S):
            try:
                await asyncio.wait_for(self._actor.restart.remote(), 600)
                return
            except Exception as error:
                log.info("replica %s of %s gets a new process: %r", self.replica, self.name, error)
        await self.kill()
        await self.start()

    async def is_alive(self, seconds: float) -> bool:
        """Return True if the replica answers within `seconds`."""
        if self._actor is None:
            return False
        try:
            requests, kv_used, reports = await asyncio.wait_for(self._actor.ping.remote(), seconds)
        except Exception:
            self._is_silent = True
            return False
        self._is_silent = False
        self._load = EngineLoad(requests, kv_used)
        list(without_reports(reports, self.on_prefix_events))
        return True

    # ------------------------------------------------------------ requests

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """Yield a batch's results, streamed unless none comes before the rest. Raises `EngineUnavailable`."""
        if self._actor is None:
            raise self._unavailable()
        parcel = pack(batch)
        try:
            if self._runs_whole(batch):
                for result in self._results(await self._actor.run.remote(parcel)):
                    yield result
                return
            async for ref in self._actor.stream.options(num_returns="streaming").remote(parcel):
                for result in self._results(await ref):
                    yield result
        except Exception as error:
            raise translated(error, self.name, self.replica) from None

    def _results(self, parcel: Parcel) -> Iterator[Result]:
        return without_reports(unpack(parcel), self.on_prefix_events)

    def _runs_whole(self, batch: Sequence[Request]) -> bool:
        """Return True if nothing of the batch is streamed: only texts come in pieces, and other requests of one kind
        end together."""
        if self._profile.batching is Batching.STATIC:
            return True
        kinds = {request.kind for request in batch}
        # Each reports when its prompt is computed, and may get a reader.
        if kinds & LLM_KINDS and self.takes_late_readers:
            return False
        return not any(r.stream for r in batch) or (len(kinds) == 1 and not kinds & LLM_KINDS)

    @property
    def takes_late_readers(self) -> bool:
        """See `engines.base.takes_late_readers`."""
        return self.facts is not None and bool(self.facts.settings.get("takes_late_readers"))

    def announce_reader(self, request_id: str) -> None:
        """Tell the replica that somebody reads the request's pieces from now on."""
        if self._actor is not None:
            self._actor.announce_reader.remote(request_id)

    async def cancel(self, request_id: str) -> None:
        if self._actor is not None:
            self._actor.cancel.remote([request_id])

    def size(self, request: Request) -> float:
        """Return the estimated size of a request for the scheduler, without asking the replica.

        LLM requests count tokens, as characters of the known prompt over `CHARACTERS_PER_TOKEN`; others count their
        text if the engine does, otherwise 1.
        """
        payload = request.payload
        if isinstance(payload, Generate | Warmup):
            return max(1, round(len(payload.prompt.known_prefix()) / CHARACTERS_PER_TOKEN))
        by_text = self.facts is not None and self.facts.settings.get("sized_by_text")
        return text_size(payload) if by_text else 1

    def load(self) -> EngineLoad:
        return self._load

    async def reset(self) -> None:
        if self._actor is not None:
            await self._actor.reset.remote()

    async def forget(self, tenant: str) -> None:
        if self._actor is not None:
            await self._actor.forget.remote(tenant)

    def versions(self) -> Mapping[str, str]:
        return self.facts.versions if self.facts is not None else {}

    async def admin(self, method: str, args: tuple[Any, ...]) -> Any:
        """Call a coroutine method of the engine that is no request."""
        if self._actor is None:
            raise self._unavailable()
        try:
            return await self._actor.admin.remote(method, args)
        except Exception as error:
            raise translated(error, self.name, self.replica) from None

    def _unavailable(self) -> EngineUnavailable:
        """Return the error for the use of a replica that has no actor now."""
        return EngineUnavailable(
            f"replica {self.replica} of engine {self.name!r} is not running.",
            engine=self.name,
            replica=self.replica,
            retryable=True,
            hint="it is started again by itself; `teola status` shows how it is",
        )


log = logging.getLogger("teola_plugin")
PendingStarts = dict[str, "asyncio.Task[None]"]


async def start_replicas(
    replicas: Mapping[str, RemoteReplica], *, all_needed: bool
) -> tuple[dict[str, RemoteReplica], PendingStarts]:
    """Start replicas; return those that are up, and the starts that go on.

    With `all_needed`, all of them are up at the end. Otherwise one that is up is enough, since the cluster may have
    shrunk. Raises `EngineUnavailable`, and then stops all of them.
    """
    starts = {number: asyncio.ensure_future(replica.start()) for number, replica in replicas.items()}
    try:
        if all_needed:
            await asyncio.gather(*starts.values())
        else:
            await _wait_for_one(starts)
    except BaseException:
        await stop_replicas(replicas, starts)
        raise
    up = {number: replicas[number] for number, start in starts.items() if _succeeded(start)}
    return up, {number: start for number, start in starts.items() if not start.done()}


async def _wait_for_one(starts: PendingStarts) -> None:
    """Wait until one of the starting replicas is up. Raise the error of a start if all have failed."""
    pending = set(starts.values())
    while pending and not any(map(_succeeded, starts.values())):
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
    for number, start in starts.items():
        if start.done() and (error := start.exception()) is not None:
            if not any(map(_succeeded, starts.values())):
                raise error
            log.warning("replica %s did not start again: %s", number, error)


def _succeeded(start: asyncio.Task[None]) -> bool:
    return start.done() and not start.cancelled() and start.exception() is None


async def stop_replicas(replicas: Mapping[str, RemoteReplica], starts: PendingStarts) -> None:
    """Stop these replicas, whether they are up or still starting."""
    for start in starts.values():
        start.cancel()
    await asyncio.gather(*starts.values(), return_exceptions=True)
    await asyncio.gather(*(replica.stop() for replica in replicas.values()))
