"""Chained hashes of a prompt's blocks, by which requests are placed where their prefix is cached, and cache events.

An engine that can report events of its prefix cache has two attributes: `tell_cache`, True if it shall (None: if
useful), read at its start; and `on_prefix_events`, a callable or None, which it calls on the pool's loop.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

PrefixBlocks = tuple[int, ...]
"""One hash for each full block. It covers the block and all before it, so equal hashes mean equal prefixes."""

BLOCK_TOKENS = 16
"""Number of tokens in a block: the block size of vLLM's prefix cache on GPUs."""
BLOCK_CHARACTERS = 64
"""Number of characters in a block of text, for senders without a tokenizer: about 16 tokens of English."""


def block_hashes(
    content: str | Sequence[int], *, tenant: str = "", size: int | None = None, after: int | None = None
) -> PrefixBlocks:
    """Return the hashes of a prompt's full blocks.

    The hashes are the same in every process and on every machine, so that senders can compute them. Tenants share no
    hash, and neither do text and token ids. A collision of two 64-bit hashes costs a prefilling, never an answer.

    Args:
        content: The prompt, as token ids (below 2**63) or as text.
        tenant: The tenant that the prompt belongs to.
        size: Size of a block, in tokens (default 16) or characters (default 64).
        after: Hash of the block that the content follows, None for the start of a prompt.
    """
    text = isinstance(content, str)
    size = size or (BLOCK_CHARACTERS if text else BLOCK_TOKENS)
    # Invalid Unicode is hashed, too: the engine decides whether it can process such a request.
    units = content.encode("utf-32-le", "surrogatepass") if isinstance(content, str) else _little_endian(content)
    step = size * (4 if text else 8)
    namespace = f"{'text' if text else 'ids'} {size} {tenant}".encode(errors="surrogatepass")
    key = hashlib.blake2b(namespace, digest_size=8).digest()
    if after is not None:
        key = after.to_bytes(8, "little")
    hashes = []
    for start in range(0, len(units) - step + 1, step):
        key = hashlib.blake2b(units[start : start + step], digest_size=8, key=key).digest()
        hashes.append(int.from_bytes(key, "little"))
    return tuple(hashes)


def _little_endian(ids: Sequence[int]) -> bytes:
    """Return token ids as 64-bit little-endian bytes, the same on every machine. Raise OverflowError for larger ids."""
    integers = array("q", ids)
    if integers.itemsize != 8:
        raise OverflowError("array('q') is expected to hold 64-bit integers")
    if array("H", [1]).tobytes() != b"\x01\x00":
        integers.byteswap()
    return integers.tobytes()


# ------------------------------------------------------------ events of a replica's prefix cache


@dataclass(frozen=True, slots=True)
class PrefixStored:
    """An event: the replica has cached this prefix."""

    blocks: PrefixBlocks


@dataclass(frozen=True, slots=True)
class PrefixRemoved:
    """An event: the replica has only the first `keeps` blocks of this prefix left."""

    blocks: PrefixBlocks
    keeps: int = 0


@dataclass(frozen=True, slots=True)
class PrefixesCleared:
    """An event: the replica has no cached prefix left, or events were lost."""


PrefixEvents = tuple[PrefixStored | PrefixRemoved | PrefixesCleared, ...]
"""Events in the order in which they happened."""


def request_prefix_events(replicas: Sequence[object]) -> None:
    """Let several replicas report what they cache, if they can and `tell_cache` is None. Call it before they start."""
    for engine in replicas if len(replicas) > 1 else ():
        if getattr(engine, "tell_cache", False) is None:
            engine.tell_cache = True  # type: ignore[attr-defined]
