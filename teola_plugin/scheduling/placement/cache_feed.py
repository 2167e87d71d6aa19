"""What an engine publishes of its prefix cache, in its own hashes, as events for the scheduler."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field

from teola_plugin.errors import ConfigError
from teola_plugin.scheduling.events import CacheCleared, CacheRemoved, CacheStored
from teola_plugin.scheduling.prefix_blocks import BLOCK_TOKENS, PrefixBlocks, block_hashes


@dataclass(slots=True)
class CacheFeed:
    """The cache of one instance. `size`: tokens of the blocks by which senders name prompts.

    Engines hash with a secret of their own, so their hashes are only names here; what counts is the token ids that
    come with a stored block. Prompts that senders name by their text cannot be matched with them.
    """

    instance: str
    size: int = BLOCK_TOKENS
    _known: dict[Hashable, tuple[PrefixBlocks, int]] = field(default_factory=dict)
    """Engine's hash of a block -> a prefix that contains it, and the blocks of it that come before."""

    def stored(
        self,
        at: float,
        hashes: Sequence[Hashable],
        tokens: Sequence[int],
        parent: Hashable | None = None,
        tenant: str = "",
    ) -> CacheStored | None:
        """Blocks that follow `parent`, with the token ids of all of them. None if the parent is not known (news were
        lost). Raises ConfigError when the engine's blocks are not made of whole blocks of this size."""
        each, rest = divmod(len(tokens), self.size * len(hashes))
        if rest:
            raise ConfigError(
                f"instance {self.instance!r} caches blocks of {len(tokens) // len(hashes)} tokens, "
                f"but prompts are named by blocks of {self.size}.",
                hint="give the engine a block size that is a multiple of it, or name prompts by the engine's blocks",
            )
        before: PrefixBlocks = ()
        if parent is not None:
            if parent not in self._known:
                return None
            prefix, start = self._known[parent]
            before = prefix[: start + each]
        after = before[-1] if before else None
        blocks = before + block_hashes(tokens, tenant=tenant, size=self.size, after=after)
        for number, name in enumerate(hashes):
            self._known[name] = (blocks, len(before) + number * each)
        return CacheStored(at, self.instance, blocks)

    def removed(self, at: float, hashes: Sequence[Hashable]) -> list[CacheRemoved]:
        found = [self._known.pop(name) for name in hashes if name in self._known]
        return [CacheRemoved(at, self.instance, blocks, keeps) for blocks, keeps in found]

    def cleared(self, at: float) -> CacheCleared:
        """Also after news were lost: what is not known is not there."""
        self._known.clear()
        return CacheCleared(at, self.instance)
