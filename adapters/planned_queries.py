"""Prefetching for an original of any framework: whether a plan gains anything, and the life of its query."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Protocol

from teola_plugin.adapters.calls import Deadline
from teola_plugin.errors import EngineUnavailable, TeolaError
from teola_plugin.graph import IMPURE_KINDS, Component, Graph, Primitive, PrimitiveKind, Query
from teola_plugin.passes import Optimised
from teola_plugin.passes.decoding_pipelining import leaf_primitives
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import AnswerForm
from teola_plugin.runtime.prefetch_outcomes import OncePerCause, cause_of
from teola_plugin.runtime.primitive_requests import Calls
from teola_plugin.runtime.query_run import Claiming, QueryRun
from teola_plugin.tracer.draft import TraceResult


class Endable(Protocol):
    """A live query, or a part of one."""

    def close(self) -> None: ...

    def cancel(self) -> None: ...


def plan_saves_time(optimised: Optimised) -> bool:
    """Return True if anything can start before its place in sequential code, or is decoded in fewer steps.

    Otherwise the query is only traced.
    """
    return optimised.source is None or graph_saves_time(optimised.source, optimised.graph)


@lru_cache(maxsize=256)
def graph_saves_time(source: Graph, graph: Graph) -> bool:
    """Return `plan_saves_time` for a p-graph and its e-graph."""
    if any(
        p.id not in source or p.attributes.grow or (p.on_engine and p.attributes.lookahead is not None) for p in graph
    ):
        return True  # stages, partial prefillings, partial decodings, growing lists, parts that may be chosen
    if any(map(has_untold_drafts, graph)):
        return True
    bits = {p.id: 1 << index for index, p in enumerate(p for p in source if takes_time(p))}
    before, now = source.collect_ancestor_masks(bits), graph.collect_ancestor_masks(bits)
    if any(p.on_engine and before[p.id] & ~now[p.id] for p in graph):
        return True
    return any(_holder_pays(source[p.id], p) for p in graph if p.holds_fragment)


def _holder_pays(before: Primitive, p: Primitive) -> bool:
    """Return True if items or arms run side by side, or something inside starts early."""
    arms = [(getattr(before, name), getattr(p, name)) for name in ("fragment", "otherwise")]
    graphs = [(a.graph, b.graph) for a, b in arms if a is not None and b is not None]
    if p.attributes.is_parallel and any(takes_time(q) for _, graph in graphs for q in graph):
        return True
    return any(graph_saves_time(a, b) for a, b in graphs)


def dropped_waits(name: str, source: Graph, graph: Graph) -> frozenset[str]:
    """Return the primitives that one waits for in the p-graph and not in the e-graph."""
    return source.ancestors[name] - graph.ancestors[name]


def left_in_place(graph: Graph) -> frozenset[str]:
    """Return the primitives that are left to the original: the first calls behind user code inside a function, and
    what waits for such code where no later call shows that it has ended."""
    code = {p.id for p in graph if p.kind is PrimitiveKind.OPAQUE and not p.inputs}
    never_observed = code - graph.observed_to_end
    return frozenset(p.id for p in graph if p.attributes.ends or graph.ancestors[p.id] & never_observed)


def sites_that_start_sooner(source: Graph, graph: Graph) -> Iterator[str]:
    """Yield the sites whose calls wait for less in the e-graph than in the p-graph, or run in parallel in a list."""
    in_place = left_in_place(graph)
    for p in graph:
        if p.id not in source or p.id in in_place:
            continue
        before = source[p.id]
        is_freed = any(takes_time(source[name]) for name in dropped_waits(p.id, source, graph))
        if is_freed or (p.attributes.is_parallel and p.holds_fragment):
            yield from (one.attributes.wrapped for one in leaf_primitives(p) if one.attributes.wrapped)
        elif p.holds_fragment:
            for name in ("fragment", "otherwise"):
                inner_source, inner = getattr(before, name), getattr(p, name)
                if inner_source is not None and inner is not None:
                    yield from sites_that_start_sooner(inner_source.graph, inner.graph)


def has_untold_drafts(p: Primitive) -> bool:
    """Return True if the graph knows a text that the answer may repeat, and that is in no request of the original."""
    return any(not one.in_request for one in p.attributes.drafts)


def forms_matter(asking: Primitive | Component, pool: EnginePool) -> bool:
    """Return True for a generation whose request for a whole answer is none for a streamed one."""
    return bool(asking.attributes.form) and not getattr(pool.engine(asking.engine), "joins", False)


def takes_time(p: Primitive) -> bool:
    """Return True for a primitive that runs on an engine or runs user code, also in its fragments."""
    return p.on_engine or p.kind in IMPURE_KINDS or p.holds_fragment


def submit(
    pool: EnginePool, query: Query, optimised: Optimised, calls: Calls, form: AnswerForm = AnswerForm.UNKNOWN
) -> QueryRun:
    """Start the live query: its e-graph runs from here, and the original ends it. `form`: see `QueryRun`."""
    return pool.runtime.submit(
        query,
        optimised.graph,
        calls,
        has_original=True,
        pgraph=optimised.source,
        passes=tuple((r.pass_name, r.fired, r.seconds) for r in optimised.reports),
        form=form,
    )


def joinable(run: Any) -> QueryRun | None:
    """Return `run` if parts may join it, else None."""
    return run if isinstance(run, QueryRun) and run.claiming is not Claiming.NEVER and not run.closed else None


def expected_sizes(traced: TraceResult, input: Any) -> dict[str, int]:
    """Return the expected sizes for this input.

    They only help to plan; the result is empty, and no exception is raised, for an input that the estimate cannot read.
    The original reports what is wrong with it.
    """
    try:
        return traced.sizes(input)
    except Exception:  # an input that the estimate cannot read: plan without expectations
        return {}


@contextlib.contextmanager
def failing(run: Endable) -> Iterator[None]:
    """End the query if the body fails or is cancelled. A query whose deadline has passed has ended by itself."""
    try:
        yield
    except Exception:
        query_run = getattr(run, "query_run", None)
        if isinstance(query_run, QueryRun):
            query_run.original_failed = True
        deadline = Deadline.of(run)
        if deadline is None or not deadline.passed:
            run.close()
        raise
    except BaseException:  # cancelled, interrupted, or a generator that was not read to its end
        run.cancel()
        raise


@contextlib.contextmanager
def ending(run: Endable) -> Iterator[None]:
    """End the query with the body.

    If the body raises, the query ends as failed or cancelled, and the exception goes on; otherwise it is closed.
    """
    with failing(run):
        yield
    run.close()


def log_fallback(error: Exception, of: object = None, part: str = "") -> None:
    """Log that the original runs instead, once for each cause; to be called where `error` is handled.

    `of`: the user's object that cannot be planned; each object is logged. `part`: the part of it.
    """
    owner = "" if of is None else f" of the {type(of).__name__}"
    bug = f" ({type(error).__name__} is a bug of teola-plugin: please report it with this traceback)"

    def say() -> None:
        if isinstance(error, EngineUnavailable):  # of the pool as a whole: what needs it says so, too
            logging.getLogger("teola_plugin").warning("nothing of %s%s runs ahead: %s", part or "a call", owner, error)
            return
        logging.getLogger("teola_plugin").warning(
            "planning failed; the original runs as it always did: %s%s. Its answers are unaffected, only later than "
            "they could be; this is said once%s",
            part or "a call",
            owner,
            "" if isinstance(error, TeolaError) else bug,
            exc_info=error,
        )

    _logged_causes((part, *cause_of(error)), say, of)


_logged_causes = OncePerCause()
