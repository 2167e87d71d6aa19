"""vLLM publishes what its prefix cache stores and forgets; here is who listens, in the host process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from teola_plugin.engines.vllm.cache import CachedPrefixes
from teola_plugin.shims.vllm import kv_events
from teola_plugin.shims.vllm.llm import Limits
from teola_plugin.shims.vllm.processes import socket_folder

log = logging.getLogger("teola_plugin")
_SEVERAL = ("data_parallel_size", "kv_transfer_config", "kv_events_config")
"""Arguments with which there are several caches, or the events are for somebody else."""


def endpoint() -> str:
    """A socket file in the host's own folder, which nobody else reads."""
    return f"ipc://{socket_folder()}/kv-events"


def wanted(tell_cache: bool, engine_args: Mapping[str, Any]) -> bool:
    """Return True if vLLM should publish cache events: they are wanted, and there is one cache to report on."""
    caches = engine_args.get("enable_prefix_caching", True)
    return tell_cache and bool(caches) and not any(engine_args.get(name) for name in _SEVERAL)


class CacheEvents:
    """Feeds `held` with what vLLM publishes: a message a step, with all of the step's events."""

    def __init__(self, limits: Limits) -> None:
        import zmq
        import zmq.asyncio

        self.held = CachedPrefixes(limits.block_size, most=2 * (limits.blocks or 10_000))
        self._read = kv_events.reader(limits.block_size)
        self._socket = zmq.asyncio.Context.instance().socket(zmq.SUB)
        self._socket.set_hwm(0)
        self._socket.subscribe(b"")
        self._socket.connect(endpoint())
        self._number = 0
        self._task = asyncio.ensure_future(self._listen())

    async def _listen(self) -> None:
        """Until the host ends. What cannot be understood ends it earlier: then nothing is known of the cache."""
        try:
            while True:
                _, number, payload = await self._socket.recv_multipart()
                self._take(int.from_bytes(number, "big"), self._read(payload))
        except Exception:
            log.exception("vLLM's cache events cannot be followed; placement goes on by what was sent")
            self.held.cleared()

    def _take(self, number: int, events: Iterable[kv_events.KvEvent]) -> None:
        if number != self._number:  # some were lost
            self.held.cleared()
        self._number = number + 1
        for event in events:
            match event:
                case kv_events.Stored():
                    self.held.stored(event.hashes, event.tokens, event.parent, event.salt)
                case kv_events.Removed():
                    self.held.removed(event.hashes)
                case kv_events.Cleared():
                    self.held.cleared()
