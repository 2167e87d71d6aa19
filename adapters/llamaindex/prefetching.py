"""Prefetched calls of the user's own models and stores, while an object's original answers a sync call.

The object is lowered as one with engines is; `QueryPrefetcher` makes the provider calls of the graph. The original runs
unchanged, and its provider methods find the prefetched results. A call is prefetched if the original makes it later
than its arguments are known: the calls of a list, and calls after others whose results they do not need. For all other
calls the graph waits until the original has made them.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import Container, Hashable, Iterator, Mapping
from concurrent.futures import Future
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field, replace
from types import MethodType
from typing import Any
from weakref import WeakSet

from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.base.llms.types import ChatResponse, CompletionResponse
from llama_index.core.llms import LLM
from llama_index.core.schema import NodeWithScore
from llama_index.core.vector_stores.types import VectorStoreQuery, VectorStoreQueryResult

from teola_plugin.adapters.calls import running_loop
from teola_plugin.adapters.plan_report import CallRow, Explanation, OwnCalls, PrefetchCounts, Reason
from teola_plugin.adapters.planned_queries import expected_sizes, sites_that_start_sooner, submit
from teola_plugin.adapters.provider_executor import Outcome, ProviderRequest, prefetchers, shared_pool
from teola_plugin.adapters.snapshots import NotCopied, snapshot
from teola_plugin.adapters.thread_safety import ThreadSafety
from teola_plugin.graph import Component, Query, Ref, WorkflowTemplate
from teola_plugin.passes import Optimised
from teola_plugin.runtime.call_limits import ConcurrencyLimit, is_inside_prefetch, limit_of
from teola_plugin.runtime.claims import Caller, PlannerGraph
from teola_plugin.runtime.prefetch_gate import scope_in_place
from teola_plugin.runtime.provider_call import Parked, executing
from teola_plugin.runtime.provider_calls import CallScope, ProviderCallTable
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.runtime.threads import daemon_threads, in_child
from teola_plugin.shims.llamaindex.interceptors import (
    STREAMING_METHODS,
    LlamaIndexInvocation,
    body_of,
    embedding_method,
    install,
    is_async_method,
    live_scopes,
    provider_methods,
    worker_of,
)
from teola_plugin.shims.llamaindex.models import CreatedModels, is_paced
from teola_plugin.shims.llamaindex.records import Unreadable
from teola_plugin.shims.llamaindex.silent_calls import (
    CallsPublicMethod,
    ProviderArguments,
    ToolCallText,
    has_own_prompt_code,
    prepare,
    silent_body,
    text_of_answer,
)
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.llamaindex.classes import refuse_unknown_attributes
from teola_plugin.tracer.llamaindex.trace import TracedEntry, trace
from teola_plugin.tracer.symbols import NotUnderstood

MAX_THREADS = 32
"""Prefetched calls of one query that are under way at once."""

STORES = frozenset({"llama_index.core.vector_stores.simple.SimpleVectorStore"})
"""May be searched by several threads."""
_INTEGRATIONS = ("llama_index.llms.", "llama_index.embeddings.")
"""Packages of models, which are clients of an API unless they are among `_IN_PROCESS`."""
_IN_PROCESS = frozenset(
    {
        *("adapter", "autoembeddings", "clip", "fastembed", "gaudi", "huggingface", "huggingface_optimum"),
        *("huggingface_optimum_intel", "instructor", "ipex_llm", "itrex", "kjarni", "langchain", "llama_cpp"),
        *("mistral_rs", "mlx", "modelscope", "nomic", "nvidia_tensorrt", "openvino", "openvino_genai", "optimum_intel"),
        *("oracleai", "sglang", "unionllm", "vllm"),
    }
)
"""Packages whose models run in this process, or call objects of other frameworks."""

_nested_events: WeakSet[type] = WeakSet()
"""Classes whose provider methods were seen to emit events of other public methods: their calls keep their place."""

original_scope: ContextVar[tuple[CallScope, Container[int] | _CalledObjects] | None] = ContextVar(
    "teola_original_scope", default=None
)
"""Set where an original runs whose provider calls may have been prefetched: with the ids of the objects it may call."""
in_child(live_scopes.clear)  # prefetches are under way in the parent process alone


def find_scope(target: Any) -> CallScope | None:
    """Return the scope in which a provider method of `target` is called here; None outside every query."""
    scope, targets = original_scope.get() or (None, ())
    is_called = targets.has(target) if isinstance(targets, _CalledObjects) else id(target) in targets
    if executing.get() is target:
        return None
    return scope if is_called else scope_in_place.get()


@dataclass(frozen=True, slots=True)
class _CalledObjects:
    """The objects whose calls the original of a query may claim."""

    limits: dict[int, tuple[ConcurrencyLimit, ...]] = field(default_factory=dict)
    """Their limits, by the objects' ids."""
    created: CreatedModels = field(default_factory=CreatedModels)
    """The LLMs that stand for those which the original's code creates."""

    def has(self, target: Any) -> bool:
        """Return True for an object whose calls may have been prefetched."""
        return id(target) in self.limits or self.created.find(target) is not None

    def key_of(self, invocation: Any) -> Hashable:
        """Return the request key of the original's call: that of an equal LLM for an LLM that its code has created."""
        target = invocation.target
        key: Hashable = invocation.key(None if id(target) in self.limits else self.created.find(target))
        return key


# ------------------------------------------------------------ which calls may be prefetched


def takes_threads(target: Any, threads: ThreadSafety) -> bool:
    """Return True if several threads may call an object at once.

    That is a client of an API, what the user has named, and a model whose source shows that its calls share nothing.
    """
    return _is_http_client(type(target)) or threads.allows(target, STORES) or _shares_nothing(target)


def _is_http_client(kind: type) -> bool:
    """Return True for a class of one of LlamaIndex's packages for models behind an API. Not for its subclasses."""
    module = kind.__module__
    return module.startswith(_INTEGRATIONS) and module.split(".")[2] not in _IN_PROCESS


def _shares_nothing(model: Any) -> bool:
    """Return True if the source of a model's sync methods shows it. Without the reader of source nothing is known."""
    if not isinstance(model, (BaseEmbedding, LLM)) or type(model).__module__.startswith("llama_index."):
        return False
    try:
        from teola_plugin.tracer.functions.lookup import shares_nothing  # needs `langchain-core`

        kind = type(model)
        names = [name for name in provider_methods(kind) if not is_async_method(name) and name not in STREAMING_METHODS]
        names += [embedding_method(type(model))] if isinstance(model, BaseEmbedding) else []
        return all(shares_nothing(MethodType(body_of(kind, name), model)) for name in names)
    except (ImportError, Unreadable):
        return False


class AllowedModels:
    """Says which of the user's own objects may be called on threads, and collects the call sites of one graph."""

    def __init__(self, threads: ThreadSafety, *, on_loop: bool = False) -> None:
        """`on_loop`: calls of async methods may be prefetched, as tasks of the caller's loop."""
        self._threads, self._on_loop = threads, on_loop
        self.sites: dict[str, ProviderSite] = {}
        self.left: dict[str, tuple[str, Explanation]] = {}
        """The classes of LLMs that may not be prefetched, with the reason."""
        self._created: dict[int, Any] = {}
        """LLMs like those that the code creates when it runs, by id."""

    def require_llm(self, llm: Any) -> Any:
        """See `OwnModels`."""
        worker = worker_of(llm)
        if worker is not None and not getattr(worker, "is_carried", False):
            raise NotUnderstood(f"an engine answers for its LLM, a {type(llm).__name__}")
        self.require_leaf(llm)
        if not self._on_loop and not takes_threads(llm, self._threads):
            self.left[type(llm).__name__] = type(llm).__name__, Explanation(Reason.ONE_THREAD, (type(llm).__name__,))
            raise NotUnderstood(f"its LLM, a {type(llm).__name__}, is not known to take several calls at once")
        if has_own_prompt_code(llm):
            raise NotUnderstood("functions of the user's own write its prompts")
        return llm

    def require_leaf(self, target: Any) -> Any:
        """See `OwnModels`."""
        with refuse_unknown_attributes():
            provider_methods(type(target))
        return target

    def add_created(self, llm: Any) -> None:
        """See `OwnModels`."""
        self._created[id(llm)] = llm

    def add_site(self, key: str, target: Any, *, runs_in_loop: bool) -> None:
        """See `OwnModels`."""
        is_created = id(target) in self._created
        if runs_in_loop:
            self.sites[key] = ProviderSite(target, None, self._on_loop and not is_paced(target), is_created)
        else:
            self.sites[key] = ProviderSite(target, self._limit(target), self._is_allowed(target), is_created)

    def request(self, key: str, arguments: ProviderArguments) -> ProviderRequest:
        """See `OwnModels`."""
        return ProviderRequest(key, arguments)

    def _is_allowed(self, target: Any) -> bool:
        """Return False if a rate limiter or a cache decides when calls are made, or threads may not call it."""
        return not is_paced(target) and (takes_threads(target, self._threads) or self._limit(target) is not None)

    def _limit(self, target: Any) -> ConcurrencyLimit | None:
        """Return the limit of an embedding model that takes one call at a time: an unknown class, or in-process."""
        is_limited = isinstance(target, BaseEmbedding) and not takes_threads(target, self._threads)
        return limit_of(target) if is_limited else None


@dataclass(frozen=True, slots=True, eq=False)
class ProviderSite:
    """A place in an object that calls a model or store of the user's own."""

    target: Any
    limit: ConcurrencyLimit | None
    is_allowed: bool
    """True if calls may be prefetched here."""
    is_created: bool = False
    """True if the code creates an LLM like `target`, which itself calls nobody."""
    counts: PrefetchCounts = field(default_factory=PrefetchCounts)


@dataclass(frozen=True, slots=True)
class PrefetchPlan:
    """The plan of the calls that one entry of an object prefetches."""

    entry: TracedEntry
    traced: TraceResult
    sites: Mapping[str, ProviderSite]
    prefetched: frozenset[str]
    """Keys of the sites whose calls are prefetched."""
    useless: set[str] = field(default_factory=set)
    """Keys of sites in code at which the original succeeded without a call that was prefetched: none is any more."""

    def intercept(self) -> bool:
        """Intercept the provider methods of the sites. Return False after `uninstall`: nothing is prefetched then."""
        kinds = {type(site.target) for site in self.sites.values()}
        return all([install(kind, provider_methods(kind)) for kind in kinds])

    def optimised(self, input: Any) -> Optimised:
        """Return the e-graph of a query."""
        pool = shared_pool()
        return pool.plan(self.traced.template, expected_sizes(self.traced, input), passes=pool.passes, speculate="auto")


def plan_prefetching(
    node: Any, entry: str, texts: int, threads: ThreadSafety, *, is_async: bool = False
) -> tuple[TracedEntry, PrefetchPlan | None]:
    """Return the traced entry and the plan of its prefetched calls; None if no call would start sooner.

    Runs no user code. `is_async`: the async method is called. It has a plan if code of the user's own answers it:
    LlamaIndex's own async code makes its calls side by side itself.
    """
    allowed = AllowedModels(threads, on_loop=is_async)
    traced = trace(node, entry, texts, allowed, is_async=is_async)
    return traced, plan_of_sites(traced, allowed) if traced.own_code or not is_async else None


def plan_of_sites(traced: TracedEntry, allowed: AllowedModels) -> PrefetchPlan | None:
    """Return the plan of the calls of a traced entry that start sooner; None if there are none."""
    if not any(site.is_allowed for site in allowed.sites.values()):
        return None
    pool = shared_pool()
    planned = pool.plan(traced.traced.template, {}, passes=pool.passes, speculate="auto")
    if planned.source is None:
        return None
    sooner = set(sites_that_start_sooner(planned.source, planned.graph))
    prefetched = frozenset(key for key in sooner if allowed.sites[key].is_allowed)
    if not prefetched:
        return None
    for site in allowed.sites.values():
        prepare(site.target)
    template = _reduce_to_sites(traced.traced.template, prefetched, needs_output=False)
    return PrefetchPlan(traced, replace(traced.traced, template=template), allowed.sites, prefetched)


def rows_of_sites(
    traced: TraceResult, plan: PrefetchPlan | None, sites: Mapping[str, ProviderSite]
) -> Iterator[CallRow]:
    """Yield a row for each place that calls a model or store of the user's own. `plan`: of its prefetched calls."""
    from teola_plugin.adapters.explain import call_rows

    pool = shared_pool()
    planned = pool.plan(traced.template, {}, passes=pool.passes, speculate="auto")
    explanations: dict[str, Explanation] = {}
    for key, site in sites.items():
        name = type(site.target).__name__
        if not site.is_allowed:
            explanations[key] = Explanation(
                Reason.RATE_LIMITER if is_paced(site.target) else Reason.ONE_THREAD, (name,)
            )
        elif plan is not None and key in plan.useless:
            explanations[key] = Explanation(Reason.NO_USE)
    prefetched = frozenset() if plan is None else plan.prefetched
    waits = {key: site.target for key, site in sites.items() if site.limit is not None}
    return call_rows(traced, planned, OwnCalls(prefetched - explanations.keys(), waits, sites, explanations))


def _reduce_to_sites(template: WorkflowTemplate, sites: frozenset[str], *, needs_output: bool) -> WorkflowTemplate:
    """Return the components of a template that lead to a site, with bodies that hold no more than these.

    `needs_output`: the template's output is read, so that all components that it is made of are needed.
    """
    by_name = {c.name: c for c in template.components}
    read = {template.output.producer} if needs_output else set()
    unvisited = [c.name for c in template.components if _leads_to(c, sites) or c.name in read]
    needed_names = set[str]()
    while unvisited:
        component = by_name[unvisited.pop()]
        needed_names.add(component.name)
        producers = {ref.producer for _, ref in component.inputs if not ref.external}
        read |= producers
        unvisited += [name for name in producers if name not in needed_names]
    components = [
        _pruned(by_name[c.name], sites, needs_output=c.name in read)
        for c in template.components
        if c.name in needed_names
    ]
    output = template.output
    if not output.external and output.producer not in needed_names:
        output = Ref(components[-1].name)
    order = tuple(pair for pair in template.order if needed_names.issuperset(pair))
    return WorkflowTemplate(tuple(components), output, order, template.name)


def _leads_to(component: Component, sites: frozenset[str]) -> bool:
    bodies = (body for body in (component.body, component.otherwise) if body is not None)
    return component.attributes.wrapped in sites or any(_leads_to(c, sites) for body in bodies for c in body.components)


def _pruned(component: Component, sites: frozenset[str], *, needs_output: bool) -> Component:
    """Return a component with a body reduced to what leads to the sites, unless more of it is needed."""
    has_rounds = component.role.name in ("LOOP", "FOLD")
    if component.body is None or needs_output or has_rounds:
        return component
    if not any(_leads_to(inner, sites) for inner in component.body.components):  # its other branch may
        return component
    return replace(component, body=_reduce_to_sites(component.body, sites, needs_output=False))


# ------------------------------------------------------------ one query


class QueryPrefetcher:
    """The prefetched calls of one query, made on threads, and on the loop for async methods. Close it at the end."""

    def __init__(
        self, plan: PrefetchPlan, input: Any, report_to: QueryRun | None, earlier: QueryPrefetcher | None = None
    ) -> None:
        """`input`: the query's input for the graph. `report_to`: the query whose trace contains the calls. `earlier`:
        prefetched calls that the same original takes; those that both plans ask for are made once."""
        self._plan = plan
        self._called: _CalledObjects = _CalledObjects() if earlier is None else earlier._called
        called, self._targets = self._called, dict[str, Any]()
        """The object whose calls are prefetched, by the keys of the sites."""
        for key, site in plan.sites.items():
            self._targets[key] = called.created.add(site.target) if site.is_created else site.target
            called.limits[id(self._targets[key])] = (site.limit,) if site.limit else ()
        if earlier is None:
            self._table = ProviderCallTable(lambda target: called.limits.get(id(target), ()))
            self._original = CallScope(self._table, Caller.ORIGINAL, result_for_graph, key_of=called.key_of), called
        else:
            self._table, self._original = earlier._table, earlier._original
        if report_to is not None:
            self._table.begin(report_to)
        self._context = copy_context()
        self._context.run(is_inside_prefetch.set, True)
        self._lock = threading.Lock()
        self._waiting: deque[tuple[LlamaIndexInvocation, CallScope, Future[Outcome]]] = deque()
        self._running = 0
        self._loop = running_loop()
        self._slots = asyncio.Semaphore(MAX_THREADS)
        """Limits the calls on the loop."""
        self._tasks: set[asyncio.Task[None]] = set()
        self._scopes: list[tuple[str, CallScope]] = []
        """The scope of each call, behind the key of its site."""
        self._closed, self._has_returned = False, False
        pool = shared_pool()
        pool.running_now()
        query = Query({"input": input})
        prefetchers[query.id] = self
        self._query_id = query.id
        self._graph = PlannerGraph(query.id, query.id, lookahead=True, since=self._table.original_calls)
        live_scopes.add(id(self))
        try:
            self._run = submit(pool, query, plan.optimised(input), plan.traced.calls)
        except BaseException:
            self.close()
            raise

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Let the original's calls in the body claim prefetched results. An exception ends the prefetching."""
        token = original_scope.set(self._original)
        try:
            yield
            self._has_returned = True
        except BaseException:
            self.close()
            raise
        finally:
            with contextlib.suppress(ValueError):  # a stream may be ended elsewhere
                original_scope.reset(token)

    def close(self, *, is_read_from_code: bool = False) -> None:
        """End the query: calls that have not started do not start any more.

        `is_read_from_code`: the original has succeeded, and the source of its code is all that the plan was made of.
        """
        with self._lock:
            closed, self._closed = self._closed, True
            waiting, self._waiting = list(self._waiting), deque()
            scopes = list(self._scopes)
        if closed:
            return
        for key, scope in scopes:
            is_hit = any(call.is_claimed_by(Caller.ORIGINAL) for call in scope.calls)
            if scope.calls:
                self._plan.sites[key].counts.add(is_hit=is_hit)
            is_of_code = self._has_returned and key.startswith(self._plan.entry.own_code)
            if scope.calls and not is_hit and (is_read_from_code or is_of_code):
                self._plan.useless.add(key)
        live_scopes.discard(id(self))
        self._called.created.drop_clients()
        prefetchers.pop(self._query_id, None)
        for _, scope in scopes:
            scope.drop()
        for _, _, result in waiting:
            _end(result, Outcome(error=NotUnderstood("the query is over")))
        run = getattr(self, "_run", None)
        if run is not None:
            run.close()

    # ------------------------------------------------------------ the graph's side

    def prefetch(self, request: ProviderRequest, request_id: str, part: str) -> Future[Outcome]:
        """Return the result of a call at a site, as the graph reads it. See `Prefetcher`."""
        key, input = request.site, request.input
        result, site = Future[Outcome](), self._plan.sites[key]
        # A class that takes one call at a time may not bear other threads: then the original's own call tells.
        scope = CallScope(
            self._table, Caller.PLANNER, result_for_graph, graph=self._graph, shares_errors=site.limit is None
        )
        try:
            args, kwargs = _copied_arguments(input)
        except NotCopied as error:
            _end(result, Outcome(error=error))
            return result
        target = self._targets[key]
        invocation = LlamaIndexInvocation(target, input.method, silent_body(target, input.method), args, kwargs)
        with self._lock:
            if self._closed:
                _end(result, Outcome(error=NotUnderstood("the query is over")))
                return result
            self._scopes.append((key, scope))
            is_prefetched = (
                key in self._plan.prefetched - self._plan.useless and type(site.target) not in _nested_events
            )
            scope.may_make = is_prefetched
            if is_prefetched and invocation.kind == "GENERATION":
                # Equal calls are made one after the other, as the original makes them.
                scope.may_make = not self._table.has_call(invocation.key())
                if scope.may_make:
                    scope.expect(invocation)
            if scope.may_make and not invocation.is_async:
                self._waiting.append((invocation, scope, result))
        if scope.may_make and invocation.is_async and self._loop is not None:
            with contextlib.suppress(RuntimeError):  # it is closed: nobody waits any more
                self._loop.call_soon_threadsafe(self._launch, invocation, scope, result)
        elif scope.may_make:
            self._start()
        else:
            self._await(invocation, scope, result)
        return result

    def _start(self) -> None:
        """Start threads for the waiting calls, up to `MAX_THREADS` for one query."""
        with self._lock:
            threads = min(MAX_THREADS - self._running, len(self._waiting))
            self._running += max(0, threads)
        if threads > 0:
            daemon_threads().run(self._work, threads)

    def _work(self) -> None:
        """Make waiting calls one after the other, on a thread, until none is left."""
        try:
            while True:
                with self._lock:
                    if not self._waiting:
                        return
                    invocation, scope, result = self._waiting.popleft()
                self._context.copy().run(self._call, invocation, scope, result)
        finally:
            with self._lock:
                self._running -= 1

    def _call(self, invocation: LlamaIndexInvocation, scope: CallScope, result: Future[Outcome]) -> None:
        """Make a call on this thread and end `result` with what comes of it.

        A call that reports events of its own is left to the original, and its class is not prefetched again.
        """
        try:
            self._called.created.share_clients(invocation.target)
            value = result_for_graph(scope.last_result(invocation))
        except CallsPublicMethod:
            _nested_events.add(type(invocation.target))
            scope.may_make = False
            self._await(invocation, scope, result)
        except BaseException as error:
            _end(result, Outcome(error=error))
        else:
            _end(result, Outcome(value))

    def _launch(self, invocation: LlamaIndexInvocation, scope: CallScope, result: Future[Outcome]) -> None:
        """Start a call as a task of the caller's loop, unless it was dropped meanwhile. Runs on that loop."""
        assert self._loop is not None
        if not scope.is_dropped:
            self._called.created.share_clients(invocation.target)
            task = self._loop.create_task(self._acall(invocation, scope, result), context=self._context.copy())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            scope.stop = task.cancel

    async def _acall(self, invocation: LlamaIndexInvocation, scope: CallScope, result: Future[Outcome]) -> None:
        """Make a call as `_call` does, as a task of the caller's loop."""
        try:
            async with self._slots:
                value = result_for_graph(await scope.alast_result(invocation))
        except CallsPublicMethod:
            _nested_events.add(type(invocation.target))
            scope.may_make = False
            self._await(invocation, scope, result)
        except BaseException as error:
            _end(result, Outcome(error=error))
        else:
            _end(result, Outcome(value))

    def _await(self, invocation: LlamaIndexInvocation, scope: CallScope, result: Future[Outcome]) -> None:
        """End `result` once the original has made the call."""
        try:
            value = result_for_graph(scope.last_result(invocation))
        except Parked as parked:
            scope.expected = parked.call
            parked.call.when_over(lambda: self._await(invocation, scope, result))
        except BaseException as error:
            _end(result, Outcome(error=error))
        else:
            _end(result, Outcome(value))


def _end(result: Future[Outcome], outcome: Outcome) -> None:
    with contextlib.suppress(Exception):  # nobody waits for it any more
        result.set_result(outcome)


def _copied_arguments(arguments: ProviderArguments) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments, shared with nobody. Raises `NotCopied`."""
    return tuple(map(_copied_argument, arguments.args)), snapshot(arguments.kwargs)


def _copied_argument(value: Any) -> Any:
    """Return a copy of an argument that later changes do not reach. Raise `NotCopied` for unknown objects."""
    if type(value) is not VectorStoreQuery:
        return snapshot(value)
    fields = dict(vars(value))
    vector = fields.pop("query_embedding")
    return VectorStoreQuery(query_embedding=list(vector) if type(vector) is list else vector, **snapshot(fields))


def result_for_graph(value: Any) -> Any:
    """Return what the graph reads of a provider's result, shared with nobody: a text, a vector, copies of nodes.

    Raises `TypeError` for a value of another kind.
    """
    if isinstance(value, ChatResponse):
        return text_of_answer(value)
    if isinstance(value, CompletionResponse):
        return value.text
    if type(value) is VectorStoreQueryResult:
        nodes = None if value.nodes is None else [node.model_copy(deep=True) for node in value.nodes]
        return VectorStoreQueryResult(nodes, _list(value.similarities), _list(value.ids))
    if type(value) is list:
        return [one.model_copy(deep=True) if isinstance(one, NodeWithScore) else one for one in value]
    if type(value) in (str, ToolCallText):
        return value
    raise TypeError(f"it returns a {type(value).__name__}")


def _list(values: Any) -> Any:
    return None if values is None else list(values)
