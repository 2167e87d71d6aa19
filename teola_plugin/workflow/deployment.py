"""A workflow on a pool: it runs, streams and explains queries; and the results of these."""

from __future__ import annotations

import asyncio
import contextvars
import logging
import uuid
from collections.abc import AsyncIterator, Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypedDict, Unpack

from teola_plugin.adapters.calls import RequestedContext, outer_context, with_app
from teola_plugin.adapters.explain import ended_trace, explain
from teola_plugin.adapters.plan_report import PlanReport
from teola_plugin.adapters.planned_queries import expected_sizes
from teola_plugin.errors import RegistrationError, unknown_name
from teola_plugin.graph import Query, RequestContext, has_own_thread, own_thread
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.passes import Optimised, Pass
from teola_plugin.pool import EnginePool, need_pool
from teola_plugin.runtime.loop_thread import CallHandle, PieceLog, SameLoop
from teola_plugin.runtime.query_run import QueryRun, current_request_context, current_run
from teola_plugin.workflow.config import Config
from teola_plugin.workflow.indexing import THIS_QUERY
from teola_plugin.workflow.values import plain
from teola_plugin.workflow.workflow import Lowered, Workflow

_SOON = 5.0
"""Seconds in which the trace of a query that is over is complete."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of a query."""

    answer: Any
    """The value of the workflow's output."""
    sources: tuple[Any, ...]
    """Passages (`Hit`: id, text, metadata, score) that it rests on; empty where no component finds any."""
    outputs: Mapping[str, Any]
    """Values by component, but for vectors."""
    config: Config
    query_id: str
    trace: QueryTrace | None = field(default=None, repr=False, compare=False)

    def __str__(self) -> str:
        return str(self.answer)

    def to_dict(self) -> dict[str, Any]:
        """Return the result as JSON data, without the trace. Values without a JSON form become text."""
        return {
            "answer": plain(self.answer),
            "sources": plain(self.sources),
            "outputs": plain(self.outputs),
            "config": self.config.to_dict(),
            "query_id": self.query_id,
        }


class Running:
    """A query that is under way. `result()` waits for it, and so does `await`; giving up waiting cancels it."""

    def __init__(self, run: QueryRun, lowered: Lowered, config: Config, owner: int, on_end: Callable[[], None]) -> None:
        self._run, self._lowered, self._config = run, lowered, config
        self._handle = CallHandle(run.output, cancel=run.cancel, owner=owner, on_lost=run.cancel)
        run.output.add_done_callback(lambda _: on_end())

    @property
    def id(self) -> str:
        return self._run.id

    @property
    def output(self) -> str:
        """The name of the component that gives the answer."""
        return self._lowered.output

    @property
    def done(self) -> bool:
        """True if the query has ended, with a result or an error."""
        return self._handle.done

    def result(self, timeout: float | None = None) -> Result:
        """Return the result, or raise the query's error. A TimeoutError cancels the query."""
        try:
            values: Any = self._handle.result(timeout)
        except BaseException:
            if self.done:  # what the query leaves is cleaned up when its trace is there
                self._run.trace.result(_SOON)
            raise
        return self._to_result(values, self._run.trace.result(_SOON))

    def __await__(self) -> Generator[Any, None, Result]:
        return self._wait().__await__()

    async def _wait(self) -> Result:
        values: Any = await self._handle
        return self._to_result(values, await asyncio.wrap_future(self._run.trace))

    def _to_result(self, values: Mapping[str, Any], trace: QueryTrace | None) -> Result:
        sources = values.get(self._lowered.sources) or ()
        return Result(values[self._lowered.output], tuple(sources), values, self._config, self.id, trace)

    def cancel(self) -> None:
        """Ends it; whoever waits gets `QueryCancelled`."""
        self._run.cancel()


class Stream:
    """The answer's text as it is written: iterate it (also `async for`), then ask for the `result`.

    Pieces joined are the answer's text. An answer that no model writes at the end comes as one piece. Who stops
    reading before the end gives the query up.
    """

    def __init__(self, running: Running, run: QueryRun, log: PieceLog) -> None:
        self.running = running
        self._log = log
        run.output.add_done_callback(lambda _: self._on_end(run))

    def _on_end(self, run: QueryRun) -> None:
        if run.streamed_into is not None or run.output.exception() is not None:
            self._log.close()

    def __iter__(self) -> Iterator[str]:
        """Yield the answer's text as it is written. Raise the query's error. Leaving early cancels the query."""
        some = False
        try:
            for piece in self._log:
                some = True
                yield piece.text
            yield from self._rest(self.running.result(), some)
        except GeneratorExit:
            self.running.cancel()
            raise

    async def __aiter__(self) -> AsyncIterator[str]:
        """Yield the answer's text as it is written, in a loop. Leaving it early cancels the query."""
        some = False
        try:
            async for piece in self._log:
                some = True
                yield piece.text
            for text in self._rest(await self.running, some):
                yield text
        except (GeneratorExit, asyncio.CancelledError):
            self.running.cancel()
            raise

    @staticmethod
    def _rest(result: Result, some: bool) -> Iterator[str]:
        if not some and result.answer not in (None, ""):
            yield str(result.answer)

    def result(self, timeout: float | None = None) -> Result:
        """The whole result, once it is there."""
        return self.running.result(timeout)

    def __await__(self) -> Generator[Any, None, Result]:
        return self.running.__await__()

    def cancel(self) -> None:
        self.running.cancel()


# ------------------------------------------------------------ deployments

log = logging.getLogger("teola_plugin")
Given = Mapping[str, Any]


class QueryOptions(TypedDict, total=False):
    """See `Deployment`; None is as if it were not said."""

    tenant: str | None
    deadline_s: float | None
    weight: float | None
    app: str | None


class Deployment:
    """A workflow on a pool, as `workflow.deploy(pool)` returns it. Usable from any thread or loop, and cheap to create.

    Every query binds its own inputs; one template without any query's values serves them all. Options of a query:
    `tenant`, which shares prefixes; `deadline_s`, seconds until it fails with `QueryTimeout`; `weight`, its share among
    queries; `app`, the name in traces, by default the workflow's. An option that is not given is taken from the
    enclosing query, if there is one.
    """

    def __init__(
        self,
        workflow: Workflow,
        pool: EnginePool,
        passes: Iterable[Pass | str] | None,
        speculate: str,
        name: str,
        config: Config,
    ) -> None:
        self.workflow, self.pool, self.name = workflow, pool, name
        self.base = config
        """Settings that all of its queries have, unless they say others."""
        self._passes = None if passes is None else tuple(passes)
        self._speculate = speculate
        self._last: list[QueryRun] = []

    # ------------------------------------------------------------ queries

    def run(self, inputs: Given, config: Given | None = None, **options: Unpack[QueryOptions]) -> Result:
        """The result of a query. `config` changes settings for it alone.

        Raises `RegistrationError` for wrong inputs, settings or options, `QueryTimeout`, and what a component
        failed by: an exception of your own function as it is, an engine's within a `QueryError`.
        """
        return self.submit(inputs, config, **options).result()

    async def arun(self, inputs: Given, config: Given | None = None, **options: Unpack[QueryOptions]) -> Result:
        """`run` in a loop; who is cancelled cancels the query."""
        return await self._begin(inputs, config, options)[0]

    def submit(self, inputs: Given, config: Given | None = None, **options: Unpack[QueryOptions]) -> Running:
        """Begin a query and return it while it runs: wait with `.result()` or `await`, or give it up with `.cancel()`.

        Raise RegistrationError if the pool runs on the caller's own loop.
        """
        self._need_thread()
        return self._begin(inputs, config, options)[0]

    def stream(self, inputs: Given, config: Given | None = None, **options: Unpack[QueryOptions]) -> Stream:
        """Begin a query whose answer is read as it is written: iterate over the text's pieces, then call `.result()`.

        Raise RegistrationError if the pool runs on the caller's own loop.
        """
        self._need_thread()
        return self.astream(inputs, config, **options)

    def astream(self, inputs: Given, config: Given | None = None, **options: Unpack[QueryOptions]) -> Stream:
        """Begin a query whose answer is read on a loop as it is written.

        Iterate over the text's pieces with `async for`, then `await` the result.
        """
        pieces = PieceLog()
        running, live = self._begin(inputs, config, options, pieces)
        return Stream(running, live, pieces)

    def _need_thread(self) -> None:
        """Raise RegistrationError for a sync call of a pool that runs on the caller's own loop."""
        if isinstance(self.pool.runtime.loop, SameLoop):
            raise RegistrationError(
                "the pool runs on this very loop, which nobody may block.", hint="use arun, or astream"
            )

    def _begin(
        self, inputs: Given, config: Given | None, options: Mapping[str, Any], pieces: PieceLog | None = None
    ) -> tuple[Running, QueryRun]:
        """Plan a query and submit it to the pool. `pieces`: log that gets its text as it is written."""
        settings = self.configured(config)
        lowered = self.workflow.lower(settings)
        values = self.workflow.bind(inputs)
        query = self._query(lowered, values, self._request_context(options))
        plan = self._plan(lowered, values)
        live = self.pool.runtime.submit(
            query,
            plan.graph,
            _InContext(lowered.traced.calls, query.request_context),
            pgraph=plan.source,
            passes=tuple((r.pass_name, r.fired, r.seconds) for r in plan.reports),
            streamed=lowered.text if pieces is not None else "",
            into=pieces,
        )
        self._last[:] = [live]
        running = Running(
            live, lowered, settings, self.pool.runtime.loop.ident, partial(self._delete_collections, lowered, query)
        )
        return running, live

    def _query(self, lowered: Lowered, values: dict[str, Any], request_context: RequestContext) -> Query:
        """Create the query with its inputs, and with a new collection if it uploads documents for itself alone."""
        collection = {THIS_QUERY: f"query_{uuid.uuid4().hex}"} if lowered.temporary else {}
        return Query(
            {"input": values | collection},
            app=request_context.app,
            tenant=request_context.tenant,
            deadline=request_context.deadline,
            weight=request_context.weight,
        )

    def _request_context(self, options: Mapping[str, Any]) -> RequestContext:
        """Return the request context of a query. Raise RegistrationError for an invalid option."""
        for key in options:
            if key not in ("tenant", "deadline_s", "weight", "app"):
                raise unknown_name("term", key, ["tenant", "deadline_s", "weight", "app"])
        set_options = {key: value for key, value in options.items() if value is not None}
        requested = RequestedContext.of(set_options, tenant="tenant", deadline_s="deadline_s", weight="weight")
        outer_run = current_run.get()
        request_context = requested.applied_to(
            outer_context([] if outer_run is None else [outer_run]), self.pool.runtime.time()
        )
        return with_app(request_context, set_options.get("app", self.name))

    def _delete_collections(self, lowered: Lowered, query: Query) -> None:
        """Delete what was indexed for this query alone, in the background."""
        for store in lowered.temporary:
            try:
                done: Future[Any] = self.pool.clean_up(store, "delete_collection", query.inputs["input"][THIS_QUERY])
                done.add_done_callback(partial(_deleted, store))
            except Exception as error:  # the pool is closed
                _left(store, error)

    def forget(self) -> None:
        """Forget ended queries: the trace of the last one, and templates of configurations."""
        self._last.clear()
        self.workflow.forget_configurations()

    def in_collections(self, renamed: Callable[[str, str], str]) -> Deployment:
        """The same, whose components write and search in other collections; see `Workflow.in_collections`."""
        moved = self.workflow.in_collections(renamed)
        return Deployment(moved, self.pool, self._passes, self._speculate, self.name, self.base)

    # ------------------------------------------------------------ seeing it

    def configured(self, config: Given | None = None) -> Config:
        """The settings of a query that says these. Raises `RegistrationError`."""
        if not config:
            return self.base
        changes = self.workflow.config(config)
        merged = {name: {**dict(self.base.get(name, {})), **changes.get(name, {})} for name in {*self.base, *changes}}
        return self.workflow.config(merged) if self.base else changes

    def plan(self, inputs: Given | None = None, config: Given | None = None) -> Optimised:
        """The e-graph (`.graph`, printable, `.graph.mermaid()`), the p-graph (`.source`), the passes that made one of
        the other. With `inputs`, for sizes like theirs."""
        values = self.workflow.bind(inputs) if inputs else {}
        return self._plan(self.workflow.lower(self.configured(config)), values)

    def _plan(self, lowered: Lowered, values: Given) -> Optimised:
        sizes = expected_sizes(lowered.traced, values) if values else {}
        return self.pool.plan(lowered.traced.template, sizes, passes=self._passes, speculate=self._speculate)

    def explain(self, inputs: Given | None = None, config: Given | None = None, *, details: bool = False) -> str:
        """Describe in three lines which requests start before their place, and what to expect. Runs nothing.

        `details` adds sections: each component, the p-graph, the e-graph, the passes that fired, and advice.
        """
        return self.report(inputs, config).text(details=details)

    def report(self, inputs: Given | None = None, config: Given | None = None) -> PlanReport:
        """Return what `explain` prints, as data.

        The plan is the one for inputs of these sizes and this configuration. The trace is that of the last query that
        has ended, if there is one.
        """
        traced = self.workflow.lower(self.configured(config)).traced
        return explain(traced, self.plan(inputs, config), self.pool, trace=ended_trace(self._last))

    def mermaid(self, inputs: Given | None = None, config: Given | None = None) -> str:
        """The e-graph as a Mermaid flow chart."""
        return self.plan(inputs, config).graph.mermaid()

    def last_trace(self, timeout: float = 5.0) -> QueryTrace | None:
        """Return the trace of the query that began last; None before the first one."""
        return self._last[0].trace.result(timeout) if self._last else None

    def input_schema(self) -> dict[str, Any]:
        """JSON schema of the inputs."""
        return self.workflow.input_schema()

    def config_schema(self) -> dict[str, Any]:
        """JSON schema of what `config` may be."""
        return self.workflow.config_schema()

    def __repr__(self) -> str:
        return f"<Deployment {self.name!r} on {self.pool!r}>"


def deployed(
    workflow: Workflow,
    pool: EnginePool,
    passes: Iterable[Pass | str] | None,
    speculate: str,
    name: str,
    config: Config,
) -> Deployment:
    """On the pool, under that name. Raises as `Workflow.deploy` says."""
    need_pool(pool)
    for one in workflow.flow.everything():
        for engine, kinds in one.engines().items():
            if engine not in pool.engine_names:
                error = unknown_name("engine", engine, list(pool.engine_names))
                error.message = f"workflow {workflow.name!r}, component {one.name!r}: {error.message}"
                error.args = (error.message,)
                raise error
            lacks = [kind.value for kind in kinds if kind not in pool.engine(engine).kinds]
            if lacks:
                raise RegistrationError(
                    f"workflow {workflow.name!r}, component {one.name!r}: engine {engine!r} does no {lacks[0]}.",
                    hint=f"give the component another one of {', '.join(pool.engine_names)}",
                )
    deployment = Deployment(workflow, pool, passes, speculate, name, config)
    pool.deploy(name, deployment)
    return deployment


class _InContext(Mapping[str, Callable[..., Any]]):
    """A workflow's functions for one query: those of the user's see the context variables of whoever asked, and
    their requests to pools have the query's context."""

    def __init__(self, calls: Mapping[str, Callable[..., Any]], request_context: RequestContext) -> None:
        self._calls = calls
        self._context = contextvars.copy_context()
        self._context.run(current_run.set, None)
        self._context.run(current_request_context.set, request_context)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        call = self._calls[name]
        return own_thread(partial(self._context.copy().run, call)) if has_own_thread(call) else call

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)

    def object_of(self, name: str) -> str:
        """Return the description of a component's object, as `ClientCalls` does."""
        description: str = getattr(self._calls, "object_of", str)(name)
        return description


def _deleted(store: str, done: Future[Any]) -> None:
    if not done.cancelled() and (error := done.exception()) is not None:
        _left(store, error)


def _left(store: str, error: BaseException) -> None:
    log.warning("a query's own collection could not be deleted from %s: %s", store, error)
