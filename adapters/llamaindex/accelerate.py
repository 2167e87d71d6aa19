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

    An object that is accelerated already is accelerated again, with these options. `terms`: those of `with_terms`.
    """
    enable(find_scope)
    obj = original_of(obj)
    shadow = shadow_of(options.shadow, obj) if options.shadow else None
    session = _session(obj, options)
    if isinstance(session, WritingSession):
        return accelerated(session, AcceleratedPipeline if isinstance(obj, IngestionPipeline) else AcceleratedIndex)
    session.shadow = shadow
    return accelerated(session if terms is None else session.with_terms(terms))


def _session(obj: Any, options: Options) -> Any:
    """Create the session of an object. Raise `RegistrationError` and `TraceError`."""
    accelerate_copy = partial(accelerate_llamaindex, options=replace(options, strict=False))
    renew = partial(_renew_session, options=replace(options, strict=False))
    terms = Settings(options.passes, options.speculate, options.app or "default", threads=options.threads)
    options = replace(options, pool=options.pool or the_pool_of(obj))
    serving = None
    if options.engines is not None:
        from teola_plugin.adapters.llamaindex.binding.serve import with_serving

        options, serving = with_serving(obj, options, lambda one, engine, pool: bound_in(obj, [(one, engine)], pool))
    pool = options.pool
    target = bound_in(obj, options.bind, pool, strict=options.strict)
    session: Any
    if isinstance(target, IngestionPipeline | VectorStoreIndex):
        session = WritingSession(obj, target, options)
    else:
        session = _new_session(obj, target, pool, terms)
        if pool is None:
            for entry in entries_of(target):
                session.prefetch_plan(entry)  # before the first call: it takes a while
        session.serving = serving
    session.accelerate_copy = accelerate_copy
    if options.bind or options.engines is not None:
        session.renew_with(renew, FieldSnapshot([*_composites(obj), *(one for one, _ in options.bind)]))
    return session


def _renew_session(session: Any, options: Options) -> Any:
    """Create the session of an object whose parts were set since. Parts that engines cannot serve just run."""
    obj = session.original
    try:
        renewed = _session(obj, options)
    except Exception as error:
        log_fallback(error, obj, "parts that were set")
        renewed = _session(obj, replace(options, pool=session.pool, bind=(), engines=None))
        renewed.renew_with(partial(_renew_session, options=options), FieldSnapshot(_composites(obj)))
    if isinstance(session, Session):
        renewed = renewed.with_terms(session.terms)
    renewed.take_over_from(session)
    return renewed


def _composites(obj: Any) -> list[Any]:
    """Return the objects that a copy of `obj` with served parts is made of."""
    return [node for node in reachable_objects(obj) if is_composite(node)]


def _new_session(obj: Any, target: Any, pool: EnginePool | None, terms: Settings) -> Session:
    accelerate_part = _PartAccelerator(pool, terms)
    if not isinstance(target, Workflow):
        return Session(obj, target, pool, terms, accelerate_part)
    from teola_plugin.adapters.llamaindex.workflows.session import WorkflowSession  # agents take a while to import

    return WorkflowSession(obj, target, pool, terms, accelerate_part)


MAX_PARTS = 64
"""Accelerated parts that are remembered; an engine may make new parts for each call."""


class _PartAccelerator:
    """Accelerates the parts that are called at run time, each once."""

    def __init__(self, pool: EnginePool | None, terms: Settings) -> None:
        self._pool, self._terms = pool, terms
        self._accelerated: dict[int, tuple[Any, Any]] = {}

    def __call__(self, node: Any) -> Any:
        if isinstance(node, Accelerated):
            return node
        remembered = self._accelerated.get(id(node))
        if remembered is None or remembered[0] is not node:
            session = Session(node, node, self._pool, self._terms, self)
            remembered = self._accelerated[id(node)] = (node, accelerated(session))
            if len(self._accelerated) > MAX_PARTS:
                self._accelerated.pop(next(iter(self._accelerated), 0), None)
        return remembered[1]


def bound_in(obj: Any, pairs: Sequence[tuple[Any, str]], pool: EnginePool | None, *, strict: bool = True) -> Any:
    """Return `obj`, or a copy in which the pool serves the bound objects. Raise `RegistrationError`."""
    if not pairs:
        return obj
    if pool is None:
        raise RegistrationError("bind= needs a pool.", hint="pass pool=EnginePool.local(...)")
    from teola_plugin.adapters.llamaindex.binding.bind import bound

    proxies = {id(one): bound(one, engine, pool) for one, engine in pairs}
    seen: set[int] = set()

    def change(node: Any) -> Any | None:
        seen.add(id(node))
        return proxies.get(id(node))

    bound_copy = replaced(obj, change)
    missing = [one for one, _ in pairs if id(one) not in seen]
    if missing and strict:
        raise RegistrationError(
            f"bind= names a {type(missing[0]).__name__} that is not a part of the {type(obj).__name__}.",
            hint="bind the very object that the engine was made with",
        )
    for one in (one for one, _ in pairs if id(one) in seen):
        if keeper := kept_by(bound_copy, one, (CallbackManager,), functions=True):
            raise in_part(one, keeper)
    return bound_copy


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
    return getattr(node.__teola_session__ if isinstance(node, Accelerated) else node, "pool", None)
