"""`accelerate` for LlamaIndex: query engines, retrievers, synthesizers, chat engines, ingestion, indexes, workflows."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.workflow import Workflow

from teola_plugin.adapters.llamaindex.accelerated import Accelerated, accelerated, original_of
from teola_plugin.adapters.llamaindex.checking import shadow_of
from teola_plugin.adapters.llamaindex.ingestion import AcceleratedIndex, AcceleratedPipeline, WritingSession
from teola_plugin.adapters.llamaindex.prefetching import find_scope
from teola_plugin.adapters.llamaindex.session import Session, Settings
from teola_plugin.adapters.options import Options
from teola_plugin.adapters.routing import RoutingRules, route_of
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.shims.llamaindex.interceptors import enable
from teola_plugin.shims.llamaindex.workflows import objects_used_by_steps
from teola_plugin.tracer.llamaindex.classes import is_composite, is_pool_object, reachable_objects
from teola_plugin.tracer.llamaindex.trace import entries_of


def accelerate_llamaindex(obj: Any, options: Options, settings: Settings | None = None) -> Any:
    """See `teola_plugin.accelerate`. Returns an instance of a subclass of the original's class.

    An object that is accelerated already is accelerated again, with these options. `settings`: those of its
    `with_request_context`.
    """
    if options.read_only and options.strict:
        raise RegistrationError(
            "read_only= is for agents of LangGraph: agents of LlamaIndex run the tool calls of an answer side by side "
            "themselves, once the answer is complete.",
            hint="leave read_only= out, or pass strict=False; tools that call query engines and retrievers of the "
            "pool gain without it",
        )
    enable(find_scope)
    obj = original_of(obj)
    shadow = shadow_of(options.shadow, obj) if options.shadow else None
    session = _session(obj, options)
    if isinstance(session, WritingSession):
        return accelerated(session, AcceleratedPipeline if isinstance(obj, IngestionPipeline) else AcceleratedIndex)
    session.shadow = shadow
    return accelerated(session if settings is None else session.with_request_context(settings))


def _session(obj: Any, options: Options) -> Any:
    """Create the session of an object. Raise `RegistrationError` and `TraceError`."""
    accelerate_copy = partial(accelerate_llamaindex, options=replace(options, strict=False))
    settings = Settings(options.passes, options.speculate, options.app or "default", threads=options.threads)
    options = replace(options, pool=options.pool or the_pool_of(obj))
    serving = rules = None
    if options.engines is not None or options.bind or options.prompt_cache or options.meter:
        from teola_plugin.adapters.llamaindex.binding.rules import rules_for

        options, rules, serving = rules_for(obj, options)
    session: Any
    if isinstance(obj, IngestionPipeline | VectorStoreIndex):
        session = WritingSession(obj, options, rules)
    else:
        session = _new_session(obj, options.pool, settings, rules)
        if session.pool is None:
            for entry in entries_of(obj):
                session.prefetch_plan(entry)  # before the first call: it takes a while
        session.serving = serving
    session.accelerate_copy = accelerate_copy
    return session


def _new_session(obj: Any, pool: EnginePool | None, settings: Settings, rules: RoutingRules | None) -> Session:
    """Create the session that plans and runs the calls of an object: a `WorkflowSession` for workflows and agents."""
    accelerate_part = _PartAccelerator(pool, settings)
    if not isinstance(obj, Workflow):
        return Session(obj, pool, settings, accelerate_part, rules)
    from teola_plugin.adapters.llamaindex.workflows.session import WorkflowSession  # agents take a while to import

    return WorkflowSession(obj, pool, settings, accelerate_part, rules)


MAX_PARTS = 64
"""Accelerated parts that are remembered; an engine may make new parts for each call."""


class _PartAccelerator:
    """Accelerates the parts that are called at run time, each once."""

    def __init__(self, pool: EnginePool | None, settings: Settings) -> None:
        self._pool, self._settings = pool, settings
        self._accelerated: dict[int, tuple[Any, Any]] = {}

    def __call__(self, node: Any) -> Any:
        """Return the accelerated form of an engine, retriever or synthesizer that is called at run time.

        Forms are remembered by identity; the oldest is dropped when there are too many.
        """
        if isinstance(node, Accelerated):
            return node
        remembered = self._accelerated.get(id(node))
        if remembered is None or remembered[0] is not node:
            session = Session(node, self._pool, self._settings, self)
            remembered = self._accelerated[id(node)] = (node, accelerated(session))
            if len(self._accelerated) > MAX_PARTS:
                self._accelerated.pop(next(iter(self._accelerated), 0), None)
        return remembered[1]


def the_pool_of(obj: Any) -> EnginePool | None:
    """Return the pool of the pool-backed objects in `obj`; None without any. Raise `RegistrationError` for two."""
    step_objects = objects_used_by_steps(obj) if isinstance(obj, Workflow) else ()
    roots = [obj, *(one for one in step_objects if is_pool_object(one) or is_composite(one))]
    candidates = (_pool_of(node) for root in roots for node in reachable_objects(root))
    pools = {id(pool): pool for pool in candidates if isinstance(pool, EnginePool)}
    if len(pools) > 1:
        raise RegistrationError(
            f"the object uses {len(pools)} different engine pools.",
            hint="say which one plans it: accelerate(..., pool=...)",
        )
    return next(iter(pools.values()), None)


def _pool_of(node: Any) -> Any:
    """Return the pool that an object belongs to, by its route to an engine or its own field; None without one."""
    route = route_of(node)
    if route is not None:
        return route.pool
    session = node.__teola_session__ if isinstance(node, Accelerated) else None  # a new instance of its class has none
    return getattr(node, "pool", None) if session is None else session.tracing_pool
