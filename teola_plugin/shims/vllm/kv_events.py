"""What vLLM publishes of its prefix cache, as records of ours."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from teola_plugin.shims.vllm.versions import missing

NEEDED = (
    "vllm.config:KVEventsConfig",
    "vllm.distributed.kv_events:KVEventBatch",
    "vllm.distributed.kv_events:BlockStored.block_hashes",
    "vllm.distributed.kv_events:BlockStored.parent_block_hash",
    "vllm.distributed.kv_events:BlockStored.token_ids",
    "vllm.distributed.kv_events:BlockStored.block_size",
    "vllm.distributed.kv_events:BlockRemoved.block_hashes",
    "vllm.distributed.kv_events:AllBlocksCleared",
)


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks of the cache that follow `parent`, with the token ids of all of them. Hashes are vLLM's own."""

    hashes: tuple[Hashable, ...]
    tokens: tuple[int, ...]
    parent: Hashable | None
    salt: str
    """The `cache_salt` of the prompt, in the blocks that begin one; empty elsewhere."""


@dataclass(frozen=True, slots=True)
class Removed:
    hashes: tuple[Hashable, ...]


@dataclass(frozen=True, slots=True)
class Cleared:
    """The cache is empty."""


KvEvent = Stored | Removed | Cleared


def lacking() -> tuple[str, ...]:
    """`NEEDED`, as in 0.26 to 0.32: what is not there. Without them vLLM is asked for no events, and placement goes by
    what was sent to an instance."""
    return missing(*NEEDED)


def publishing(endpoint: str) -> Any:
    """`AsyncEngineArgs.kv_events_config`: a `vllm.config.KVEventsConfig` that publishes at that endpoint of ZeroMQ."""
    from vllm.config import KVEventsConfig

    return KVEventsConfig(enable_kv_cache_events=True, publisher="zmq", endpoint=endpoint)


def reader(block: int) -> Callable[[bytes], list[KvEvent]]:
    """Return a reader of published messages.

    They are `vllm.distributed.kv_events.KVEventBatch` in MessagePack, as in 0.26 to 0.32.

    `block`: tokens in a block of the GPU's cache, or of the CPU build's. The function raises what msgspec raises for a
    message of another form. Events of other caches are left out.
    """
    import msgspec
    from vllm.distributed.kv_events import KVEventBatch

    decoder = msgspec.msgpack.Decoder(KVEventBatch)

    def read(message: bytes) -> list[KvEvent]:
        records = (_record(event, block) for event in decoder.decode(message).events)
        return [event for event in records if event is not None]

    return read


def _record(event: Any, block: int) -> KvEvent | None:
    """Return an event of vLLM's prefix cache as a record of ours; None for an event that concerns no prompt."""
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved, BlockStored

    if isinstance(event, BlockStored):
        return _stored(event, block)
    if isinstance(event, BlockRemoved):
        return Removed(tuple(event.block_hashes))
    return Cleared() if isinstance(event, AllBlocksCleared) else None


def _stored(event: Any, block: int) -> Stored | None:
    """Return None for blocks of another tier, of an adapter, or of a further group of layers: no prompt needs these.

    `medium`, `lora_name`, `group_idx` and `extra_keys` came one after the other: they are read where they are.
    `extra_keys` of a block end with the salt (0.32); without them all tenants' prefixes count as nobody's.
    """
    is_complete = event.block_size == block and len(event.token_ids) == block * len(event.block_hashes)
    elsewhere = getattr(event, "medium", None) not in (None, "GPU")
    if not is_complete or elsewhere or getattr(event, "lora_name", None) or getattr(event, "group_idx", None):
        return None
    keys = getattr(event, "extra_keys", None)
    first = keys[0] if keys else None
    salt = str(first[-1]) if first and event.parent_block_hash is None else ""
    return Stored(tuple(event.block_hashes), tuple(event.token_ids), event.parent_block_hash, salt)
