"""`accelerate` for LlamaIndex: query engines, retrievers, synthesizers, chat engines, ingestion, indexes, workflows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from llama_index.core.callbacks import CallbackManager
from llama_index.core.indices.vector_store import VectorStoreIndex
from llama_index.core.ingestion import IngestionPipeline
from llama_index.core.workflow import Workflow

from teola_plugin.adapters.early_work import log_fallback
from teola_plugin.adapters.llamaindex.accelerated import Accelerated, accelerated, original_of
from teola_plugin.adapters.llamaindex.checking import shadow_of
from teola_plugin.adapters.llamaindex.ingestion import AcceleratedIndex, AcceleratedPipeline, WritingSession
from teola_plugin.adapters.llamaindex.prefetching import entries_of, find_scope
from teola_plugin.adapters.llamaindex.session import Session, Settings
from teola_plugin.adapters.llamaindex.substitution import replaced
from teola_plugin.adapters.options import Options
from teola_plugin.adapters.own_class import FieldSnapshot
from teola_plugin.adapters.whole import in_part, kept_by
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool
from teola_plugin.shims.llamaindex.interceptors import enable
from teola_plugin.shims.llamaindex.workflows import objects_used_by_steps
from teola_plugin.tracer.llamaindex.classes import is_composite, is_pool_object, reachable_objects


def accelerate_llamaindex(obj: Any, options: Options, terms: Settings | None = None) -> Any:
    """See `teola_plugin.accelerate`. Returns an instance of a subclass of the original's class.

    An object that is accelerated already is accelerated anew, on these terms. `terms` are those of `with_terms`.
    """
    enable(find_scope)
    obj = original_of(obj)
    shadow = shadow_of(options.shadow, obj) if options.shadow else None
    session = _session(obj, options)
    if isinstance(session, WritingSession):
        return accelerated(session, AcceleratedPipeline if isinstance(obj, IngestionPipeline) else AcceleratedIndex)
    session.shadow = shadow
    return accelerated(session if terms is None else session.under(terms))


def _session(obj: Any, options: Options) -> Any:
    """Create what makes the calls of an object. Raises `RegistrationError` and `TraceError`."""
    accelerate_copy = partial(accelerate_llamaindex, options=replace(options, strict=False))
    renew = partial(_renewed, options=replace(options, strict=False))
    terms = Settings(options.passes, options.speculate, options.app or "default", threads=options.threads)
    options = replace(options, pool=options.pool or the_pool_of(obj))
    serving = None
    if options.serve is not None:
        from teola_plugin.adapters.llamaindex.binding.serve import with_serving

        options, serving = with_serving(obj, options, lambda one, engine, pool: bound_in(obj, [(one, engine)], pool))
    pool = options.pool
    served = bound_in(obj, options.bind, pool, strict=options.strict)
    session: Any
    if isinstance(served, IngestionPipeline | VectorStoreIndex):
        session = WritingSession(obj, served, options)
    else:
        session = _planned(obj, served, pool, terms)
        if pool is None:
            for entry in entries_of(served):
                session.prefetch_plan(entry)  # before the first call: it takes a while
        session.serving = serving
    session.accelerate_copy = accelerate_copy
    if options.bind or options.serve is not None:
        session.renewed_by(renew, FieldSnapshot([*_composites(obj), *(one for one, _ in options.bind)]))
    return session


def _renewed(session: Any, options: Options) -> Any:
    """Create what makes the calls of an object whose parts were set since. What cannot be served any more just runs."""
    obj = session.original
    try:
        renewed = _session(obj, options)
    except Exception as error:
        log_fallback(error, obj, "parts that were set")
        renewed = _session(obj, replace(options, pool=session.pool, bind=(), serve=None))
        renewed.renewed_by(partial(_renewed, options=options), FieldSnapshot(_composites(obj)))
    if isinstance(session, Session):
        renewed = renewed.under(session.terms)
    renewed.continues(session)
    return renewed


def _composites(obj: Any) -> list[Any]:
    """Return the objects that a served copy of `obj` is made of."""
    return [node for node in reachable_objects(obj) if is_composite(node)]


def _planned(obj: Any, served: Any, pool: EnginePool | None, terms: Settings) -> Session:
    parts = _Parts(pool, terms)
    if not isinstance(served, Workflow):
        return Session(obj, served, pool, terms, parts)
    from teola_plugin.adapters.llamaindex.workflows.session import WorkflowSession  # agents take a while to import

    return WorkflowSession(obj, served, pool, terms, parts)


KEPT = 64
"""Accelerated parts that are remembered; an engine may make parts anew for each call."""


class _Parts:
    """Accelerates parts that are called at run time, each once."""

    def __init__(self, pool: EnginePool | None, terms: Settings) -> None:
        self._pool, self._terms = pool, terms
        self._made: dict[int, tuple[Any, Any]] = {}

    def __call__(self, node: Any) -> Any:
        if isinstance(node, Accelerated):
            return node
        known = self._made.get(id(node))
        if known is None or known[0] is not node:
            session = Session(node, node, self._pool, self._terms, self)
            known = self._made[id(node)] = (node, accelerated(session))
            if len(self._made) > KEPT:
                self._made.pop(next(iter(self._made), 0), None)
        return known[1]


def bound_in(obj: Any, pairs: Sequence[tuple[Any, str]], pool: EnginePool | None, *, strict: bool = True) -> Any:
    """`obj`, or a copy in which the bound objects are served by the pool. Raises `RegistrationError`."""
    if not pairs:
        return obj
    if pool is None:
        raise RegistrationError("bind= needs a pool.", hint="pass pool=EnginePool.local(...)")
    from teola_plugin.adapters.llamaindex.binding.bind import bound

    served = {id(one): bound(one, engine, pool) for one, engine in pairs}
    seen: set[int] = set()

    def change(node: Any) -> Any | None:
        seen.add(id(node))
        return served.get(id(node))

    made = replaced(obj, change)
    missing = [one for one, _ in pairs if id(one) not in seen]
    if missing and strict:
        raise RegistrationError(
            f"bind= names a {type(missing[0]).__name__} that is not a part of the {type(obj).__name__}.",
            hint="bind the very object that the engine was made with",
        )
    for one in (one for one, _ in pairs if id(one) in seen):
        if keeper := kept_by(made, one, (CallbackManager,), functions=True):
            raise in_part(one, keeper)
    return made


def the_pool_of(obj: Any) -> EnginePool | None:
    """The pool that its pool-backed objects share; None without any. Raises `RegistrationError` for two."""
    named = objects_used_by_steps(obj) if isinstance(obj, Workflow) else ()
    roots = [obj, *(one for one in named if is_pool_object(one) or is_composite(one))]
    found = (_pool_of(node) for root in roots for node in reachable_objects(root))
    pools = {id(pool): pool for pool in found if isinstance(pool, EnginePool)}
    if len(pools) > 1:
        raise RegistrationError(
            f"the object uses {len(pools)} different engine pools.",
            hint="say which one plans it: accelerate(..., pool=...)",
        )
    return next(iter(pools.values()), None)


def _pool_of(node: Any) -> Any:
    return getattr(node.__teola_session__ if isinstance(node, Accelerated) else node, "pool", None)
