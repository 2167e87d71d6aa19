"""Accelerated graphs: instances of a subclass of the original's class that share the original's state.

The user's object keeps the original's nodes and subgraphs. What runs is a *runner*: another instance with the same
state, whose nodes tell the live query when they begin.
"""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from langchain_core.runnables import RunnableConfig
from langchain_core.runnables.config import merge_configs
from langchain_core.utils.aiter import aclosing
from langgraph.pregel import Pregel

from teola_plugin.adapters.early_work import joinable, log_fallback
from teola_plugin.adapters.langchain.current_query import active_runs, asked_in
from teola_plugin.adapters.langchain.live.started_calls import StartedCall
from teola_plugin.adapters.langgraph.agents.agent_call import AgentCall
from teola_plugin.adapters.langgraph.agents.eager_tools import EagerTools
from teola_plugin.adapters.langgraph.ahead import Parts
from teola_plugin.adapters.langgraph.graph_call import GraphCall, astepped, stepped
from teola_plugin.adapters.langgraph.plans import Plans, is_same_shape, shaping_of
from teola_plugin.adapters.own_class import subclass_of
from teola_plugin.adapters.serving.serving import Serving, served_section
from teola_plugin.adapters.terms import NO_APP, Asked, Deadline, context_of, named, outer_terms, unplanned
from teola_plugin.graph import Query
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.shims.pydantic import sharing
from teola_plugin.shims.stack_levels import hide_from_stack_levels

if TYPE_CHECKING:
    from teola_plugin.adapters.explain import Explanation

_OURS = "_teola"


@dataclass(slots=True, eq=False)
class Acceleration:
    """On which terms a graph is accelerated."""

    original: Pregel[Any, Any, Any, Any]
    pool: EnginePool | None
    again: Callable[..., Any]
    """`accelerate` on the same terms."""
    app: str = NO_APP
    plans: Plans | None = None
    tools: EagerTools | None = None
    inner: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    """Graphs that are nodes of the original, and what became of them; by identity, which an original keeps."""
    last: list[QueryRun] = field(default_factory=list)
    serving: Serving | None = None
    """What `serve=` has done."""
    composites: Any = None
    """The `CompositeRules` of its nodes, if calls of composites are prefetched."""
    runner: Any = None
    """The graph that runs: it has the original's state, and nodes that tell when they begin."""
    shaping: tuple[Any, ...] = ()
    """See `shaping_of`: what the plans and the runner's nodes were made of."""

    def is_current(self) -> bool:
        """Return True unless a node, an interrupt or the like was set on the original since."""
        return is_same_shape(shaping_of(self.original), self.shaping)


class AcceleratedGraph:
    """Stands before the graph's own class in the order of methods. All of LangGraph's entry points go through
    `stream` and `astream`, and what they do is LangGraph's own."""

    __teola_accelerated__: ClassVar[bool] = True
    if TYPE_CHECKING:
        _teola: Acceleration

    @property
    def original(self) -> Any:
        """The graph that was accelerated."""
        return self._teola.original

    @functools.wraps(Pregel.stream)
    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        ours = None if "stream" in vars(self) else _acceleration_of(self)
        if ours is None:  # made by its class's constructor, or the method was replaced (`mock.patch.object`)
            yield from super().stream(input, config, **kwargs)  # type: ignore[misc]
            return
        started = self._started(config)
        yield from started.items(lambda: self._items(ours.runner, started, input, config, kwargs))

    def _items(
        self, runner: Any, started: StartedCall, input: Any, config: Any, kwargs: dict[str, Any]
    ) -> Iterator[Any]:
        items = runner.stream(input, config, **kwargs)
        call = self._call(started, kwargs)
        return items if call is None else stepped(call, items)

    @functools.wraps(Pregel.astream)
    async def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        ours = None if "astream" in vars(self) else _acceleration_of(self)
        started = None if ours is None else self._started(config)
        if ours is None or started is None:
            items = super().astream(input, config, **kwargs)  # type: ignore[misc]
        else:
            items = started.aitems(lambda: self._aitems(ours.runner, started, input, config, kwargs))
        async with aclosing(items) as chunks:
            async for chunk in chunks:
                yield chunk

    def _aitems(
        self, runner: Any, started: StartedCall, input: Any, config: Any, kwargs: dict[str, Any]
    ) -> AsyncIterator[Any]:
        items = runner.astream(input, config, **kwargs)
        call = self._call(started, kwargs)
        return items if call is None else astepped(call, items)

    # ------------------------------------------------------------ one call

    def _call(self, started: StartedCall, kwargs: Mapping[str, Any]) -> GraphCall | None:
        if started.run is None:
            return None
        run, plans, tools = started.run.whole, self._teola.plans, self._teola.tools
        stops = tools is None or tools.paused(kwargs.get("interrupt_before"), kwargs.get("interrupt_after"))
        agent = None if tools is None or stops else AgentCall(tools, run)
        return GraphCall(self._teola, run, None if plans is None else Parts(plans, run), agent)

    def _started(self, config: RunnableConfig | None) -> StartedCall:
        """A query of its own, or none where there is no pool. Raises `RegistrationError` for terms without sense."""
        merged = _merged(self.config, config)  # type: ignore[attr-defined]
        asked, runs = asked_in(merged), active_runs(merged.get("callbacks"))
        if self._teola.pool is not None:
            try:
                return self._query(asked, runs, self._teola.pool)
            except Exception as error:  # nothing of the original has run yet
                log_fallback(error, self._teola.original)
        clock = time.monotonic if self._teola.pool is None else self._teola.pool.runtime.time
        terms, deadline = unplanned(asked, runs, self._teola.app, clock)
        return StartedCall(None, config, self, terms=terms, deadline=deadline, composites=self._teola.composites)  # type: ignore[arg-type]

    def _query(self, asked: Asked, runs: list[Any], pool: EnginePool) -> StartedCall:
        around = joinable(context_of(asked, runs, pool).run)
        if around is not None:
            around.has_user_code = True  # its nodes'
            return StartedCall(_Inner(around), None, self, composites=self._teola.composites)  # type: ignore[arg-type]
        terms = named(asked.terms(outer_terms(runs), pool.runtime.time()), self._teola.app)
        query = Query({"input": None}, app=terms.app, tenant=terms.tenant, deadline=terms.deadline, weight=terms.weight)
        run = pool.runtime.watch(query, joins=True)
        run.has_user_code = True  # its nodes'
        self._teola.last[:] = [run]
        return StartedCall(run, None, self, deadline=Deadline.of(run), composites=self._teola.composites)  # type: ignore[arg-type]

    # ------------------------------------------------------------ seeing it

    def explain(self, input: Any = None, *, details: bool = False) -> str:
        """What was understood, what begins before its node, what to expect: three lines. Nothing of the graph runs.

        `details`: also its nodes and edges, what of each prompt is constant and what breaks that, and when each call
        begins, in sections. `input` changes nothing; it is there for other accelerated objects' sake.
        """
        return self.__teola_explained__(input).text(details=details)

    def __teola_of__(self) -> tuple[Any, EnginePool | None]:
        """The original, and the pool that plans it."""
        return self._teola.original, self._teola.pool

    def __teola_explained__(self, input: Any = None) -> Explanation:
        from teola_plugin.adapters.expectations import ended_trace, left_for_form
        from teola_plugin.adapters.langgraph.explain import NOTHING_AHEAD, explain_graph
        from teola_plugin.adapters.langgraph.facts import GraphFacts

        ours = self._teola
        facts = GraphFacts(ours.runner, ours.plans, ours.tools)
        note = NOTHING_AHEAD if ours.pool is None else ""
        trace, left = ended_trace(ours.last), left_for_form(ours.last)
        told = explain_graph(facts.nodes, facts.starts, facts.chosen, note, trace, left)
        return replace(told, served=served_section(ours.serving))

    def last_trace(self, timeout: float = 5.0) -> QueryTrace | None:
        """The trace of the last call that was started on this object; None before the first one."""
        return self._teola.last[0].trace.result(timeout) if self._teola.last else None

    # ------------------------------------------------------------ copies

    def copy(self, update: dict[str, Any] | None = None) -> Any:
        """As the original is copied; accelerated on the same terms."""
        ours = self._teola
        return ours.again(ours.original.copy(update), like=ours)

    def __copy__(self) -> Any:
        ours = self._teola
        return ours.again(copy.copy(ours.original), like=ours)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return self._teola.again(copy.deepcopy(self._teola.original, memo))

    def __reduce__(self) -> Any:
        """As the original is pickled. Raises `RegistrationError` for one with a pool, which stays where it is."""
        return self._teola.again, (self._teola.original,)


class _Runner:
    """A mixin for the graph that runs, whose nodes are others than those in its state."""

    if TYPE_CHECKING:
        _teola: Mapping[str, Any]

    @property
    def nodes(self) -> Mapping[str, Any]:
        return self._teola


def _acceleration_of(graph: Any) -> Acceleration | None:
    """Return the terms of an accelerated graph, up to date; None for one that its class's constructor has made."""
    ours: Acceleration | None = getattr(graph, _OURS, None)
    if ours is not None and not ours.is_current():
        last = ours.last
        try:
            ours = ours.again(ours.original, like=ours)._teola
        except Exception as error:  # nothing of the original has run yet
            log_fallback(error, ours.original)
            ours = Acceleration(ours.original, None, ours.again, ours.app, runner=ours.original)
        assert ours is not None
        ours.last = last
        object.__setattr__(graph, _OURS, ours)
    return ours


@dataclass(frozen=True, slots=True)
class _Inner:
    """A graph inside a live query: the query around it goes on when the graph ends."""

    whole: QueryRun

    def close(self) -> None:
        pass

    cancel = close


def _merged(*configs: RunnableConfig | None) -> RunnableConfig:
    """Empty where they cannot be merged: the plain graph says what is wrong with them."""
    try:
        return merge_configs(*configs)
    except Exception:
        return {}


def original_of(graph: Any) -> Any:
    """Return the graph that was accelerated; a graph that is not accelerated itself."""
    return graph._teola.original if isinstance(graph, AcceleratedGraph) else graph


def has_terms(graph: Any) -> bool:
    """Return True for a graph that is accelerated, with a pool, already."""
    return isinstance(graph, AcceleratedGraph) and graph._teola.pool is not None


def accelerated_graph(acceleration: Acceleration, nodes: dict[str, Any]) -> Any:
    """Create the accelerated graph, and the runner with these nodes, which share the original's state."""
    acceleration.runner = _sharing(_Runner, acceleration.original, nodes)
    acceleration.shaping = shaping_of(acceleration.original)
    return _sharing(AcceleratedGraph, acceleration.original, acceleration)


def _sharing(mixin: type, graph: Any, ours: Any) -> Any:
    cls = subclass_of(type(graph), mixin, slots=(_OURS,))
    instance = sharing(cls, graph)
    object.__setattr__(instance, _OURS, ours)
    return instance


hide_from_stack_levels(globals())
