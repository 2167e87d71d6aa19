"""A query as its engines see it: its requests, their sizes, and what each piece of work waits for.

A flow is what is left of an app without its own code, its texts and its values. Schedulers and engines treat a flow
like the app, so thousands of queries can be replayed without the time that each one's code would take.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from teola_plugin.graph import PrimitiveKind
from teola_plugin.scheduling.live_query import Objective

END = -1
"""Stands for the end of a piece of work in place of one of its tokens."""
After = tuple[int, int]
"""(index of a work in the flow, one of its tokens from 1, or `END`)"""


@dataclass(frozen=True, slots=True)
class FlowRequest:
    """One request. Sizes of prompts and answers in tokens; 0 for engines that are no LLMs."""

    size: float = 1
    """Slots that it takes."""
    prompt: int = 0
    output: int = 0
    keys: tuple[int, ...] = ()
    """Blocks of its prompt, as the engine's prefix cache names them."""
    blocks: tuple[int, ...] = ()
    """The same blocks as placement names them; empty if it does not use them."""


@dataclass(frozen=True, slots=True)
class FlowChange:
    """A change of a work that waits or runs: its depth or its objective becomes known."""

    after: tuple[After, ...]
    depth: int | None = None
    objective: Objective | None = None
    gang: str = ""


@dataclass(frozen=True, slots=True)
class FlowWork:
    """One primitive, or one call of the original, at its engine."""

    engine: str
    kind: PrimitiveKind
    asks: tuple[FlowRequest, ...]
    after: tuple[After, ...] = ()
    """It is requested when all of these have happened; if there are none, with the query."""
    is_planned: bool = True
    """True if a graph requests it, as soon as it may; False for a call of the original, which comes a moment later."""
    depth: int = 0
    objective: Objective = Objective.LATENCY
    gang: str = ""
    session: str = ""
    when_idle: bool = False
    remaining: float = 0.0
    given_up: tuple[After, ...] | None = None
    """It is not needed any more when all of these have happened; None if it is needed to the end of the query."""
    changes: tuple[FlowChange, ...] = ()

    @property
    def warmup(self) -> bool:
        return self.kind is PrimitiveKind.PARTIAL_PREFILLING


@dataclass(frozen=True, slots=True)
class Flow:
    """One query: its works, each after those it waits for, and the works that its answer waits for."""

    works: tuple[FlowWork, ...]
    end: tuple[After, ...]

    def used(self) -> frozenset[int]:
        """Return the works that the answer depends on."""
        used: set[int] = set()
        stack = [work for work, _ in self.end]
        while stack:
            work = stack.pop()
            if work not in used:
                used.add(work)
                stack += [predecessor for predecessor, _ in self.works[work].after]
        return frozenset(used)

    def of_query(self, number: int, shared: frozenset[int]) -> Flow:
        """Return the flow of another query of the same form: blocks of prompts that are not `shared` get names of their
        own."""

        def rename_blocks(names: Sequence[int]) -> tuple[int, ...]:
            return tuple(name if name in shared else hash((name, number)) for name in names)

        works = (
            replace(
                work,
                asks=tuple(
                    replace(request, keys=rename_blocks(request.keys), blocks=rename_blocks(request.blocks))
                    for request in work.asks
                ),
            )
            if any(request.keys or request.blocks for request in work.asks)
            else work
            for work in self.works
        )
        return Flow(tuple(works), self.end)


def shared_blocks(flows: Iterable[Flow]) -> frozenset[int]:
    """Return the blocks of prompts that queries with different inputs have in common."""
    counts: Counter[int] = Counter()
    for flow in flows:
        requests = [request for work in flow.works for request in work.asks]
        counts.update({name for request in requests for name in (*request.keys, *request.blocks)})
    return frozenset(name for name, count in counts.items() if count > 1)
