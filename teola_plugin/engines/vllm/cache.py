"""vLLM's events of its prefix cache, translated: which prefixes of prompts, as text, the instance holds.

vLLM names blocks of tokens by hashes of its own. Senders have no tokenizer: they name prompts by blocks of their text.
Only the host knows both, for every prompt that it serves. News are put together until somebody takes them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass

from teola_plugin.engines.cache_news import CacheNews, Emptied, Forgot, Holds
from teola_plugin.graph.prefix_blocks import BLOCK_CHARACTERS, PrefixBlocks


@dataclass(frozen=True, slots=True)
class Named:
    """What a block of tokens is in a prompt: it completes the text blocks from `first` up to `end`."""

    blocks: PrefixBlocks
    first: int
    end: int


@dataclass(slots=True)
class Cached:
    """A block in vLLM's cache: its content's key, and what it is in a prompt, if in any that is known."""

    key: int
    named: Named | None


class HeldPrefixes:
    """The cache of one vLLM. `block`: tokens in a block; `most`: blocks that are remembered of prompts not cached yet.

    A text block is held while any cached block of tokens completes it: several prompts may share it.
    """

    def __init__(self, block: int, most: int = 20_000) -> None:
        self._block, self._most = block, most
        self._expected: OrderedDict[int, Named] = OrderedDict()
        """By the content of a block of tokens and all before it."""
        self._cached: dict[Hashable, Cached] = {}
        """By vLLM's hash."""
        self._unnamed: dict[int, Cached] = {}
        """By content: answers, that a later prompt may contain."""
        self._holders: dict[int, int] = {}
        """Text block -> cached blocks that complete it."""
        self._news: list[Holds | Forgot | Emptied] = []

    def expect(self, ids: Sequence[int], ends: Sequence[int], blocks: PrefixBlocks, tenant: str = "") -> None:
        """A prompt is going to be computed. `ends`: characters of its text before the end of each block of tokens."""
        first, found = 0, None
        for key, characters in zip(self._keys(ids, _start(tenant)), ends, strict=False):
            end = min(len(blocks), characters // BLOCK_CHARACTERS)
            named = Named(blocks, first, end)
            late = self._unnamed.pop(key, None)
            if late is not None:
                late.named = found = named
                self._hold(named)
            self._expected[key] = named
            self._expected.move_to_end(key)
            first = end
        while len(self._expected) > self._most:
            self._expected.popitem(last=False)
        if found is not None:
            self._say_held(found)

    def stored(
        self, hashes: Sequence[Hashable], tokens: Sequence[int], parent: Hashable | None = None, tenant: str = ""
    ) -> None:
        """Blocks that follow `parent`, with the token ids of all of them; perhaps some that were found there."""
        before = self._cached.get(parent) if parent is not None else None
        if parent is not None and before is None:
            return
        start = before.key if before is not None else _start(tenant)
        last: Named | None = None
        for name, key in zip(hashes, self._keys(tokens, start), strict=False):
            cached = self._cached.get(name)
            if cached is None:
                cached = self._cached[name] = Cached(key, self._expected.get(key))
                if cached.named is None:
                    self._unnamed[key] = cached
                else:
                    self._hold(cached.named)
            last = cached.named or last
        if last is not None:
            self._say_held(last)

    def removed(self, hashes: Sequence[Hashable]) -> None:
        for name in hashes:
            cached = self._cached.pop(name, None)
            if cached is None:
                continue
            self._unnamed.pop(cached.key, None)
            if cached.named is not None:
                self._let_go(cached.named)

    def cleared(self) -> None:
        """Also after news were lost: what is not known is not there."""
        for kept in (self._cached, self._unnamed, self._holders):
            kept.clear()
        self._news = [Emptied()]

    @property
    def changed(self) -> bool:
        """Whether there is something to take."""
        return bool(self._news)

    def take(self) -> CacheNews:
        """What has happened since the last call."""
        news, self._news = tuple(self._news), []
        return news

    def _keys(self, ids: Sequence[int], key: int) -> Iterator[int]:
        for at in range(0, len(ids) - self._block + 1, self._block):
            key = hash((key, *ids[at : at + self._block]))
            yield key

    def _hold(self, named: Named) -> None:
        for block in named.blocks[named.first : named.end]:
            self._holders[block] = self._holders.get(block, 0) + 1

    def _let_go(self, named: Named) -> None:
        keeps = named.end
        for place in range(named.end - 1, named.first - 1, -1):
            block = named.blocks[place]
            left = self._holders.get(block, 0) - 1
            if left > 0:
                self._holders[block] = left
            else:
                self._holders.pop(block, None)
                keeps = place
        if keeps < named.end:
            self._say_forgotten(Forgot(named.blocks[: keeps + 1], keeps))

    def _say_held(self, named: Named) -> None:
        """Blocks come and go one after the other: of what concerns one prompt, the last news count."""
        last = self._news[-1] if self._news else None
        if isinstance(last, Holds) and _begins(named.blocks[: named.end], last.blocks):
            self._news.pop()
        if named.end:
            self._news.append(Holds(named.blocks[: named.end]))

    def _say_forgotten(self, news: Forgot) -> None:
        last = self._news[-1] if self._news else None
        if isinstance(last, Forgot) and _begins(last.blocks, news.blocks):
            self._news.pop()
        elif isinstance(last, Forgot) and _begins(news.blocks, last.blocks):
            return
        self._news.append(news)


def _start(tenant: str) -> int:
    return hash(("", tenant))


def _begins(longer: PrefixBlocks, shorter: PrefixBlocks) -> bool:
    """Whether one prefix continues the other. Names are chained: equal ones have equal beginnings."""
    return not shorter or (len(longer) >= len(shorter) and longer[len(shorter) - 1] == shorter[-1])
