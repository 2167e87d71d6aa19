"""Work that runs ahead of a plain object, whatever its framework: whether it pays, and the life of its query."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, Protocol

from teola_plugin.adapters.terms import Deadline
from teola_plugin.errors import EngineUnavailable, TeolaError
from teola_plugin.graph import IMPURE_KINDS, Component, Graph, Primitive, Query
from teola_plugin.passes import Optimised
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import AnswerForm
from teola_plugin.runtime.dead_parts import Once, cause_of
from teola_plugin.runtime.primitive_requests import Calls
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.tracer.draft import TraceResult


class Endable(Protocol):
    """A live query, or a part of one."""

    def close(self) -> None: ...

    def cancel(self) -> None: ...


def pays(optimised: Optimised) -> bool:
    """Whether anything can start before its place in plain, sequential code, or is decoded in fewer steps; otherwise
    the query is only traced."""
    return optimised.source is None or runs_ahead(optimised.source, optimised.graph)


@lru_cache(maxsize=256)
def runs_ahead(source: Graph, graph: Graph) -> bool:
    """`pays`, for a p-graph and its e-graph."""
    if any(
        p.id not in source or p.attributes.grow or (p.on_engine and p.attributes.lookahead is not None) for p in graph
    ):
        return True  # stages, partial prefillings, partial decodings, growing lists, parts that may be chosen
    if any(map(draws, graph)):
        return True
    bits = {p.id: 1 << place for place, p in enumerate(p for p in source if takes_time(p))}
    before, now = source.reached(bits), graph.reached(bits)
    if any(p.on_engine and before[p.id] & ~now[p.id] for p in graph):
        return True
    return any(_holder_pays(source[p.id], p) for p in graph if p.holds_fragment)


def _holder_pays(before: Primitive, p: Primitive) -> bool:
    """Items side by side, arms side by side, or gains inside."""
    arms = [(getattr(before, name), getattr(p, name)) for name in ("fragment", "otherwise")]
    held = [(a.graph, b.graph) for a, b in arms if a is not None and b is not None]
    if p.attributes.beside and any(takes_time(q) for _, graph in held for q in graph):
        return True
    return any(runs_ahead(a, b) for a, b in held)


def freed(name: str, source: Graph, graph: Graph) -> frozenset[str]:
    """What a primitive waited for in the p-graph and does not wait for any more."""
    return source.ancestors[name] - graph.ancestors[name]


def draws(p: Primitive) -> bool:
    """Whether the graph knows of something that its answer may repeat and that no request tells: it goes along with a
    request of the graph only."""
    return any(not one.told for one in p.attributes.drafts)


def forms_matter(asking: Primitive | Component, pool: EnginePool) -> bool:
    """Return True for a generation whose request for a whole answer is none for a streamed one."""
    return bool(asking.attributes.form) and not getattr(pool.engine(asking.engine), "joins", False)


def takes_time(p: Primitive) -> bool:
    return p.on_engine or p.kind in IMPURE_KINDS or p.holds_fragment


def submitted(
    pool: EnginePool, query: Query, optimised: Optimised, calls: Calls, form: AnswerForm = AnswerForm.UNKNOWN
) -> QueryRun:
    """Start the live query: its e-graph runs from here, and the plain object ends it. `form`: see `QueryRun`."""
    return pool.runtime.submit(
        query,
        optimised.graph,
        calls,
        ahead=True,
        pgraph=optimised.source,
        passes=tuple((r.pass_name, r.fired, r.seconds) for r in optimised.reports),
        form=form,
    )


def joinable(run: Any) -> QueryRun | None:
    """`run` if parts may join it."""
    return run if isinstance(run, QueryRun) and run.joins and not run.closed else None


def shape(traced: TraceResult, input: Any) -> dict[str, int]:
    """Expected sizes for this input."""
    try:
        return traced.sizes(input)
    except Exception:  # an input that the estimate cannot read: plan without expectations
        return {}


@contextlib.contextmanager
def failing(run: Endable) -> Iterator[None]:
    """The query ends with a body that fails, or that is given up. One that is late has ended by itself."""
    try:
        yield
    except Exception:
        _plain_failed(run)
        late = Deadline.of(run)
        if late is None or not late.passed:
            run.close()
        raise
    except BaseException:  # cancelled, interrupted, or a generator that was not read to its end
        run.cancel()
        raise


def _plain_failed(run: Endable) -> None:
    whole = getattr(run, "whole", None)
    if isinstance(whole, QueryRun):
        whole.plain_failed = True


@contextlib.contextmanager
def ending(run: Endable) -> Iterator[None]:
    """The query ends with the body."""
    with failing(run):
        yield
    run.close()


def log_fallback(error: Exception, of: object = None, part: str = "") -> None:
    """Say that the original runs instead, once a cause; to be called where `error` is handled.

    `of`: the user's object that cannot be planned, each of which is told of; `part`: what of it.
    """
    what = "" if of is None else f" of the {type(of).__name__}"
    bug = f" ({type(error).__name__} is a bug of teola-plugin: please report it with this traceback)"

    def say() -> None:
        if isinstance(error, EngineUnavailable):  # of the pool as a whole: what needs it says so, too
            logging.getLogger("teola_plugin").warning("nothing of %s%s runs ahead: %s", part or "a call", what, error)
            return
        logging.getLogger("teola_plugin").warning(
            "planning failed; the original runs as it always did: %s%s. Its answers are unaffected, only later than "
            "they could be; this is said once%s",
            part or "a call",
            what,
            "" if isinstance(error, TeolaError) else bug,
            exc_info=error,
        )

    _said((part, *cause_of(error)), say, of)


_said = Once()
