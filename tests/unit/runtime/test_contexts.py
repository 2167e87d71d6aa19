"""Tests that the context of a caller is released with its call.

Timers of the pool, which live longer, do not hold it.
"""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Callable, Iterator
from contextvars import ContextVar, copy_context

import pytest

from teola_plugin import EnginePool
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.graph import PrimitiveKind, Query, RequestContext
from teola_plugin.requests.payloads import Generate, Message, Prompt

VALUE: ContextVar[object] = ContextVar("value")


class GraphState:
    """Stands for a graph's state, which LangGraph has in the context of a node."""


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    with EnginePool.local(engines=[FakeLLM()]) as made:
        yield made


def call_pool(pool: EnginePool) -> None:
    """Make a call outside any query with a deadline: it sends work to an engine and sets a timer of its own."""
    request_context = RequestContext(deadline=pool.runtime.time() + 600)
    request = Generate(Prompt((Message("user", "Q"),)))
    pool.call(PrimitiveKind.PREFILLING, "llm", [request], request_context=request_context).result(5)


def watch_query(pool: EnginePool) -> None:
    """Start a query with a deadline: it sets the pool's timer for the earliest deadline."""
    run = pool.runtime.watch(Query({"input": None}, deadline=pool.runtime.time() + 600), joins=True)
    run.close()
    run.trace.result(5)


@pytest.mark.parametrize("use", [call_pool, watch_query])
def test_pool_keeps_no_reference_to_caller_contexts(pool: EnginePool, use: Callable[[EnginePool], None]) -> None:
    def called() -> weakref.ref[GraphState]:
        held, context = GraphState(), copy_context()
        context.run(VALUE.set, held)
        context.run(use, pool)
        return weakref.ref(held)

    left = called()
    ends = time.monotonic() + 5
    while left() is not None and time.monotonic() < ends:
        time.sleep(0.01)
        gc.collect()
    assert left() is None
