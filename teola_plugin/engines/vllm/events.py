"""vLLM publishes what its prefix cache stores and forgets; here is who listens, in the host process."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from teola_plugin.engines.vllm.cache import HeldPrefixes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

log = logging.getLogger("teola_plugin")
_SEVERAL = ("data_parallel_size", "kv_transfer_config", "kv_events_config")
"""Arguments with which there are several caches, or the events are for somebody else."""


def endpoint() -> str:
    """A socket file in the host's own folder, which nobody else reads."""
    return f"ipc://{os.environ['VLLM_RPC_BASE_PATH']}/kv-events"


def wanted(tell_cache: bool, engine_args: Mapping[str, Any]) -> bool:
    """Whether vLLM is to publish events: somebody asks for them, and they can be told of one cache."""
    caches = engine_args.get("enable_prefix_caching", True)
    return tell_cache and bool(caches) and not any(engine_args.get(name) for name in _SEVERAL)


def publishing() -> Any:
    """The `kv_events_config` of vLLM."""
    from vllm.config import KVEventsConfig

    return KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint())


class CacheEvents:
    """Feeds `held` with what vLLM publishes: a message a step, with all of the step's events."""

    def __init__(self, config: VllmConfig) -> None:
        import msgspec
        import zmq
        import zmq.asyncio
        from vllm.distributed import kv_events

        cache = config.cache_config
        self.held = HeldPrefixes(cache.block_size, most=2 * (cache.num_gpu_blocks or 10_000))
        self._block = cache.block_size
        self._kinds = kv_events
        self._decoder = msgspec.msgpack.Decoder(kv_events.KVEventBatch)
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
                self._take(int.from_bytes(number, "big"), self._decoder.decode(payload).events)
        except Exception:
            log.exception("vLLM's cache events cannot be followed; placement goes on by what was sent")
            self.held.cleared()

    def _take(self, number: int, events: list[Any]) -> None:
        if number != self._number:  # some were lost
            self.held.cleared()
        self._number = number + 1
        for event in events:
            if isinstance(event, self._kinds.BlockStored):
                self._stored(event)
            elif isinstance(event, self._kinds.BlockRemoved):
                self.held.removed(event.block_hashes)
            elif isinstance(event, self._kinds.AllBlocksCleared):
                self.held.cleared()

    def _stored(self, event: Any) -> None:
        """Of another tier, of an adapter, or of a further group of layers: not what a prompt needs. Older versions of
        vLLM lack some of these fields."""
        whole = event.block_size == self._block and len(event.token_ids) == self._block * len(event.block_hashes)
        elsewhere = getattr(event, "medium", None) not in (None, "GPU")
        if not whole or elsewhere or getattr(event, "lora_name", None) or getattr(event, "group_idx", None):
            return
        keys = getattr(event, "extra_keys", None)
        first = keys[0] if keys else None
        salt = str(first[-1]) if first and event.parent_block_hash is None else ""
        self.held.stored(event.block_hashes, event.token_ids, event.parent_block_hash, salt)
