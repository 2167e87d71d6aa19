"""A prompt's identity for placement: chained hashes of its blocks."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

PrefixBlocks = tuple[int, ...]
"""One hash for each whole block; each stands for its block and all before it, so equal hashes are equal prefixes."""

BLOCK_TOKENS = 16
"""Tokens in a block: the block of vLLM's prefix cache on GPUs."""
BLOCK_CHARACTERS = 64
"""Characters in a block of text, where the sender has no tokenizer: some 16 tokens of English."""


def block_hashes(
    content: str | Sequence[int], *, tenant: str = "", size: int | None = None, after: int | None = None
) -> PrefixBlocks:
    """The blocks of a prompt, given as token ids (below 2**63) or as text. A last block that is not full is left out.

    `size` is in tokens or characters, 16 or 64 by default; `after` is the block that the content follows. Tenants
    share nothing, and text shares nothing with token ids. The same in every process and on every machine, so that
    senders can compute it. 64 bits: a collision, one in billions, costs a prefilling, never an answer.
    """
    text = isinstance(content, str)
    size = size or (BLOCK_CHARACTERS if text else BLOCK_TOKENS)
    # What is no Unicode is named, too: whether a request can be served is for its engine to say.
    units = content.encode("utf-32-le", "surrogatepass") if isinstance(content, str) else _little_endian(content)
    step = size * (4 if text else 8)
    whose = f"{'text' if text else 'ids'} {size} {tenant}".encode(errors="surrogatepass")
    key = hashlib.blake2b(whose, digest_size=8).digest()
    if after is not None:
        key = after.to_bytes(8, "little")
    found = []
    for start in range(0, len(units) - step + 1, step):
        key = hashlib.blake2b(units[start : start + step], digest_size=8, key=key).digest()
        found.append(int.from_bytes(key, "little"))
    return tuple(found)


def _little_endian(ids: Sequence[int]) -> bytes:
    made = array("q", ids)
    if made.itemsize != 8:
        raise OverflowError("array('q') is expected to hold 64-bit integers")
    if array("H", [1]).tobytes() != b"\x01\x00":
        made.byteswap()
    return made.tobytes()
