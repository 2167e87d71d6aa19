"""A call that has begun: the live query, and what runs beside it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

from langchain_core.runnables import Runnable, RunnableConfig

from teola_plugin.adapters.langchain.gates import Gate
from teola_plugin.adapters.langchain.places import Place
from teola_plugin.graph import IMPURE_KINDS, Graph, Primitive
from teola_plugin.passes.decoding_pipelining import GROW
from teola_plugin.runtime.query_run import PartRun, QueryRun
from teola_plugin.tracer.draft import Traced
from teola_plugin.tracer.lcel import SERIAL


class Begun(NamedTuple):
    """One input."""

    run: QueryRun | PartRun
    config: RunnableConfig
    chain: Runnable[Any, Any]
    """The original, or its routed copy."""
    place: Place | None

    def give_up(self) -> None:
        self.run.close()
        if self.place is not None:
            self.place.close()


class BegunBatch(NamedTuple):
    """Many inputs, a query each; one object runs them all."""

    runs: list[QueryRun | PartRun]
    configs: list[RunnableConfig]
    chain: Runnable[Any, Any]
    places: list[Place | None]

    @classmethod
    def of(cls, begun: Sequence[Begun | None]) -> BegunBatch | None:
        """None, with nothing left running, unless every input has begun."""
        live = [one for one in begun if one is not None]
        if len(live) < len(begun):
            for one in live:
                one.give_up()
            return None
        chain = next((one.chain for one in live if one.place is not None), live[0].chain)
        return cls([one.run for one in live], [one.config for one in live], chain, [one.place for one in live])


class streaming:
    """`live` for generators and batches: no context variable, since one of them is not one query's context.

    Pool-backed objects find their query through the callbacks that the framework hands on.
    """

    def __init__(self, *runs: QueryRun | PartRun) -> None:
        self._runs = runs

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for run in self._runs:
            if kind is None or issubclass(kind, Exception):
                run.close()
            else:
                run.cancel()


def shared_limit(configs: Sequence[RunnableConfig]) -> Gate | None:
    """What `max_concurrency` leaves to the early work of all inputs of a batch together."""
    most = [limit for one in configs if (limit := one.get("max_concurrency"))]
    return Gate(min(most)) if most else None


@lru_cache(maxsize=256)
def runs_ahead(source: Graph, graph: Graph) -> bool:
    """Whether anything of the e-graph can start before its place in the plain object; otherwise it is only traced."""
    if any(p.id not in source or p.option(GROW) or p.option(SERIAL) for p in graph):
        return True  # stages, partial prefillings, partial decodings, lists worked on as they grow or all at once
    return any(p.on_engine and any(takes_time(source[name]) for name in freed(p.id, source, graph)) for p in graph)


def freed(name: str, source: Graph, graph: Graph) -> frozenset[str]:
    """What a primitive waited for in the p-graph and does not wait for any more."""
    return source.ancestors[name] - graph.ancestors[name]


def takes_time(p: Primitive) -> bool:
    return p.on_engine or p.kind in IMPURE_KINDS or p.holds_fragment


def shape(traced: Traced, input: Any) -> dict[str, int]:
    """Expected sizes for this input."""
    try:
        return traced.sizes(input)
    except Exception:  # an input that the estimate cannot read: plan without expectations
        return {}
