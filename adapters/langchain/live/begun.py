"""A call that has begun: the live query, and what runs beside it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from langchain_core.runnables import Runnable, RunnableConfig

from teola_plugin.adapters.langchain.own_models.gates import Gate
from teola_plugin.adapters.langchain.own_models.places import Place
from teola_plugin.runtime.query_run import PartRun, QueryRun


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
