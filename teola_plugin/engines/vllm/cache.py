"""The prefixes of prompts, as text, that vLLM's cache holds, by its cache events.

vLLM names blocks of tokens by hashes of its own. Senders have no tokenizer: they name prompts by blocks of their text.
Only the host knows both, for every prompt that it serves. Events are collected until they are taken.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from teola_plugin.graph.prefix_blocks import (
    BLOCK_CHARACTERS,
    PrefixBlocks,
    PrefixesCleared,
    PrefixEvents,
    PrefixRemoved,
    PrefixStored,
)


@dataclass(frozen=True, slots=True)
class TextBlocks:
    """The text blocks of a prompt, from `first` up to `end`, that a block of tokens completes."""

    blocks: PrefixBlocks
    first: int
    end: int


@dataclass(slots=True)
class CachedBlock:
    """A block in vLLM's cache: the key of its content, and its text blocks if its prompt is known."""

    key: int
    text: TextBlocks | None


class CachedPrefixes:
    """The prefix cache of one vLLM.

    A text block counts as cached while any cached block of tokens completes it: several prompts may share it.
    """

    def __init__(self, block: int, max_expected: int = 20_000) -> None:
        """Create the record of an empty cache whose blocks have `block` tokens.

        `max_expected`: number of token blocks, of the latest prompts, whose text is remembered. `_references` counts,
        for each text block by its hash, the cached blocks of tokens that complete it.
        """
        self._block, self._max_expected = block, max_expected
        self._expected: OrderedDict[int, TextBlocks] = OrderedDict()
        """Text blocks of prompts that are not cached yet, by the key of a block of tokens and all before it."""
        self._cached: dict[Hashable, CachedBlock] = {}
        """Cached blocks by vLLM's hash."""
        self._unknown: dict[int, CachedBlock] = {}
        """Cached blocks of no known prompt, by key: answers, which a later prompt may contain."""
        self._references: dict[int, int] = {}
        """Number of cached blocks that complete a text block."""
        self._events: list[PrefixStored | PrefixRemoved | PrefixesCleared] = []

    def expect(self, ids: Sequence[int], ends: Sequence[int], blocks: PrefixBlocks, tenant: str = "") -> None:
        """Record that a prompt will be computed. `ends`: characters of its text up to each block's end."""
        first, stored_text = 0, None
        for key, characters in zip(self._keys(ids, _root_key(tenant)), ends, strict=False):
            end = min(len(blocks), characters // BLOCK_CHARACTERS)
            text = TextBlocks(blocks, first, end)
            late = self._unknown.pop(key, None)
            if late is not None:
                late.text = stored_text = text
                self._acquire(text)
            self._expected[key] = text
            self._expected.move_to_end(key)
            first = end
        while len(self._expected) > self._max_expected:
            self._expected.popitem(last=False)
        if stored_text is not None:
            self._add_stored(stored_text)

    def stored(
        self, hashes: Sequence[Hashable], tokens: Sequence[int], parent: Hashable | None = None, tenant: str = ""
    ) -> None:
        """Record stored blocks that follow `parent`, with the token ids of all of them. Some may be cached already."""
        before = self._cached.get(parent) if parent is not None else None
        if parent is not None and before is None:
            return
        start = before.key if before is not None else _root_key(tenant)
        last: TextBlocks | None = None
        for name, key in zip(hashes, self._keys(tokens, start), strict=False):
            cached = self._cached.get(name)
            if cached is None:
                cached = self._cached[name] = CachedBlock(key, self._expected.get(key))
                if cached.text is None:
                    self._unknown[key] = cached
                else:
                    self._acquire(cached.text)
            last = cached.text or last
        if last is not None:
            self._add_stored(last)

    def removed(self, hashes: Sequence[Hashable]) -> None:
        """Record that vLLM removed blocks from its cache, by their hashes. Unknown ones are ignored."""
        for name in hashes:
            cached = self._cached.pop(name, None)
            if cached is None:
                continue
            self._unknown.pop(cached.key, None)
            if cached.text is not None:
                self._release(cached.text)

    def cleared(self) -> None:
        """Forget all prefixes, also after events were lost: an unknown prefix counts as not cached."""
        for table in (self._cached, self._unknown, self._references):
            table.clear()
        self._events = [PrefixesCleared()]

    @property
    def changed(self) -> bool:
        """True if there are events to take."""
        return bool(self._events)

    def take(self) -> PrefixEvents:
        """Return the events since the last call."""
        news, self._events = tuple(self._events), []
        return news

    def _keys(self, ids: Sequence[int], key: int) -> Iterator[int]:
        """Yield a key for each full block of tokens, which depends on all tokens before the block's end.

        A last block that is not full has no key, since vLLM caches full blocks only. `key`: that of the block before.
        """
        for at in range(0, len(ids) - self._block + 1, self._block):
            key = hash((key, *ids[at : at + self._block]))
            yield key

    def _acquire(self, text: TextBlocks) -> None:
        for block in text.blocks[text.first : text.end]:
            self._references[block] = self._references.get(block, 0) + 1

    def _release(self, text: TextBlocks) -> None:
        """Drop a reference to each text block of a removed block of tokens; add an event if some are cached no more."""
        keeps = text.end
        for position in range(text.end - 1, text.first - 1, -1):
            block = text.blocks[position]
            left = self._references.get(block, 0) - 1
            if left > 0:
                self._references[block] = left
            else:
                self._references.pop(block, None)
                keeps = position
        if keeps < text.end:
            self._add_removed(PrefixRemoved(text.blocks[: keeps + 1], keeps))

    def _add_stored(self, text: TextBlocks) -> None:
        """Add an event. It replaces an earlier one of a prefix of the same prompt."""
        last = self._events[-1] if self._events else None
        if isinstance(last, PrefixStored) and _begins(text.blocks[: text.end], last.blocks):
            self._events.pop()
        if text.end:
            self._events.append(PrefixStored(text.blocks[: text.end]))

    def _add_removed(self, news: PrefixRemoved) -> None:
        """Add an event of removed text blocks, merged with the last one if both concern the same prompt."""
        last = self._events[-1] if self._events else None
        if isinstance(last, PrefixRemoved) and _begins(last.blocks, news.blocks):
            self._events.pop()
        elif isinstance(last, PrefixRemoved) and _begins(news.blocks, last.blocks):
            return
        self._events.append(news)


def _root_key(tenant: str) -> int:
    return hash(("", tenant))


def _begins(longer: PrefixBlocks, shorter: PrefixBlocks) -> bool:
    """Return True if `longer` continues `shorter`. Hashes are chained: equal ones have equal beginnings."""
    return not shorter or (len(longer) >= len(shorter) and longer[len(shorter) - 1] == shorter[-1])
