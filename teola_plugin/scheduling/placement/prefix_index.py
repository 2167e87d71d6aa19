"""Which instance holds which prefix: a radix tree over block hashes, and a bounded cache of each instance.

Blocks that have always come together are one `Run`, so a prompt of 8,000 tokens touches a handful of nodes, not 500.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush

from teola_plugin.graph.prefix_blocks import PrefixBlocks

Entry = tuple[int, int, "Run"]
"""(tick of its last use, minus its end, run): the coldest first, and of one prompt the end first."""


@dataclass(slots=True, eq=False)
class Run:
    """Blocks that have always come together. An instance holds all of a run or none, and with a run its parents."""

    blocks: PrefixBlocks
    start: int
    """Blocks before it."""
    parent: Run | None = None
    children: dict[int, Run] = field(default_factory=dict)
    """By their first block."""
    held: dict[str, int] = field(default_factory=dict)
    """Instance -> tick of its last use there."""
    era: int = 0
    uses: int = 0
    uses_before: int = 0

    @property
    def end(self) -> int:
        return self.start + len(self.blocks)

    @property
    def name(self) -> int:
        """Its last block: hashes are chained, so that names the whole prefix. Where the run is cut, the name stays
        with its end, and so with the prompts that it was said of; the first half, which more may share, gets its own.
        """
        return self.blocks[-1]

    def use(self, era: int) -> None:
        """A request shares this run, in half window `era`."""
        self._roll(era)
        self.uses += 1

    def sharing(self, era: int) -> int:
        """Requests that shared it within the window."""
        self._roll(era)
        return self.uses + self.uses_before

    def _roll(self, era: int) -> None:
        if era != self.era:
            self.uses_before = self.uses if era == self.era + 1 else 0
            self.era, self.uses = era, 0


@dataclass(frozen=True, slots=True)
class Match:
    """What is known of a prompt: the runs that it begins with (the last perhaps in part), and blocks in all."""

    path: tuple[Run, ...] = ()
    depth: int = 0

    def at(self, instance: str) -> int:
        """Blocks of the prompt that this instance holds."""
        for run in reversed(self.path):
            if instance in run.held:
                return min(run.end, self.depth)
        return 0

    def by_instance(self) -> dict[str, int]:
        """Blocks that each instance holds, of those that hold any."""
        found: dict[str, int] = {}
        for run in self.path:
            found |= dict.fromkeys(run.held, min(run.end, self.depth))
        return found


NOTHING = Match()


@dataclass(slots=True)
class InstanceCache:
    """What one instance holds."""

    blocks: int = 0
    runs: int = 0
    used: float = 0.0
    """Share of its cache that running requests occupy, where the engine says so."""
    cold: list[Entry] = field(default_factory=list)
    """Heap; entries that a later use has made stale are skipped."""


class PrefixIndex:
    """Prefixes by instance. `capacity`: blocks that an instance can hold; the coldest go first.

    Fed with what was routed (`hold`), and with what the engine says of its cache (`hold`, `cut`, `clear`).
    """

    def __init__(self, capacity: int, half_window: float = 90.0) -> None:
        self.capacity = capacity
        self._half = half_window
        self._root = Run((), 0)
        self._caches: dict[str, InstanceCache] = {}
        self._tick = 0

    # ------------------------------------------------------------ reading

    def match(self, blocks: PrefixBlocks) -> Match:
        """The longest known beginning of `blocks`; O(runs on the way + log of the last one)."""
        path: list[Run] = []
        node, depth = self._root, 0
        while depth < len(blocks):
            child = node.children.get(blocks[depth])
            if child is None:
                break
            common = _common(child.blocks, blocks, depth)
            path.append(child)
            depth += common
            if common < len(child.blocks):
                break
            node = child
        return Match(tuple(path), depth) if path else NOTHING

    def blocks_on(self, instance: str) -> int:
        cache = self._caches.get(instance)
        return cache.blocks if cache is not None else 0

    def loss(self, instance: str, blocks: int, at: float) -> float:
        """What an instance forgets when it takes so many new blocks: blocks, each times the requests of the window
        that shared it, divided by its holders."""
        cache = self._caches.get(instance)
        if cache is None:
            return 0.0
        short = blocks + max(cache.blocks, int(cache.used * self.capacity)) - self.capacity
        if short <= 0:
            return 0.0
        era, lost, seen = int(at // self._half), 0.0, []
        while short > 0 and cache.cold:
            run = cache.cold[0][2]
            if not _stale(cache.cold[0], instance):
                lost += min(short, len(run.blocks)) * run.sharing(era) / len(run.held)
                short -= len(run.blocks)
                if short <= 0:
                    break
                seen.append(cache.cold[0])
            heappop(cache.cold)
        for entry in seen:
            heappush(cache.cold, entry)
        return lost

    def runs(self) -> Iterator[Run]:
        """All runs that anybody holds, parents first."""
        todo = list(self._root.children.values())
        while todo:
            run = todo.pop()
            yield run
            todo.extend(run.children.values())

    # ------------------------------------------------------------ writing

    def hold(self, instance: str, blocks: PrefixBlocks, at: float, *, used: bool = True) -> tuple[Run, ...]:
        """The instance has, or will have, this prefix. Returns its runs, first to last. `used`: by a request."""
        blocks = blocks[: self.capacity]
        if not blocks:
            return ()
        match = self.match(blocks)
        path = list(match.path)
        if path and match.depth < path[-1].end:
            path[-1] = self._split(path[-1], match.depth)
        if match.depth < len(blocks):
            parent = path[-1] if path else self._root
            path.append(_attach(parent, Run(blocks[match.depth :], match.depth)))
        self._touch(instance, path)
        if used:
            era = int(at // self._half)
            for run in path:
                run.use(era)
        self._evict(instance, self.capacity)
        return tuple(path)

    def cut(self, instance: str, blocks: PrefixBlocks, keeps: int) -> None:
        """Of the prefix `blocks` the instance keeps the first `keeps` blocks only."""
        match = self.match(blocks)
        if match.depth <= keeps:
            return
        run = next(run for run in match.path if run.end > keeps)
        if run.start < keeps and instance in run.held:
            self._split(run, keeps)  # `run` is now what begins at `keeps`
        self._drop_below(instance, run)

    def use(self, instance: str, share: float) -> None:
        """Running requests occupy this share (0 to 1) of the instance's cache."""
        self._caches.setdefault(instance, InstanceCache()).used = share

    def forget(self, instance: str) -> None:
        """The instance holds nothing any more."""
        cache = self._caches.pop(instance, None)
        for _, _, run in cache.cold if cache is not None else ():
            if run.held.pop(instance, None) is not None and not run.held:
                _detach(run)

    # ------------------------------------------------------------ the tree

    def _split(self, run: Run, at: int) -> Run:
        """Cut a run before block `at`; returns the new first half. The old object stays the second: its end, its
        children and its entries in the heaps stay right."""
        cut = at - run.start
        assert run.parent is not None
        top = Run(run.blocks[:cut], run.start, run.parent, {run.blocks[cut]: run}, dict(run.held))
        top.era, top.uses, top.uses_before = run.era, run.uses, run.uses_before
        run.parent.children[run.blocks[0]] = top
        run.parent, run.blocks, run.start = top, run.blocks[cut:], at
        for instance, tick in top.held.items():
            cache = self._caches[instance]
            cache.runs += 1
            heappush(cache.cold, (tick, -top.end, top))
        return top

    def _touch(self, instance: str, path: list[Run]) -> None:
        cache = self._caches.setdefault(instance, InstanceCache())
        self._tick += 1
        for run in path:
            if instance not in run.held:
                cache.blocks += len(run.blocks)
                cache.runs += 1
            run.held[instance] = self._tick
            heappush(cache.cold, (self._tick, -run.end, run))
        if len(cache.cold) > 64 + 4 * cache.runs:
            cache.cold = [entry for entry in cache.cold if not _stale(entry, instance)]
            heapify(cache.cold)

    def _evict(self, instance: str, limit: int) -> None:
        cache = self._caches[instance]
        while cache.blocks > limit:
            entry = heappop(cache.cold)
            if not _stale(entry, instance):
                self._drop(instance, entry[2])

    def _drop_below(self, instance: str, run: Run) -> None:
        """Take a run and all that follow it from an instance."""
        todo, found = [run], []
        while todo:
            here = todo.pop()
            if instance in here.held:
                found.append(here)
                todo.extend(here.children.values())
        for here in reversed(found):
            self._drop(instance, here)

    def _drop(self, instance: str, run: Run) -> None:
        cache = self._caches[instance]
        del run.held[instance]
        cache.blocks -= len(run.blocks)
        cache.runs -= 1
        if not run.held:
            _detach(run)


def key_portion(path: tuple[Run, ...]) -> int:
    """Names a prompt's key portion: its last run that is longer than all before it; 0 for none."""
    for run in reversed(path):
        if len(run.blocks) > run.start:
            return run.name
    return 0


def _common(run: PrefixBlocks, blocks: PrefixBlocks, start: int) -> int:
    """Blocks that a run and `blocks[start:]` share, the first among them. Hashes are chained: we seek the last."""
    most = min(len(run), len(blocks) - start)
    if run[most - 1] == blocks[start + most - 1]:
        return most
    low, high = 1, most - 1
    while low < high:
        middle = (low + high + 1) // 2
        if run[middle - 1] == blocks[start + middle - 1]:
            low = middle
        else:
            high = middle - 1
    return low


def _attach(parent: Run, run: Run) -> Run:
    run.parent = parent
    parent.children[run.blocks[0]] = run
    return run


def _detach(run: Run) -> None:
    """Nobody holds it, hence nobody holds what follows it."""
    if run.parent is not None:
        run.parent.children.pop(run.blocks[0], None)


def _stale(entry: Entry, instance: str) -> bool:
    tick, _, run = entry
    return run.held.get(instance) != tick
