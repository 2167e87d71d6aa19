"""A call that has started: the live query, and what runs beside it; or the original, with its request context."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, aclosing, contextmanager, nullcontext
from typing import Any, NamedTuple, TypeVar
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.outputs import ChatGeneration, LLMResult
from langchain_core.runnables import Runnable
from langchain_core.runnables.base import RunnableBindingBase
from langchain_core.runnables.config import RunnableConfig, ensure_config, merge_configs

from teola_plugin.adapters.calls import (
    Deadline,
    RequestedContext,
    aitems_inside,
    astreamed_in,
    interrupting,
    items_inside,
    joined,
    streamed_in,
)
from teola_plugin.adapters.langchain.listening import composite_rules
from teola_plugin.adapters.langchain.prefetching import QueryCalls, closing
from teola_plugin.adapters.planned_queries import ending
from teola_plugin.adapters.routing import RoutingRules, arouted_items, routed_items, under_routing
from teola_plugin.graph import RequestContext
from teola_plugin.requests.payloads import AnswerForm
from teola_plugin.runtime.call_limits import ConcurrencyLimit
from teola_plugin.runtime.prefetch_gate import GatedQuery
from teola_plugin.runtime.query_run import QueryRun, SubplanRun, current_run, during
from teola_plugin.shims.langchain import inline_callback
from teola_plugin.shims.langchain_interceptors import wrap_new_classes
from teola_plugin.shims.stack_levels import hide_from_stack_levels
from teola_plugin.tracer.langchain.trace import UNTAGGED, RunPath

_END: Any = object()

_CHILD_TAGS = ("seq:step:", "map:key:", "condition:", "branch:", "retry:attempt:")


class PathTracker:
    """The run paths of one query's runs. Feed it every run as it starts, parents first, from any thread.

    The first run without a known parent is the root, with the path `()`; later ones belong to another query and have no
    path.
    """

    def __init__(self) -> None:
        self._paths: dict[Hashable, RunPath | None] = {}

    def add_run(self, run_id: Hashable, parent_run_id: Hashable | None, tags: Sequence[str] | None) -> RunPath | None:
        """Record a run that starts. Return its path, None for a run of another query."""
        if parent_run_id in self._paths:
            parent_path = self._paths[parent_run_id]
            tag = next((tag for tag in tags or () if tag.startswith(_CHILD_TAGS)), UNTAGGED)
            path = None if parent_path is None else (*parent_path, tag)
        else:
            path = None if self._paths else ()
        self._paths[run_id] = path
        return path

    def path(self, run_id: Hashable) -> RunPath | None:
        """Return the path of a run that has started, None for a run of another query."""
        return self._paths.get(run_id)


class SessionHandler(BaseCallbackHandler):
    """Inherited by every run of the call. Tells the live query what user code computed; changes nothing.

    Pool-backed objects find the query through `teola_run` wherever the framework hands callbacks on.
    """

    def __init__(self, run: QueryRun | SubplanRun, watched: Mapping[RunPath, str]) -> None:
        self.teola_run = run.query_run
        self._run = run
        self._watched = watched
        self._tracker = PathTracker()
        unwatched = not watched
        self._ignored = unwatched

    @property
    def ignore_chain(self) -> bool:
        return self._ignored

    ignore_llm = ignore_chat_model = ignore_retriever = ignore_agent = ignore_chain  # type: ignore[assignment]

    @property
    def ignore_retry(self) -> bool:
        return True

    @property
    def ignore_custom_event(self) -> bool:
        return True

    @inline_callback
    def _start(
        self,
        serialized: Any,
        given: Any,
        *,
        run_id: UUID,
        parent_run_id: UUID | None = None,
        tags: list[str] | None = None,
        **_: Any,
    ) -> None:
        """Note where a run stands in the chain, so that `_observe` finds its component when the run ends."""
        self._tracker.add_run(run_id, parent_run_id, tags)

    on_chain_start = on_llm_start = on_chat_model_start = on_retriever_start = on_tool_start = _start  # type: ignore[assignment]

    @inline_callback
    def on_chain_end(self, outputs: Any, *, run_id: UUID, **_: Any) -> None:
        self._observe(run_id, outputs)

    @inline_callback
    def on_retriever_end(self, documents: Any, *, run_id: UUID, **_: Any) -> None:
        self._observe(run_id, documents)

    @inline_callback
    def on_tool_end(self, output: Any, *, run_id: UUID, **_: Any) -> None:
        self._observe(run_id, output)

    @inline_callback
    def on_llm_end(self, response: LLMResult, *, run_id: UUID, **_: Any) -> None:
        generation = response.generations[0][0]
        self._observe(run_id, generation.message if isinstance(generation, ChatGeneration) else generation.text)

    def _observe(self, run_id: UUID, value: Any) -> None:
        """Give a value that a run computed to the live query, if the graph waits for that component."""
        path = self._tracker.path(run_id)
        component = self._watched.get(path) if path is not None else None
        if component is not None:
            self._run.observe(component, value)


def _ignore_event(self: SessionHandler, *args: Any, **kwargs: Any) -> None:
    """Handle an event of no interest where it occurs: `BaseCallbackHandler`'s own methods go to a thread each time."""


for _name in (
    *(f"on_{kind}_error" for kind in ("chain", "llm", "retriever", "tool")),
    *("on_llm_new_token", "on_stream_event", "on_text", "on_agent_action", "on_agent_finish"),
):
    setattr(SessionHandler, _name, inline_callback(_ignore_event))


def joined_config(config: RunnableConfig | None, handler: SessionHandler) -> RunnableConfig:
    """`config` (or the ambient one) with the session's handler added to its callbacks."""
    full = ensure_config(config)
    merged = merge_configs({"callbacks": full.get("callbacks")}, {"callbacks": [handler]})
    full["callbacks"] = merged["callbacks"]  # alone: merging whole configs would sort the tags
    return full


@contextlib.contextmanager
def live(run: QueryRun | SubplanRun) -> Iterator[None]:
    """The body runs as part of the query: closed when it has its answer, cancelled when it is given up."""
    with during(current_run, run.query_run), ending(run):
        yield


T = TypeVar("T")


class StartedCall(NamedTuple):
    """One input."""

    run: QueryRun | SubplanRun | None
    """None where the original just runs."""
    config: RunnableConfig | None
    chain: Runnable[Any, Any]
    """What runs: the original, or a copy in which some of its parts are served or planned by themselves."""
    table: QueryCalls | None = None
    request_context: RequestContext | None = None
    """Of what the original calls where there is no query; None for those around it."""
    deadline: Deadline | None = None
    composites: Any = None
    """The `CompositeRules` of the accelerated object, if calls of composites are prefetched."""
    routing: RoutingRules | None = None
    """The rules by which its models are routed to engines."""
    gated: GatedQuery | None = None
    """Says whether the call prefetches; None inside one that does, and where nothing can be prefetched."""

    def give_up(self) -> None:
        """End the query and the prefetches of a call that will run without them."""
        if self.run is not None:
            self.run.close()
        if self.table is not None:
            self.table.close()

    @contextmanager
    def running(self, *, checked: bool = True) -> Iterator[None]:
        """The body runs as part of the query, which ends with it. Raises `QueryTimeout` after a body that is late, if
        that is `checked`."""
        self._intercept_new_classes()
        with self._closing_gate(), self._inside(), under_routing(self.routing):
            if self.run is None:
                with joined(None, self.request_context):
                    yield
            else:
                with closing(self.table), live(self.run):
                    yield
        if self.deadline is not None and checked:
            self.deadline.check()

    def items(self, make: Callable[[], Iterator[T]]) -> Iterator[T]:
        """Yield what a stream of the chain gives. The query ends with it, read to its end or not."""
        query_run = None if self.run is None else self.run.query_run
        with self._until_end():
            ruled = items_inside(self._inside, streamed_in(query_run, self.request_context, make()))
            for item in routed_items(self.routing, ruled):
                if self.deadline is not None:
                    self.deadline.check()
                yield item
            if self.deadline is not None:
                self.deadline.check()

    async def aitems(self, make: Callable[[], AsyncIterator[T]]) -> AsyncIterator[T]:
        """`items` in a loop."""
        query_run = None if self.run is None else self.run.query_run
        with self._until_end():
            ruled = aitems_inside(self._inside, astreamed_in(query_run, self.request_context, make()))
            async with aclosing(arouted_items(self.routing, ruled)) as items:
                while True:
                    async with interrupting(self.deadline):
                        item = await anext(items, _END)
                    if item is _END:
                        return
                    yield item

    @contextmanager
    def _inside(self) -> Iterator[None]:
        """Run the body by the rules for composites, and measure its calls if it runs in place."""
        with under_rules(self.composites), nullcontext() if self.gated is None else self.gated.in_force():
            yield

    @contextmanager
    def _closing_gate(self) -> Iterator[None]:
        """End the gated query with the body."""
        has_answer = False
        try:
            yield
            has_answer = True
        finally:
            if self.gated is not None:
                self.gated.close(has_answer=has_answer)

    def _intercept_new_classes(self) -> None:
        """Intercept methods of classes that were imported since, if rules hold for objects that do not exist yet."""
        if self.routing is not None and self.routing.holds_for_new_objects:
            wrap_new_classes()

    @contextmanager
    def _until_end(self) -> Iterator[None]:
        """Return a context for generators: the query ends with them, or when they are freed."""
        self._intercept_new_classes()
        with self._closing_gate():
            if self.run is None:
                yield
                return
            with closing(self.table), ending(self.run):
                yield


def under_rules(composites: Any) -> AbstractContextManager[None]:
    """Return a context in which calls of composites are prefetched by these rules; None changes nothing."""
    return nullcontext() if composites is None else during(composite_rules, composites)


def version_of_events(runnable: Any, kwargs: Mapping[str, Any]) -> Any:
    """Return the version that `astream_events` is called with, which a binding may say."""
    while "version" not in kwargs and isinstance(runnable, RunnableBindingBase):
        runnable, kwargs = runnable.bound, runnable.kwargs
    return kwargs.get("version")


class CallOptions(NamedTuple):
    """The request context that a call asks for, the queries around it, and how its models are called."""

    requested: RequestedContext
    runs: list[Any]
    form: AnswerForm
    """The form in which its models answer."""
    routing: RoutingRules | None = None


class StartedBatch(NamedTuple):
    """Many inputs, a query each; one object runs them all."""

    runs: list[QueryRun | SubplanRun]
    configs: list[RunnableConfig]
    chain: Runnable[Any, Any]
    tables: list[QueryCalls | None]
    deadline: Deadline | None
    """The first of them."""

    @classmethod
    def of(cls, started: Sequence[StartedCall]) -> StartedBatch | None:
        """Return the batch; None, with nothing left running, unless every input has started."""
        runs = [one.run for one in started if one.run is not None]
        if len(runs) < len(started):
            for one in started:
                one.give_up()
            return None
        first = min((one.deadline for one in started if one.deadline), key=lambda one: one.at, default=None)
        return cls(runs, [one.config or {} for one in started], started[0].chain, [one.table for one in started], first)


class streaming:
    """`live` for batches: no context variable, since a batch is not one query's context.

    Pool-backed objects find their query through the callbacks that the framework hands on.
    """

    def __init__(self, *runs: QueryRun | SubplanRun) -> None:
        self._runs = runs

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Close the queries of the batch; cancel them if the caller was cancelled or interrupted."""
        for run in self._runs:
            if kind is None or issubclass(kind, Exception):
                run.close()
            else:
                run.cancel()


def shared_limit(configs: Sequence[RunnableConfig]) -> ConcurrencyLimit | None:
    """Return the limit that `max_concurrency` sets for the prefetches of all inputs of a batch together."""
    limits = [limit for one in configs if (limit := one.get("max_concurrency"))]
    return ConcurrencyLimit(min(limits)) if limits else None


hide_from_stack_levels(globals())
