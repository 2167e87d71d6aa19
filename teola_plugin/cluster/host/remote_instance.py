"""An instance as its engine host sees it: an `Engine` whose work is done by an actor."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from teola_plugin.cluster.host.cache_reports import without_reports
from teola_plugin.cluster.ray_errors import translated
from teola_plugin.cluster.wire import EngineFacts, Parcel, pack, unpack
from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.prefix_events import PrefixEvents
from teola_plugin.engines.sentence_transformers.text_sizes import text_size
from teola_plugin.errors import EngineUnavailable
from teola_plugin.graph import LLM_KINDS, Batching, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Generate, Warmup
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Result

log = logging.getLogger("teola_plugin")
_ANSWERS = 5.0
"""Seconds within which an actor answers that is worth keeping."""
CHARACTERS_A_TOKEN = 4.0
"""Sizes of prompts are estimates here; the instance counts, and refuses what is too large."""


class RemoteInstance:
    """Implements `Engine` for an `EnginePort`. Whatever happens to the actor becomes `EngineUnavailable`, retryable."""

    def __init__(self, name: str, instance: str, spec: Mapping[str, Any], actor_options: Mapping[str, Any]) -> None:
        self.name = name
        self.instance = instance
        self.kinds: frozenset[PrimitiveKind] = frozenset()
        self.facts: EngineFacts | None = None
        self.node, self.pid = "", 0
        self._spec, self._options = spec, actor_options
        self._actor: Any = None
        self._silent = False
        """Whether it did not answer when it was last asked."""
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
            self._actor = self._make()
        try:
            self._take(await self._actor.start.remote())
            self.node, self.pid = await self._actor.where.remote()
        except Exception as error:
            await self.kill()
            raise translated(error, self.name, self.instance) from None

    def _make(self) -> Any:
        import ray

        from teola_plugin.cluster.host.instance_host import InstanceHost

        return ray.remote(InstanceHost).options(**self._options).remote(dict(self._spec), self.instance)

    def _take(self, facts: EngineFacts) -> None:
        self.facts, self.kinds = facts, facts.kinds
        # The host's sizes are estimates: only the instance, which counts, may refuse a request for its size.
        self._profile = replace(facts.profile, max_request_size=None)

    async def stop(self) -> None:
        """End engine and actor. Idempotent."""
        if self._actor is not None:
            try:
                await asyncio.wait_for(self._actor.stop.remote(), 15)
            except Exception as error:
                log.debug("instance %s of %s did not stop by itself: %r", self.instance, self.name, error)
        await self.kill()

    async def kill(self) -> None:
        """End the actor's process at once."""
        actor, self._actor, self._silent = self._actor, None, False
        if actor is not None:
            import ray

            ray.kill(actor, no_restart=True)

    async def restart(self) -> None:
        """Bring a dead engine back: inside its actor while that lives, otherwise in a new one."""
        if not self._silent and await self.alive(_ANSWERS):
            try:
                await asyncio.wait_for(self._actor.restart.remote(), 600)
                return
            except Exception as error:
                log.info("instance %s of %s gets a new process: %r", self.instance, self.name, error)
        await self.kill()
        await self.start()

    async def alive(self, seconds: float) -> bool:
        """Whether it answers within `seconds`."""
        if self._actor is None:
            return False
        try:
            requests, kv_used, reports = await asyncio.wait_for(self._actor.ping.remote(), seconds)
        except Exception:
            self._silent = True
            return False
        self._silent = False
        self._load = EngineLoad(requests, kv_used)
        list(without_reports(reports, self.on_prefix_events))
        return True

    # ------------------------------------------------------------ requests

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """A batch of which nothing comes before the rest comes back as one; others are streamed. Raises
        `EngineUnavailable`."""
        if self._actor is None:
            raise self._down()
        parcel = pack(batch)
        try:
            if self._as_one(batch):
                for result in self._results(await self._actor.run.remote(parcel)):
                    yield result
                return
            async for ref in self._actor.stream.options(num_returns="streaming").remote(parcel):
                for result in self._results(await ref):
                    yield result
        except Exception as error:
            raise translated(error, self.name, self.instance) from None

    def _results(self, parcel: Parcel) -> Iterator[Result]:
        return without_reports(unpack(parcel), self.on_prefix_events)

    def _as_one(self, batch: Sequence[Request]) -> bool:
        """Only texts come in pieces; other requests of one kind take about as long as each other."""
        if self._profile.batching is Batching.STATIC:
            return True
        kinds = {request.kind for request in batch}
        if kinds & LLM_KINDS and self.listens:  # each says when its prompt is done, and may get a reader
            return False
        return not any(r.stream for r in batch) or (len(kinds) == 1 and not kinds & LLM_KINDS)

    @property
    def listens(self) -> bool:
        """See `engines.base.listens`."""
        return self.facts is not None and bool(self.facts.settings.get("listens"))

    def listen(self, request_id: str) -> None:
        """Somebody reads its pieces from now on."""
        if self._actor is not None:
            self._actor.listen.remote(request_id)

    async def cancel(self, request_id: str) -> None:
        if self._actor is not None:
            self._actor.cancel.remote([request_id])

    def size(self, request: Request) -> float:
        payload = request.payload
        if isinstance(payload, Generate | Warmup):
            return max(1, round(len(payload.prompt.known_prefix()) / CHARACTERS_A_TOKEN))
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
        """A coroutine method of the engine that is no request."""
        if self._actor is None:
            raise self._down()
        try:
            return await self._actor.admin.remote(method, args)
        except Exception as error:
            raise translated(error, self.name, self.instance) from None

    def _down(self) -> EngineUnavailable:
        return EngineUnavailable(
            f"instance {self.instance} of engine {self.name!r} is not running.",
            engine=self.name,
            instance=self.instance,
            retryable=True,
            hint="it is started again by itself; `teola status` shows how it is",
        )
