"""Routes composites of langchain-core: whatever a test calls on one runs through the accelerator.

Each entry (`invoke`, `astream`, ...) of each composite class gets a stand-in that calls the same entry of
`accelerate(self)`. A context variable marks what runs inside, so only the outermost call is routed. The classes stay
the same objects and no subclass is overridden, so the tracer understands them as it always does.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import importlib
import inspect
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from typing import Any

from langchain_core import runnables
from langchain_core.runnables.base import RunnableEach
from langchain_core.runnables.configurable import RunnableConfigurableAlternatives, RunnableConfigurableFields
from langchain_core.runnables.retry import RunnableRetry
from upstream_graphs import fail_on_fallback

COMPOSITES: tuple[type, ...] = (
    runnables.RunnableSequence,
    runnables.RunnableParallel,
    runnables.RunnableAssign,
    runnables.RunnablePick,
    runnables.RunnablePassthrough,
    runnables.RunnableBinding,
    RunnableEach,
    runnables.RunnableLambda,
    runnables.RunnableGenerator,
    runnables.RunnableBranch,
    runnables.RouterRunnable,
    RunnableRetry,
    runnables.RunnableWithFallbacks,
    RunnableConfigurableFields,
    RunnableConfigurableAlternatives,
    runnables.RunnableWithMessageHistory,
)
ENTRIES = (
    *("invoke", "ainvoke", "batch", "abatch", "batch_as_completed", "abatch_as_completed"),
    *("stream", "astream", "transform", "atransform", "astream_events", "astream_log"),
)
ITERATED = ENTRIES[6:]
MODES = {
    "default": "accelerate(chain)",
    "all": 'accelerate(chain, speculate="all")',
    "copies": "accelerate(chain), every leaf is called ahead, useful or not, the framework's fakes too",
    "pool": 'accelerate(chain, pool=pool, speculate="all"), every plan runs, useful or not',
}
OUTCOMES = ("copy", "ahead", "watched", "original")
"""Of a routed call, the strongest first: a routed copy ran beside its graph; the original did; the original ran as a
query without a graph, there being nothing to run ahead; the original just ran."""

_inside: ContextVar[collections.Counter[str] | None] = ContextVar("teola_upstream_inside", default=None)
"""What has begun in the routed call that the running code is a part of."""
_END = object()


class Routing:
    """Puts the stand-ins in place. `calls`: per test, how many routed calls ended as what."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.test = ""
        self.calls: dict[str, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        self._options: dict[str, Any] = {"speculate": "all"} if mode != "default" else {}
        self._pool: Any = None

    def start(self) -> None:
        if self.mode == "pool":
            self._options["pool"] = self._pool = _every_plan_runs()
        if self.mode != "default":
            _every_leaf_ahead()
        _count_and_fail()
        stand_ins = [(cls, name, self._stand_in(getattr(cls, name), name)) for cls in COMPOSITES for name in ENTRIES]
        for cls, name, stand_in in stand_ins:
            setattr(cls, name, stand_in)

    def stop(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _accelerated(self, chain: Any, name: str) -> Any:
        from teola_plugin import accelerate

        return getattr(accelerate(chain, **self._options), name)

    def _ended(self, begun: collections.Counter[str]) -> None:
        self.calls[self.test][next((kind for kind in OUTCOMES if begun[kind]), "original")] += 1

    def _stand_in(self, original: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Of the same nature as the original (function, coroutine function, generator function), for who asks."""

        def passes(chain: Any) -> bool:
            """A part of a routed call; or a subclass of the test's own, which calls what it overrides."""
            return _inside.get() is not None or getattr(type(chain), name) is not made or name in vars(chain)

        if inspect.isasyncgenfunction(original):

            async def made(chain: Any, *args: Any, **kwargs: Any) -> Any:
                whole = passes(chain)
                items = original(chain, *args, **kwargs) if whole else self._opened(chain, name, args, kwargs)
                async with contextlib.aclosing(items):
                    async for item in items:
                        yield item

        elif inspect.isgeneratorfunction(original):

            def made(chain: Any, *args: Any, **kwargs: Any) -> Any:
                whole = passes(chain)
                yield from original(chain, *args, **kwargs) if whole else self._opened(chain, name, args, kwargs)

        elif inspect.iscoroutinefunction(original):

            async def made(chain: Any, *args: Any, **kwargs: Any) -> Any:  # type: ignore[misc]
                if passes(chain):
                    return await original(chain, *args, **kwargs)
                with self._marked() as begun:
                    try:
                        return await self._accelerated(chain, name)(*args, **kwargs)
                    finally:
                        self._ended(begun)

        elif name in ITERATED:  # a plain function that returns an iterator

            def made(chain: Any, *args: Any, **kwargs: Any) -> Any:
                if passes(chain) or kwargs.get("version") == "v3":
                    return original(chain, *args, **kwargs)
                return self._opened(chain, name, args, kwargs)

        else:

            def made(chain: Any, *args: Any, **kwargs: Any) -> Any:
                if passes(chain):
                    return original(chain, *args, **kwargs)
                with self._marked() as begun:
                    try:
                        return self._accelerated(chain, name)(*args, **kwargs)
                    finally:
                        self._ended(begun)

        return functools.wraps(original)(made)

    @contextlib.contextmanager
    def _marked(self, begun: collections.Counter[str] | None = None) -> Iterator[collections.Counter[str]]:
        begun = collections.Counter() if begun is None else begun
        token = _inside.set(begun)
        try:
            yield begun
        finally:
            _inside.reset(token)

    def _opened(self, chain: Any, name: str, args: Any, kwargs: Any) -> Any:
        """The accelerated object's iterator. The mark is set while it makes an item, never while its reader works."""
        with self._marked() as begun:
            items = self._accelerated(chain, name)(*args, **kwargs)
        return self._aiter(items, begun) if hasattr(items, "__anext__") else self._iter(items, begun)

    def _iter(self, items: Any, begun: collections.Counter[str]) -> Iterator[Any]:
        try:
            while True:
                with self._marked(begun):
                    item = next(items, _END)
                if item is _END:
                    return
                yield item
        finally:
            with self._marked(begun):
                items.close()
            self._ended(begun)

    async def _aiter(self, items: Any, begun: collections.Counter[str]) -> AsyncIterator[Any]:
        try:
            while True:
                with self._marked(begun):
                    item = await anext(items, _END)
                if item is _END:
                    return
                yield item
        finally:
            with self._marked(begun):
                await items.aclose()
            self._ended(begun)


def _module(name: str) -> Any:
    return importlib.import_module(f"teola_plugin.adapters.langchain.{name}")


def _every_plan_runs() -> Any:
    """A pool, for whose queries nothing is too small to run ahead."""
    from teola_plugin.engines.fake import FakeEmbedder
    from teola_plugin.pool import EnginePool

    _module("runnable").graph_saves_time = lambda source, graph: True
    return EnginePool.local(embedder=FakeEmbedder()).start()


def _every_leaf_ahead() -> None:
    """Models and retrievers are called as soon as their input is known, even if the plain object is there as soon."""
    _module("call_sites")._STATEFUL = ()
    plan = _module("prefetch_plan")
    plan.sites_that_gain = lambda optimised, take_equal_time, *rest: frozenset(
        q.attributes.wrapped
        for p in optimised.graph
        for q in plan.leaf_primitives(p)
        if q.engine == plan.PROVIDER and q.attributes.wrapped
    )


def _count_and_fail() -> None:
    """What begins is counted; a failure inside the accelerator is not hidden behind the original's answer."""

    module = _module("runnable")
    start = module.AcceleratedRunnable._start

    @functools.wraps(start)
    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        started = start(self, *args, **kwargs)
        counter = _inside.get()
        if started is not None and counter is not None:
            graph = getattr(started.run, "graph", None)
            counter["copy" if started.table is not None else "ahead" if graph else "watched"] += 1
        return started

    module.AcceleratedRunnable._start = counted
    fail_on_fallback()
