"""Which replica holds which prefix: a radix tree over block hashes, and a bounded cache of each replica.

Blocks that always came together are one `Run`, so a prompt of 8,000 tokens touches a handful of nodes, not 500.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from teola_plugin.graph.prefix_blocks import PrefixBlocks

Entry = tuple[int, int, "Run"]
"""(tick of the last use, minus the end, run). The coldest is first, and of one prompt the end."""


@dataclass(slots=True, eq=False)
class Run:
    """Blocks that always came together. A replica holds all of a run or none of it, and the parents of each run that
    it holds."""

    blocks: PrefixBlocks
    start: int
    """Number of blocks before it."""
    parent: Run | None = None
    children: dict[int, Run] = field(default_factory=dict)
    """Runs that follow it, by their first block."""
    holders: dict[str, int] = field(default_factory=dict)
    """Replica -> tick of its last use there."""
    era: int = 0
    uses: int = 0
    uses_before: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)

    @property
    def name(self) -> int:
        """The run's last block, which names the whole prefix, since hashes are chained.

        Where a run is cut, the name stays with its end, and so with the prompts that it was used for; the first half,
        which more prompts may share, gets its own.
        """
        return self.blocks[-1]

    def use(self, era: int) -> None:
        """Record that a request shares this run, in half window `era`."""
        self._roll(era)
        self.uses += 1

    def sharing(self, era: int) -> int:
        """Return the number of requests that shared the run within the window."""
        self._roll(era)
        return self.uses + self.uses_before

    def _roll(self, era: int) -> None:
        """Move the counts on to half window `era`: the present one becomes the one before, and older counts expire."""
        if era != self.era:
            self.uses_before = self.uses if era == self.era + 1 else 0
            self.era, self.uses = era, 0


@dataclass(frozen=True, slots=True)
class Match:
    """The known prefix of a prompt: its number of blocks, and the runs that hold them, the last perhaps in part."""

    path: tuple[Run, ...] = ()
    depth: int = 0

    def at(self, replica: str) -> int:
        """Return the number of the prompt's blocks that this replica holds.

        A replica that holds a run holds everything before it, too, so that the last run that it holds decides.
        """
        for run in reversed(self.path):
            if replica in run.holders:
                return min(run.end, self.depth)
        return 0

    def by_replica(self) -> dict[str, int]:
        """Blocks that each replica holds, of those that hold any."""
        blocks: dict[str, int] = {}
        for run in self.path:
            blocks |= dict.fromkeys(run.holders, min(run.end, self.depth))
        return blocks


NO_MATCH = Match()


@dataclass(slots=True)
class ReplicaCache:
    """The cache of one replica."""

    blocks: int = 0
    runs: int = 0
    used: float = 0.0
    """Share of its cache that running requests occupy, if the engine reports it."""
    cold: list[Entry] = field(default_factory=list)
    """Heap of its runs. Entries that a later use has made stale are skipped."""


class PrefixIndex:
    """The prefixes of all replicas. `capacity` is the number of blocks that a replica can hold; the coldest go
    first.

    Updated with the requests that were sent (`hold`), and with what the engine reports of its cache (`hold`, `cut`,
    `forget_replica`).
    """

    def __init__(self, capacity: int, half_window: float = 90.0) -> None:
        """Create an empty index.

        Args:
            capacity: The number of blocks that each replica can hold.
            half_window: Half of the time, in seconds, for which the index remembers how many requests shared a prefix.
        """
        self.capacity = capacity
        self._half_window_s = half_window
        self._root = Run((), 0)
        self._caches: dict[str, ReplicaCache] = {}
        self._tick = 0

    # ------------------------------------------------------------ reading

    def match(self, blocks: PrefixBlocks) -> Match:
        """Return the longest known beginning of `blocks`; O(runs on the path + log of the last one)."""
        path: list[Run] = []
        node, depth = self._root, 0
        while depth < len(blocks):
            child = node.children.get(blocks[depth])
            if child is None:
                break
            common = _common_length(child.blocks, blocks, depth)
            path.append(child)
            depth += common
            if common < len(child.blocks):
                break
            node = child
        return Match(tuple(path), depth) if path else NO_MATCH

    def blocks_on(self, replica: str) -> int:
        cache = self._caches.get(replica)
        return cache.blocks if cache is not None else 0

    def loss(self, replica: str, blocks: int, at: float) -> float:
        """Return what a replica loses when it takes so many new blocks.

        Each lost block counts as often as requests of the window shared it, divided by its holders.
        """
        cache = self._caches.get(replica)
        if cache is None:
            return 0.0
        missing_blocks = blocks + max(cache.blocks, int(cache.used * self.capacity)) - self.capacity
        if missing_blocks <= 0:
            return 0.0
        era, loss, visited = int(at // self._half_window_s), 0.0, []
        while missing_blocks > 0 and cache.cold:
            run = cache.cold[0][2]
            if not _is_stale(cache.cold[0], replica):
                loss += min(missing_blocks, len(run.blocks)) * run.sharing(era) / len(run.holders)
                missing_blocks -= len(run.blocks)
                if missing_blocks <= 0:
                    break
                visited.append(cache.cold[0])
            heappop(cache.cold)
        for entry in visited:
            heappush(cache.cold, entry)
        return loss

    def runs(self) -> Iterator[Run]:
        """Iterate over all runs that a replica holds, parents first."""
        stack = list(self._root.children.values())
        while stack:
            run = stack.pop()
            yield run
            stack.extend(run.children.values())

    # ------------------------------------------------------------ writing

    def hold(self, replica: str, blocks: PrefixBlocks, at: float, *, used: bool = True) -> tuple[Run, ...]:
        """Record that the replica has, or will have, this prefix; return its runs in order. `used` is True for a
        request's prefix."""
        blocks = blocks[: self.capacity]
        if not blocks:
            return ()
        match = self.match(blocks)
        path = list(match.path)
        if path and match.depth < path[-1].end:
            path[-1] = self._split(path[-1], match.depth)
        if match.depth < len(blocks):
            parent = path[-1] if path else self._root
            run = Run(blocks[match.depth :], match.depth, parent)
            parent.children[run.blocks[0]] = run
            path.append(run)
        self._touch(replica, path)
        if used:
            era = int(at // self._half_window_s)
            for run in path:
                run.use(era)
        cache = self._caches[replica]
        while cache.blocks > self.capacity:
            entry = heappop(cache.cold)
            if not _is_stale(entry, replica):
                self._remove_run(replica, entry[2])
        return tuple(path)

    def cut(self, replica: str, blocks: PrefixBlocks, keeps: int) -> None:
        """Record that the replica keeps only the first `keeps` blocks of a prefix."""
        match = self.match(blocks)
        if match.depth <= keeps:
            return
        run = next(run for run in match.path if run.end > keeps)
        if run.start < keeps and replica in run.holders:
            self._split(run, keeps)  # `run` is now what begins at `keeps`
        self._remove_subtree(replica, run)

    def use(self, replica: str, share: float) -> None:
        """Record that running requests occupy this share (0 to 1) of the replica's cache."""
        self._caches.setdefault(replica, ReplicaCache()).used = share

    def forget_replica(self, replica: str) -> None:
        """Record that the replica holds nothing any more.

        Called when its cache was cleared, or it is gone. Runs that no other replica holds leave the index.
        """
        cache = self._caches.pop(replica, None)
        for _, _, run in cache.cold if cache is not None else ():
            if run.holders.pop(replica, None) is not None and not run.holders:
                _detach(run)

    # ------------------------------------------------------------ the tree

    def _split(self, run: Run, at: int) -> Run:
        """Cut a run before block `at` and return the new first half.

        The old object stays the second half: its end, its children and its entries in the heaps stay right.
        """
        cut = at - run.start
        assert run.parent is not None
        top = Run(run.blocks[:cut], run.start, run.parent, {run.blocks[cut]: run}, dict(run.holders))
        top.era, top.uses, top.uses_before = run.era, run.uses, run.uses_before
        run.parent.children[run.blocks[0]] = top
        run.parent, run.blocks, run.start = top, run.blocks[cut:], at
        for replica, tick in top.holders.items():
            cache = self._caches[replica]
            cache.runs += 1
            heappush(cache.cold, (tick, -top.end, top))
        return top

    def _touch(self, replica: str, path: list[Run]) -> None:
        """Record that a replica holds these runs and has just used them: they are the last to be dropped.

        The heap is cleaned of stale entries once these are most of it.
        """
        cache = self._caches.setdefault(replica, ReplicaCache())
        self._tick += 1
        for run in path:
            if replica not in run.holders:
                cache.blocks += len(run.blocks)
                cache.runs += 1
            run.holders[replica] = self._tick
            heappush(cache.cold, (self._tick, -run.end, run))
        if len(cache.cold) > 64 + 4 * cache.runs:
            cache.cold = [entry for entry in cache.cold if not _is_stale(entry, replica)]
            heapify(cache.cold)

    def _remove_subtree(self, replica: str, run: Run) -> None:
        """Remove a run and all that follow it from a replica."""
        stack, held_runs = [run], []
        while stack:
            current = stack.pop()
            if replica in current.holders:
                held_runs.append(current)
                stack.extend(current.children.values())
        for current in reversed(held_runs):
            self._remove_run(replica, current)

    def _remove_run(self, replica: str, run: Run) -> None:
        """Record that a replica holds a run no more, and remove the run if no other replica holds it."""
        cache = self._caches[replica]
        del run.holders[replica]
        cache.blocks -= len(run.blocks)
        cache.runs -= 1
        if not run.holders:
            _detach(run)


def key_portion(path: tuple[Run, ...]) -> int:
    """Return the name of a prompt's key portion, its last run that is longer than all before it; 0 for none.

    Loads are kept by this name, so that rebalancing can move the prompts of one portion to another replica.
    """
    for run in reversed(path):
        if len(run.blocks) > run.start:
            return run.name
    return 0


def _common_length(run: PrefixBlocks, blocks: PrefixBlocks, start: int) -> int:
    """Return the number of blocks that a run and `blocks[start:]` share; they share the first.

    Hashes are chained, so a binary search finds the last.
    """
    max_length = min(len(run), len(blocks) - start)
    if run[max_length - 1] == blocks[start + max_length - 1]:
        return max_length
    low, high = 1, max_length - 1
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == blocks[start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _detach(run: Run) -> None:
    """Remove a run that no replica holds; no replica holds what follows it either."""
    if run.parent is not None:
        run.parent.children.pop(run.blocks[0], None)


def _is_stale(entry: Entry, replica: str) -> bool:
    tick, _, run = entry
    return run.holders.get(replica) != tick
