"""The live query beside a LlamaIndex object: planned per entry, begun per call."""

from __future__ import annotations

import asyncio
import threading
import time
import weakref
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, aclosing, closing
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.chat_engine.types import StreamingAgentChatResponse
from llama_index.core.schema import QueryBundle, QueryType
from llama_index.core.workflow import Workflow

from teola_plugin.adapters.calls import astreamed_in, joined, streamed_in
from teola_plugin.adapters.checking.shadow import Shadow
from teola_plugin.adapters.early_work import ending, failing, joinable, log_fallback, pays, shape, submitted
from teola_plugin.adapters.llamaindex.checking import OriginalCall
from teola_plugin.adapters.llamaindex.nonblocking import nonblocking
from teola_plugin.adapters.llamaindex.prefetching import PrefetchPlan, QueryPrefetcher, entries_of, plan_prefetching
from teola_plugin.adapters.llamaindex.substitution import PARTS, Accelerate, with_parts
from teola_plugin.adapters.own_class import FieldSnapshot
from teola_plugin.adapters.own_pool import watching_pool
from teola_plugin.adapters.serving.serving import Serving
from teola_plugin.adapters.terms import Asked, Deadline, context_of, interrupting, named, outer_terms, unplanned
from teola_plugin.adapters.thread_safety import ThreadSafety
from teola_plugin.graph import Query, Terms
from teola_plugin.passes import Optimised, Pass
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import AnswerForm
from teola_plugin.runtime.context import current_run
from teola_plugin.runtime.query_run import PartRun, QueryRun
from teola_plugin.shims.llamaindex.copies import attributes
from teola_plugin.shims.llamaindex.engines import history_writer
from teola_plugin.shims.stack_levels import hide_from_stack_levels
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.llamaindex.trace import CHUNKS, NODES, QUERY_TEXT, TEXTS, TracedEntry, trace

if TYPE_CHECKING:
    from teola_plugin.adapters.explain import Explanation

Given = dict[str, Any]
NOBODY_TOLD = ThreadSafety()


@dataclass(frozen=True, slots=True)
class Settings:
    """What the queries of an accelerated object run under."""

    passes: tuple[Pass, ...] | None = None
    """Instead of the pool's."""
    speculate: str = "auto"
    app: str = "default"
    tenant: str = ""
    """Whose prefixes they may share: a cache salt."""
    deadline_s: float | None = None
    """Seconds after which a query fails with `QueryTimeout`."""
    weight: float = 1.0
    """Their share among the queries of the pool; 1.0 is ordinary."""
    threads: ThreadSafety = NOBODY_TOLD
    """Which of the user's own objects take several sync calls at once."""

    @property
    def asked(self) -> Asked:
        """What is asked for; what is as it is by default is left to the query around."""
        return Asked(self.tenant or None, self.deadline_s, None if self.weight == 1.0 else self.weight)

    def of_query(self, given: Given | None, runs: Sequence[Any], now: float) -> Query:
        """A query that begins now, inside of these."""
        terms = named(self.asked.terms(outer_terms(runs), now), self.app)
        return Query({"input": given}, app=terms.app, tenant=terms.tenant, deadline=terms.deadline, weight=terms.weight)


class Joined:
    """A part without a graph of its own: its calls belong to the query that is live already."""

    def __init__(self, whole: QueryRun) -> None:
        self.whole = whole
        self.trace = whole.trace

    def close(self) -> None: ...

    cancel = close


Run = QueryRun | PartRun | Joined


class StartedCall(NamedTuple):
    """A call: the live query, and what runs beside it; or the original, on the terms that were asked for."""

    run: Run | None
    node: Any
    terms: Terms | None
    """Of what the original calls where there is no query; None for those around it."""
    deadline: Deadline | None
    prefetcher: QueryPrefetcher | None = None
    """What prefetches calls of the user's own models: without a pool, or where its graph begins nothing."""

    @property
    def whole(self) -> QueryRun | None:
        return None if self.run is None else self.run.whole

    def check(self) -> None:
        """Raises `QueryTimeout` for an answer that comes late."""
        if self.deadline is not None:
            self.deadline.check()

    def close(self) -> None:
        if self.run is not None:
            self.run.close()
        if self.prefetcher is not None:
            self.prefetcher.close()

    def failing(self) -> AbstractContextManager[None]:
        return self._both(QueryPrefetcher.in_force, failing)

    def ending(self) -> AbstractContextManager[Any]:
        return self._both(closing, ending)

    def _both(self, own: Callable[[QueryPrefetcher], Any], live: Callable[[Run], Any]) -> AbstractContextManager[Any]:
        stack = ExitStack()
        if self.run is not None:
            stack.enter_context(live(self.run))
        if self.prefetcher is not None:
            stack.enter_context(own(self.prefetcher))
        return stack


class ServedObject:
    """The original of an accelerated object, and what runs in its place."""

    def __init__(self, original: Any, served: Any, pool: EnginePool | None) -> None:
        self.original = original
        self.served = served
        """The original, or a copy in which some of its parts are served by engines of the pool."""
        self.pool = pool
        self.accelerate_copy: Callable[..., Any] = as_it_is
        """`accelerate` on the same terms, for a copy of the original."""
        self._renew: Callable[[Any], Any] = as_it_is
        self._snapshot: FieldSnapshot | None = None
        """What the served copy was made of; None if it is the original itself."""

    def renewed_by(self, renew: Callable[[Any], Any], snapshot: FieldSnapshot) -> None:
        """Make the served copy with `renew` again once a field in `snapshot` is another."""
        self._renew, self._snapshot = renew, snapshot

    def is_current(self) -> bool:
        """Return True unless something of the original was set that the served copy was made of."""
        return self._snapshot is None or self._snapshot.holds()

    def renewed(self) -> Any:
        """Return what makes the calls of the original as it is now."""
        return self._renew(self)


def as_it_is(obj: Any) -> Any:
    """Return the object: a part of an accelerated object is accelerated by itself, and its copies are not."""
    return obj


class Session(ServedObject):
    """The calls of an accelerated object, with their engines, plans and traces."""

    def __init__(self, original: Any, served: Any, pool: EnginePool | None, terms: Settings, part: Accelerate) -> None:
        super().__init__(original, served, pool)
        self.terms = terms
        self._part = part
        self.serving: Serving | None = None
        """What `serve=` has done."""
        self.shadow: Shadow | None = None
        """Compares a share of the calls with the original's."""
        self._traced: dict[tuple[str, int], TracedEntry] = {}
        self._prefetch_plans: dict[tuple[str, int], tuple[TracedEntry, PrefetchPlan | None]] = {}
        self._last: list[Run] = []

    def under(self, terms: Settings) -> Session:
        """Return what makes the calls of the same object on other terms."""
        session = self._same_object(terms)
        session._traced, session.serving, session.shadow = self._traced, self.serving, self.shadow
        session._prefetch_plans = self._prefetch_plans
        session._renew, session._snapshot = self._renew, self._snapshot
        session.accelerate_copy = partial(self.accelerate_copy, terms=terms)
        return session

    def _same_object(self, terms: Settings) -> Session:
        return Session(self.original, self.served, self.pool, terms, self._part)

    def continues(self, other: Session) -> None:
        """Keep the last trace and the figures of `shadow=` of a session that this one replaces."""
        self._last, self.shadow, self.accelerate_copy = other._last, other.shadow, other.accelerate_copy

    # ------------------------------------------------------------ seeing it

    def entry(self, entry: str, texts: int = 0) -> TracedEntry:
        """What the graph knows of an entry; traced anew when the object has changed."""
        known = self._traced.get((entry, texts))
        if known is None or not known.holds:
            known = self._traced[entry, texts] = trace(self.served, entry, texts)
        return known

    def plan(self, entry: str, input: Any = None, texts: int = 0) -> Optimised | None:
        if self.pool is None:
            return None
        return self._planned(self.pool, self.entry(entry, texts).traced, input)

    def _planned(self, pool: EnginePool, traced: TraceResult, input: Any) -> Optimised:
        terms = self.terms
        return pool.plan(traced.template, shape(traced, input), passes=terms.passes, speculate=terms.speculate)

    def explained(self, entry: str, input: Any = None) -> Explanation:
        """What `explain()` says of an entry."""
        from teola_plugin.adapters.expectations import ended_trace, left_for_form
        from teola_plugin.adapters.explain import explain

        trace, more = ended_trace(self._last), self._prefetching_in_words(entry)
        traced, left = self.entry(entry).traced, left_for_form(self._last)
        return explain(traced, self.plan(entry, input), self.pool, trace=trace, more=more, left=left)

    def _prefetching_in_words(self, entry: str) -> tuple[str, ...]:
        """Return a phrase for calls of the user's own models that are prefetched without a pool."""
        if self.pool is not None or self.prefetch_plan(entry) is None:
            return ()
        return (f"calls that {type(self.original).__name__} makes one after the other, side by side",)

    def prefetch_plan(self, entry: str, texts: int = 0) -> PrefetchPlan | None:
        """Return what is prefetched in a sync entry of the user's own models; None for nothing.

        Planned anew when the object has changed.
        """
        if self.terms.speculate == "off" or isinstance(self.served, Workflow):
            return None
        known = self._prefetch_plans.get((entry, texts))
        if known is None or not known[0].holds:
            known = self._prefetch_plans[entry, texts] = plan_prefetching(self.served, entry, texts, self.terms.threads)
        return known[1]

    @property
    def last(self) -> Run | None:
        return self._last[0] if self._last else None

    # ------------------------------------------------------------ one call

    def enter(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the method `name` of what runs; a share of the calls is compared, if `shadow=` says so."""
        entry, read, is_async = _ENTRIES[name]
        call = self.acall if is_async else self.call

        def run() -> Any:
            return call(entry, _read(read, args, kwargs), lambda node: getattr(node, name)(*args, **kwargs))

        if self.shadow is None or not self.shadow.chosen():
            return run()
        original = OriginalCall(self.original, name, args, kwargs)
        return self.shadow.acall(run, original) if is_async else self.shadow.call(run, original)

    def call(self, entry: str, given: Given | None, plain: Callable[[Any], Any]) -> Any:
        """`plain` of the object that runs, beside its live query."""
        call = self._begin(entry, given, is_async=False)
        with call.failing(), joined(call.whole, call.terms):
            made = plain(call.node)
            call.check()
        return _kept_open(call, made)

    async def acall(self, entry: str, given: Given | None, plain: Callable[[Any], Awaitable[Any]]) -> Any:
        """`call` in a loop."""
        call = self._begin(entry, given, is_async=True)
        with call.failing(), joined(call.whole, call.terms):
            async with interrupting(call.deadline):
                made = await plain(call.node if call.run is None else nonblocking(call.node))
        return _kept_open(call, made)

    def _begin(self, entry: str, given: Given | None, *, is_async: bool = True) -> StartedCall:
        """The live query, and what runs beside it; without one the original just runs."""
        current = current_run.get()
        runs = [] if current is None else [current]
        if self.pool is not None:
            try:
                node = self._running(entry, given)
                run = self._submit(self.pool, entry, given, runs)
            except Exception as error:  # nothing of the original has run yet
                log_fallback(error, self.original, f"a call of `{entry}`")
            else:
                self._last[:] = [run]
                prefetcher = None if is_async else self._carried(run, entry, given)
                return StartedCall(run, node, None, Deadline.of(run), prefetcher)
        clock = time.monotonic if self.pool is None else self.pool.runtime.time
        terms, deadline = unplanned(self.terms.asked, runs, self.terms.app, clock)
        off = is_async or self.terms.speculate == "off" or isinstance(self.served, Workflow)
        if self.pool is not None or off:
            return StartedCall(None, self.served, terms, deadline)
        return self._begin_alone(entry, given, StartedCall(None, self.served, terms, deadline), runs)

    def _carried(self, run: Run, entry: str, given: Given | None) -> QueryPrefetcher | None:
        """Prefetch calls of models that engines only carry: the graph begins nothing there."""
        claims = not isinstance(run, QueryRun) or run.claims
        if claims or given is None:
            return None
        try:
            plan = self.prefetch_plan(entry, len(given.get(TEXTS, ())))
            if plan is None or not plan.intercept():
                return None
            with joined(run.whole):
                return QueryPrefetcher(plan, given, None)
        except Exception as error:  # nothing of the original has run yet
            log_fallback(error, self.original, f"a call of `{entry}`")
            return None

    def _begin_alone(self, entry: str, given: Given | None, plain: StartedCall, runs: Sequence[Any]) -> StartedCall:
        """Begin a sync call without a pool, which prefetches calls of the user's own models, or whose parts do.

        `plain`: the call without either. Where there is one, it is traced.
        """
        run: Run | None = None
        try:
            plan = None if given is None else self.prefetch_plan(entry, len(given.get(TEXTS, ())))
            plan = plan if plan is not None and plan.intercept() else None
            node = self.served
            if plan is not None or _has_gaining_parts(node, self.terms.threads):
                node = with_parts(node, frozenset() if plan is None else plan.entry.lowered, self._part)
            if plan is None and node is self.served:
                return plain
            run = self._watched(runs)
            prefetcher = None if plan is None else QueryPrefetcher(plan, given, run.whole)
        except Exception as error:  # nothing of the original has run yet
            log_fallback(error, self.original, f"a call of `{entry}`")
            if run is not None:
                run.close()
            return plain
        self._last[:] = [run]
        return plain._replace(run=run, node=node, prefetcher=prefetcher)

    def _watched(self, runs: Sequence[Any]) -> Run:
        """What a call without a pool is traced as: a query, or what belongs to the one around it."""
        pool = watching_pool()
        whole = joinable(context_of(self.terms.asked, runs, pool).run)
        if whole is not None:
            return Joined(whole)
        return pool.runtime.watch(self.terms.of_query(None, runs, pool.runtime.time()), joins=True)

    def _submit(self, pool: EnginePool, entry: str, given: Given | None, runs: Sequence[Any]) -> Run:
        whole = joinable(context_of(self.terms.asked, runs, pool).run)
        query = self.terms.of_query(given, runs, pool.runtime.time())
        if given is None:  # it cannot be planned; its parts can
            return Joined(whole) if whole is not None else pool.runtime.watch(query, joins=True)
        texts = len(given.get(TEXTS, ()))
        traced = self.entry(entry, texts).traced
        optimised = self._planned(pool, traced, given)
        if whole is not None:
            part = whole.part(optimised.graph, traced.calls, given, form=AnswerForm.WHOLE) if pays(optimised) else None
            return part or Joined(whole)
        if not pays(optimised):
            return pool.runtime.watch(query, joins=True)
        return submitted(pool, query, optimised, traced.calls, AnswerForm.WHOLE)

    def _running(self, entry: str, given: Given | None) -> Any:
        """What runs: engines and retrievers in it that the graph does not know are accelerated by themselves."""
        known = self.entry(entry, len(given.get(TEXTS, ()))).lowered if given is not None else frozenset[int]()
        return with_parts(self.served, known, self._part)


def _has_gaining_parts(node: Any, threads: ThreadSafety) -> bool:
    """Whether accelerating what it holds is of any use."""
    held = [
        one for value in attributes(node).values() for one in (value if isinstance(value, (list, tuple)) else [value])
    ]
    parts = [one for one in held if isinstance(one, PARTS)]
    return any(plan_prefetching(one, entry, 0, threads)[1] is not None for one in parts for entry in entries_of(one))


def _read(read: Callable[..., Given | None], args: tuple[Any, ...], kwargs: Given) -> Given | None:
    """Return the input for the graph; None for arguments that the graph, or the method, does not know."""
    try:
        return read(*args, **kwargs)
    except Exception:  # the method itself says what is wrong
        return None


def query_input(query: QueryType) -> Given | None:
    """The query's input for the graph; None for a query that brings its own vector."""
    if isinstance(query, str):
        return {QUERY_TEXT: query} if query else None
    if not isinstance(query, QueryBundle) or query.embedding is not None or query.image_path is not None:
        return None
    texts = list(query.embedding_strs)
    if texts == [query.query_str]:
        return {QUERY_TEXT: query.query_str}
    return {QUERY_TEXT: query.query_str, TEXTS: texts} if texts else None


def chunks_input(query: str, chunks: Any, kwargs: Given) -> Given | None:
    """Of a synthesizer's `get_response`; None where more is given than the graph knows of."""
    return None if kwargs or not chunks else {QUERY_TEXT: query, CHUNKS: list(chunks)}


def nodes_input(query: QueryType, nodes: Any) -> Given:
    return {QUERY_TEXT: query if isinstance(query, str) else query.query_str, NODES: list(nodes)}


def _query_arguments(*args: Any, **kwargs: Any) -> Given | None:
    (query,) = (*args, *kwargs.values())
    return query_input(query)


def _synthesize_arguments(*args: Any, **kwargs: Any) -> Given | None:
    if "query_bundle" in kwargs:  # its name in query engines
        kwargs["query"] = kwargs.pop("query_bundle")

    def arguments(query: QueryType, nodes: Any, additional_source_nodes: Any = None) -> Given:
        return nodes_input(query, nodes)

    return arguments(*args, **kwargs)


def _response_arguments(query_str: str, text_chunks: Any, **kwargs: Any) -> Given | None:
    return chunks_input(query_str, text_chunks, kwargs)


def _no_arguments(*args: Any, **kwargs: Any) -> Given | None:
    return None


_SYNC_ENTRIES: Mapping[str, tuple[str, Callable[..., Given | None]]] = {
    "query": ("query", _query_arguments),
    "retrieve": ("retrieve", _query_arguments),
    "synthesize": ("synthesize", _synthesize_arguments),
    "get_response": ("respond", _response_arguments),
    "chat": ("chat", _no_arguments),
    "stream_chat": ("chat", _no_arguments),
}
_ENTRIES = {
    **{name: (*entry, False) for name, entry in _SYNC_ENTRIES.items()},
    **{f"a{name}": (*entry, True) for name, entry in _SYNC_ENTRIES.items()},
}
"""For each method that begins a query: the traced entry, how its arguments are read, and if it is async."""


# ------------------------------------------------------------ answers that are read later


def _kept_open(call: StartedCall, made: Any) -> Any:
    """The query ends with its answer, or with the last piece of a streamed one."""
    if isinstance(made, StreamingAgentChatResponse):
        _ending_with(call, made)
        return made
    if isinstance(made, StreamingResponse) and isinstance(made.response_gen, Generator):
        made.response_gen = _streamed(call, made.response_gen)
    elif isinstance(made, AsyncStreamingResponse) and isinstance(made.response_gen, AsyncGenerator):
        made.response_gen = _astreamed(call, made.response_gen)
    elif isinstance(made, Generator):
        made = _streamed(call, made)
    elif isinstance(made, AsyncGenerator):
        made = _astreamed(call, made)
    else:
        call.close()
        return made
    pieces = getattr(made, "response_gen", made)
    weakref.finalize(pieces, call.close).atexit = False  # it may never be read
    return made


def _ending_with(call: StartedCall, made: StreamingAgentChatResponse) -> None:
    """End the query when the answer is in the history: a thread or a task that has begun reads it to its end.

    Before llama-index-core 0.14.17 the caller does so with some engines, by reading the answer.
    """
    writer = history_writer(made)
    weakref.finalize(made, call.close).atexit = False  # a loop may be gone before its tasks
    if isinstance(writer, asyncio.Task):
        writer.add_done_callback(lambda _: call.close())
    elif writer is not None:
        threading.Thread(target=_close_after, args=(call, writer), name="teola-chat-end", daemon=True).start()
    elif not made.is_writing_to_memory and isinstance(made.chat_stream, Generator):
        made.chat_stream = _streamed(call, made.chat_stream)
    elif not made.is_writing_to_memory and isinstance(made.achat_stream, AsyncGenerator):
        made.achat_stream = _astreamed(call, made.achat_stream)
    else:
        call.close()


def _close_after(call: StartedCall, thread: threading.Thread) -> None:
    thread.join()
    call.close()


def _streamed(call: StartedCall, pieces: Generator[Any, None, None]) -> Generator[Any, None, None]:
    with call.ending():
        for piece in streamed_in(call.whole, call.terms, pieces):
            call.check()
            yield piece
        call.check()


async def _astreamed(call: StartedCall, pieces: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
    with call.ending():
        async with aclosing(astreamed_in(call.whole, call.terms, pieces)) as found:
            while True:
                async with interrupting(call.deadline):
                    piece = await anext(found, _END)
                if piece is _END:
                    return
                yield piece


_END: Any = object()


hide_from_stack_levels(globals())
