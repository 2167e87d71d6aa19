"""`accelerate` for LangChain Runnables."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from langchain_core.runnables import Runnable, RunnableGenerator

from teola_plugin.adapters.ahead import log_fallback
from teola_plugin.adapters.langchain.binding.bind import Bindings, bound
from teola_plugin.adapters.langchain.checking.shadow import Shadow, check_repeatable
from teola_plugin.adapters.langchain.generator import AcceleratedGenerator
from teola_plugin.adapters.langchain.live.parts import Accelerate, with_parts
from teola_plugin.adapters.langchain.own_models.routed import routed
from teola_plugin.adapters.langchain.runnable import AcceleratedRunnable
from teola_plugin.errors import RegistrationError, TraceError, unknown_name
from teola_plugin.graph import INPUT, Ref, WorkflowTemplate
from teola_plugin.passes import Pass, resolve_passes
from teola_plugin.passes.base import SPECULATE
from teola_plugin.pool import EnginePool
from teola_plugin.tracer.draft import Traced
from teola_plugin.tracer.lcel import trace
from teola_plugin.tracer.report import TraceNode, TraceReport


def accelerate_runnable(
    runnable: Any,
    *,
    pool: EnginePool | None,
    bind: Bindings | None,
    passes: Iterable[Pass | str] | None,
    speculate: str,
    app: str | None,
    shadow: float = 0.0,
) -> AcceleratedRunnable:
    """See `teola_plugin.accelerate`."""
    if not isinstance(runnable, Runnable):
        raise TraceError(
            f"a {type(runnable).__qualname__} is a LangChain object but no Runnable.",
            hint="pass the chain or retriever that uses it",
        )
    if speculate not in SPECULATE:
        raise unknown_name("value of speculate", speculate, list(SPECULATE))
    chosen = None if passes is None else resolve_passes(passes)
    pool = pool or the_pool_of(runnable)

    def part(node: Runnable[Any, Any]) -> Runnable[Any, Any]:
        fast = _planned(node, node, pool, part, chosen, speculate, app)
        return fast if fast.gains else fast.chain

    fast = _planned(runnable, bound(runnable, bind, pool), pool, part, chosen, speculate, app)
    if shadow:
        check_repeatable(runnable, fast._traced.template)
        fast._shadow = Shadow(shadow)
    return fast


def _planned(
    runnable: Runnable[Any, Any],
    served: Runnable[Any, Any],
    pool: EnginePool | None,
    part: Accelerate,
    passes: tuple[Pass, ...] | None,
    speculate: str,
    app: str | None,
) -> AcceleratedRunnable:
    """`served`: the runnable, with what is bound to engines in its place."""
    try:
        chain = with_parts(served, part)
        traced, sooner = trace(chain), routed(chain, pool, passes=passes, speculate=speculate)
    except (RegistrationError, TraceError):  # the user's to know
        raise
    except Exception as error:
        log_fallback(error)
        chain, traced, sooner, pool = served, untraced(served, f"teola-plugin failed: {error!r}"), None, None
    kind = AcceleratedGenerator if isinstance(runnable, RunnableGenerator) else AcceleratedRunnable
    return kind.of(runnable, traced, pool, passes=passes, speculate=speculate, app=app, chain=chain, routed=sooner)


def untraced(runnable: Runnable[Any, Any], reason: str) -> Traced:
    """What is known of an object that could not be traced: it runs as it always did."""
    report = TraceReport((TraceNode("chain", type(runnable).__name__, "original", (), reason),))
    return Traced(WorkflowTemplate((), Ref(INPUT)), {}, lambda _: {}, {}, report)


def the_pool_of(runnable: Runnable[Any, Any]) -> EnginePool | None:
    """The pool that the chain's pool-backed objects share; None without any. Raises `RegistrationError` for two."""
    pools: dict[int, EnginePool] = {id(pool): pool for pool in _pools(runnable)}
    if len(pools) > 1:
        raise RegistrationError(
            f"the chain uses {len(pools)} different engine pools.",
            hint="say which one plans it: accelerate(..., pool=...)",
        )
    return next(iter(pools.values()), None)


def _pools(root: Any) -> Iterator[EnginePool]:
    """Pools of all objects below `root`, through fields and containers; user code is not looked into."""
    todo, seen = [root], set[int]()
    while todo:
        node = todo.pop()
        if id(node) in seen:
            continue
        seen.add(id(node))
        pool = getattr(node, "pool", None) if hasattr(type(node), "__teola_leaf__") else None
        if isinstance(pool, EnginePool):
            yield pool
        if isinstance(node, Mapping):
            todo += node.values()
        elif isinstance(node, list | tuple):
            todo += node
        elif isinstance(node, Runnable):
            todo += vars(node).values()
