"""Runs many random cases of each kind of program, and reports those that differ from the original."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from generated import chain_programs, write_programs
from generated.nodes import Node, shrunk
from generated.seeing import Program, Stage, compared
from generated.words import thinkers, writers
from generated.worlds import World, fakes, ingested
from support import garbage
from support.request_counts import rows

FIRST = int(os.environ.get("TEOLA_TEST_SEED", "0"))
"""The first seed of the default suite."""
_THREADS = 6


async def some_rows(world: World) -> None:
    for id, text in (("a", "apple oven in the garden"), ("old", "old bread")):
        await ingested(world.store, "notes", id, text)


WRITES = Stage(fakes, writers, lambda world: rows(world.store), some_rows)
CHAINS = Stage(partial(fakes, poisoned=True), thinkers, lambda world: rows(world.store), some_rows)
Kind = tuple[Stage, Callable[[int], Node], Callable[[int, Node], Program]]
KINDS: dict[str, Kind] = {
    "writes": (WRITES, write_programs.tree, write_programs.program),
    "chains": (CHAINS, chain_programs.tree, chain_programs.program),
}


def differing(kind: Kind, seeds: Iterable[int], threads: int = _THREADS) -> str:
    """Return a report of the programs that differ from the original, the first one shrunk.

    It is empty if there are none.
    """
    stage, tree, program = kind
    garbage.freeze_objects()
    with ThreadPoolExecutor(threads) as pool:
        found = list(pool.map(lambda seed: (seed, compared(stage, program(seed, tree(seed)))), seeds))
    bad = [(seed, aspects) for seed, aspects in found if aspects]
    if not bad:
        return ""
    seed, aspects = bad[0]
    small = shrunk(tree(seed), lambda node: bool(compared(stage, program(seed, node)).keys() & aspects.keys()), 40)
    shown = compared(stage, program(seed, small)) or aspects
    differences = "\n".join(f"  {aspect}: {text}" for aspect, text in shown.items())
    lines = "\n".join(f"  seed {seed}: {', '.join(aspects)}" for seed, aspects in bad)
    return f"{len(bad)} of {len(found)} differ from plain\n{lines}\n\n{program(seed, small)}\n{differences}"
