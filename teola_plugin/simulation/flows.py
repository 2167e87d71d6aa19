"""A query as its engines see it: what is asked of them, of what size, and what each piece of work waits for.

A flow is what is left of an app when its own code, its texts and its values are taken away. Schedulers and engines are
the same for a flow as for the app; so thousands of queries can be replayed where each would cost its own code's time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from teola_plugin.graph import PrimitiveKind
from teola_plugin.scheduling.objectives import Objective

END = -1
"""Of a piece of work: its end, where otherwise one of its tokens is named."""
After = tuple[int, int]
"""(which work of the flow, which token of it, from 1, or `END`)"""


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
    """The same as placement names them; empty where it does not look."""


@dataclass(frozen=True, slots=True)
class FlowChange:
    """What becomes known of a work that waits or runs: its depth, or what is wanted of it."""

    after: tuple[After, ...]
    depth: int | None = None
    objective: Objective | None = None
    gang: str = ""


@dataclass(frozen=True, slots=True)
class FlowWork:
    """One primitive, or one call of the plain object, at its engine."""

    engine: str
    kind: PrimitiveKind
    asks: tuple[FlowRequest, ...]
    after: tuple[After, ...] = ()
    """It is asked for when all of these have happened; nothing: with the query."""
    early: bool = True
    """Whether a graph asks, at once when it may; the plain object comes to it a moment later."""
    depth: int = 0
    objective: Objective = Objective.LATENCY
    gang: str = ""
    session: str = ""
    when_idle: bool = False
    remaining: float = 0.0
    given_up: tuple[After, ...] | None = None
    """It is not wanted any more when all of these have happened; None: it is wanted to the end of the query."""
    changes: tuple[FlowChange, ...] = ()

    @property
    def warmup(self) -> bool:
        return self.kind is PrimitiveKind.PARTIAL_PREFILLING


@dataclass(frozen=True, slots=True)
class Flow:
    """One query: its works, each after those it waits for, and what its answer waits for."""

    works: tuple[FlowWork, ...]
    end: tuple[After, ...]

    def used(self) -> frozenset[int]:
        """The works that the answer rests on."""
        found: set[int] = set()
        todo = [work for work, _ in self.end]
        while todo:
            work = todo.pop()
            if work not in found:
                found.add(work)
                todo += [before for before, _ in self.works[work].after]
        return frozenset(found)

    def of_query(self, number: int, shared: frozenset[int]) -> Flow:
        """The flow of another query of the same form: blocks of prompts that are not `shared` are its own."""

        def own(names: Sequence[int]) -> tuple[int, ...]:
            return tuple(name if name in shared else hash((name, number)) for name in names)

        works = (
            replace(work, asks=tuple(replace(one, keys=own(one.keys), blocks=own(one.blocks)) for one in work.asks))
            if any(one.keys or one.blocks for one in work.asks)
            else work
            for work in self.works
        )
        return Flow(tuple(works), self.end)


def shared_blocks(flows: Iterable[Flow]) -> frozenset[int]:
    """Blocks of prompts that queries with different inputs have in common."""
    counts: Counter[int] = Counter()
    for flow in flows:
        asks = [one for work in flow.works for one in work.asks]
        counts.update({name for one in asks for name in (*one.keys, *one.blocks)})
    return frozenset(name for name, count in counts.items() if count > 1)
