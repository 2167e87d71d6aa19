"""Routes graphs of LangGraph: what a test compiles or constructs is an accelerated graph, and stays in its hands.

`StateGraph.compile` and `Pregel(...)`, with which `@entrypoint` makes its graphs, give `accelerate(graph)`. So
subgraphs are accelerated, too, and not only calls are tested: state, updates, copies, drawings.
"""

from __future__ import annotations

import functools
import importlib
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Callable
from typing import Any

MODES = {
    "default": "accelerate(graph)",
    "pool": 'accelerate(graph, pool=pool, speculate="all"), every call is a query, and every plan runs',
    "models": "the same, with an engine of the pool behind every chat model: see upstream_models",
}


class Routing:
    """Puts the stand-ins in place. `calls`: per test, what it made, called and ran."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.test = ""
        self.calls: dict[str, Counter[str]] = defaultdict(Counter)
        self._options: dict[str, Any] = {}
        self._pool: Any = None

    def start(self) -> None:
        from langgraph.graph import StateGraph

        if self.mode != "default":
            self._pool = fake_pool()
            self._options = {"pool": self._pool, "speculate": "all"}
            _adapter("plans").graph_saves_time = lambda source, graph: True
        if self.mode == "models":
            importlib.import_module("upstream_models").Backed(self._pool, self._note).start()
        compiled = StateGraph.compile

        @functools.wraps(compiled)
        def compile(builder: Any, *args: Any, **kwargs: Any) -> Any:
            return self._accelerated(compiled(builder, *args, **kwargs))

        StateGraph.compile = compile  # type: ignore[method-assign, assignment]
        _construct(self._accelerated)
        self._count()
        fail_on_fallback()

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _accelerated(self, graph: Any) -> Any:
        from teola_plugin import accelerate

        self._note("graph")
        return accelerate(graph, **self._options)

    def _note(self, kind: str) -> None:
        self.calls[self.test][kind] += 1

    def _count(self) -> None:
        """Calls of accelerated graphs, nodes that tell when they run, and what became of the queries."""
        graph = _adapter("graph").AcceleratedGraph
        node = _adapter("graph").WatchedNode
        run = importlib.import_module("teola_plugin.runtime.query_run").QueryRun
        counted = [(graph, "stream", "call"), (graph, "astream", "call"), (run, "begin_subplan", "part")]
        counted += [(node, "invoke", "node"), (node, "ainvoke", "node")]
        for owner, name, kind in counted:
            setattr(owner, name, self._counted(getattr(owner, name), kind))
        if self._pool is not None:
            self._pool.runtime.watch = self._watched(self._pool.runtime.watch)

    def _counted(self, original: Callable[..., Any], kind: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._note(kind)
            return original(*args, **kwargs)

        return counted

    def _watched(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def watch(*args: Any, **kwargs: Any) -> Any:
            calls = self.calls[self.test]
            calls["query"] += 1
            run = original(*args, **kwargs)
            run.trace.add_done_callback(lambda future: _tell(future, calls))
            return run

        return watch


def _tell(future: Any, calls: Counter[str]) -> None:
    """What became of the engine work that parts of a query began ahead."""
    trace = None if future.cancelled() else future.result()
    for span in () if trace is None else trace.spans:
        if span.engine and span.primitive.startswith("part"):
            calls["used" if span.outcome == "done" else "unused"] += 1


def _adapter(name: str) -> Any:
    return importlib.import_module(f"teola_plugin.adapters.langgraph.{name}")


def fake_pool() -> Any:
    """Return a started pool of fake engines."""
    from teola_plugin.engines.fake import FakeEmbedder, FakeLLM
    from teola_plugin.pool import EnginePool

    return EnginePool.local(llm=FakeLLM(), embedder=FakeEmbedder()).start()


def _construct(accelerated: Callable[[Any], Any]) -> None:
    """From now on `Pregel(...)` gives an accelerated graph. What `__new__` gives is initialised already."""
    from langgraph.pregel import Pregel

    init, copied = Pregel.__init__, Pregel.copy
    state = threading.local()

    @functools.wraps(init)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(state, "made", None) is self:
            state.made = None
        else:
            init(self, *args, **kwargs)

    def __new__(cls: type[Any], *args: Any, **kwargs: Any) -> Any:
        plain = object.__new__(cls)
        if cls is not Pregel or not kwargs or getattr(state, "copying", False):
            return plain  # a subclass; or who copies and unpickles; or who copies what is accelerated
        init(plain, *args, **kwargs)
        state.made = accelerated(plain)
        return state.made

    @functools.wraps(copied)
    def copy(self: Any, *args: Any, **kwargs: Any) -> Any:
        """The accelerator copies the plain graph first."""
        state.copying = True
        try:
            return copied(self, *args, **kwargs)
        finally:
            state.copying = False

    for name, stand_in in {"__init__": __init__, "__new__": __new__, "copy": copy}.items():
        setattr(Pregel, name, stand_in)


def fail_on_fallback() -> None:
    """Raise a failure inside the accelerator, instead of answering with the original."""

    def fail(error: Exception, *details: Any) -> None:
        raise error

    planned_queries: Any = importlib.import_module("teola_plugin.adapters.planned_queries")
    planned_queries.log_fallback = fail
    for name, module in list(sys.modules.items()):
        if name.startswith("teola_plugin.adapters") and hasattr(module, "log_fallback"):
            module.log_fallback = fail  # type: ignore[attr-defined]
