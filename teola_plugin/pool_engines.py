"""The engines of a pool from what the user gives: engines with or without names, several replicas, models."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, ValuesView
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, cast

from teola_plugin.engines.base import Engine
from teola_plugin.errors import RegistrationError, unknown_name
from teola_plugin.observe.otel import tracing_sink
from teola_plugin.observe.recorder import TraceSink
from teola_plugin.runtime.local import LocalRuntime
from teola_plugin.runtime.loop_thread import SameLoop
from teola_plugin.scheduling import POLICIES, BatchPolicy

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

_Listed = Sequence[Engine] | AbstractSet[Engine] | Iterator[Engine] | ValuesView[Engine]
"""Any iterable but a dict: its type would hide what is in a dict from type checkers."""
Engines = Mapping[str, Engine | Sequence[Engine]] | _Listed
"""Engines (or replicas of one) by name, or engines alone, which have names of their own."""

_METHODS = ("start", "stop", "execute", "cancel")
"""The methods that every engine has. Its properties may be missing before its start."""


def by_name(engines: Engines) -> dict[str, Engine | Sequence[Engine]]:
    """Return the engines by name. Raise `RegistrationError` for what is no engine, and for two engines of one name."""
    if isinstance(engines, Mapping):
        return dict(engines)
    if not isinstance(engines, Iterable):
        raise _no_engines(engines)
    engines_by_name: dict[str, Engine | Sequence[Engine]] = {}
    for engine in engines:
        name = _checked(engine).name
        if name in engines_by_name:
            raise RegistrationError(
                f"two engines are named {name!r}.",
                hint=f"name one otherwise; for replicas of one engine, give {{{name!r}: [one, other]}}",
            )
        engines_by_name[name] = engine
    return engines_by_name


def replicas_of(name: str, engines: Engine | Sequence[Engine]) -> tuple[Engine, ...]:
    """Return the replicas of an engine. Raise `RegistrationError` if there is none."""
    replicas = tuple(engines) if isinstance(engines, Sequence) else (engines,)
    if not replicas:
        raise RegistrationError(f"engine {name!r} has no replica.", hint="give it at least one, or leave it out")
    return tuple(_checked(replica, name) for replica in replicas)


def _checked(obj: object, name: str = "") -> Engine:
    """Return an engine as it is. Raise RegistrationError for a class, or an object that lacks one of an engine's
    methods."""
    if isinstance(obj, type) or not all(callable(getattr(obj, method, None)) for method in _METHODS):
        raise _no_engines(obj, name)
    return cast(Engine, obj)


def _no_engines(obj: object, name: str = "") -> RegistrationError:
    """Return the error for an object that is no engine. `name`: that of the engine whose replica it should be."""
    subject = f"engine {name!r} is" if name else "among the engines is"
    return RegistrationError(
        f"{subject} {reprlib.repr(obj)}, which is no engine.",
        hint="give objects with the methods of teola_plugin.engines.base.Engine, in a list or by name",
    )


def default_engine(name: str, model: str, drafts: str | Mapping[str, Any] | None = None) -> Engine:
    """Return the engine for a keyword of `EnginePool.local`. `model` is a DSN for a store; `drafts` is for an LLM."""
    if name == "llm":
        from teola_plugin.engines.vllm import VllmEngine

        return VllmEngine(name, model) if drafts is None else VllmEngine(name, model, drafts=drafts)
    if name == "embedder":
        from teola_plugin.engines.sentence_transformers import EmbeddingEngine

        return EmbeddingEngine(name, model)
    if name == "reranker":
        from teola_plugin.engines.sentence_transformers import RerankingEngine

        return RerankingEngine(name, model)
    from teola_plugin.engines.pgvector import PgVectorEngine

    return PgVectorEngine(name, dsn=None if model == "embedded" else model)


def prepared(
    engines_by_name: Mapping[str, Engine | Sequence[Engine]],
    policy: str | Mapping[str, str],
    details: bool,
    loop: SameLoop | None,
    tracing: str | TracerProvider | None = None,
    max_queued: Mapping[str, int] | None = None,
    *,
    may_be_empty: bool = False,
) -> tuple[LocalRuntime, dict[str, Sequence[Engine]]]:
    """Return the runtime of a local pool, and the replicas of its engines by name. Raise `RegistrationError`.

    `may_be_empty`: the pool may have no engines, for apps that are served on models of their own. So may one with
    `tracing`, which sends the traces of such apps.
    """
    if not engines_by_name and not may_be_empty and tracing is None:
        raise RegistrationError("a pool needs at least one engine.", hint="e.g. EnginePool.local(llm='path/to/model')")
    policies = {n: _policy(one) for n, one in policy.items()} if isinstance(policy, Mapping) else _policy(policy)
    engines: dict[str, Sequence[Engine]] = {name: replicas_of(name, engine) for name, engine in engines_by_name.items()}
    sink = sink_of(tracing, engines)
    runtime = LocalRuntime(engines, policy=policies, max_queued=max_queued, loop=loop, details=details, sink=sink)
    return runtime, engines


def _policy(name: str) -> BatchPolicy:
    """Return a new batch policy by its name. Raise `RegistrationError` for an unknown one."""
    if not isinstance(name, str) or name not in POLICIES:
        raise unknown_name("batch policy", name, list(POLICIES))
    return POLICIES[name]()


def sink_of(tracing: str | TracerProvider | None, engines: Mapping[str, Sequence[Engine]]) -> TraceSink | None:
    """Return the sink for traces besides `pool.traces`. It reads an engine's model name once the engine has started.

    Args:
        tracing: None for no further sink; otherwise what `tracing_sink` accepts.
        engines: The replicas of the pool's engines, by the engine's name.
    """
    if tracing is None:
        return None
    return tracing_sink(tracing, lambda name: engines[name][0].versions().get("model", "") if name in engines else "")
