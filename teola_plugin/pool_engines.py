"""What a pool is made of, as it is given: engines by name or as they are, several instances, models for engines."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable, Iterator, Mapping, Sequence, ValuesView
from collections.abc import Set as AbstractSet
from typing import TYPE_CHECKING, Any, cast

from teola_plugin.engines.base import Engine
from teola_plugin.errors import RegistrationError, unknown_name
from teola_plugin.observe.otel_sink import tracing_sink
from teola_plugin.observe.recorder import TraceSink
from teola_plugin.runtime.local import LocalRuntime
from teola_plugin.runtime.loop_thread import SameLoop
from teola_plugin.scheduling import POLICIES, BatchPolicy

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

_Listed = Sequence[Engine] | AbstractSet[Engine] | Iterator[Engine] | ValuesView[Engine]
"""Any iterable; but a dict is one, too, of its keys, which would keep type checkers from telling what is in a dict."""
Engines = Mapping[str, Engine | Sequence[Engine]] | _Listed
"""Engines (or instances of one) by name, or just engines, which have names of their own."""


_METHODS = ("start", "stop", "execute", "cancel")
"""What tells an engine: its properties may not be there before its start."""


def by_name(engines: Engines) -> dict[str, Engine | Sequence[Engine]]:
    """Raises `RegistrationError` for what is no engine, and for two of one name."""
    if isinstance(engines, Mapping):
        return dict(engines)
    if not isinstance(engines, Iterable):
        raise _no_engines(engines)
    found: dict[str, Engine | Sequence[Engine]] = {}
    for engine in engines:
        name = _checked(engine).name
        if name in found:
            raise RegistrationError(
                f"two engines are named {name!r}.",
                hint=f"name one otherwise; for instances of one engine, give {{{name!r}: [one, other]}}",
            )
        found[name] = engine
    return found


def instances_of(name: str, given: Engine | Sequence[Engine]) -> tuple[Engine, ...]:
    """At least one. Raises `RegistrationError`."""
    found = tuple(given) if isinstance(given, Sequence) else (given,)
    if not found:
        raise RegistrationError(f"engine {name!r} has no instance.", hint="give it at least one, or leave it out")
    return tuple(_checked(one, name) for one in found)


def _checked(given: object, name: str = "") -> Engine:
    if isinstance(given, type) or not all(callable(getattr(given, method, None)) for method in _METHODS):
        raise _no_engines(given, name)
    return cast(Engine, given)


def _no_engines(given: object, name: str = "") -> RegistrationError:
    what = f"engine {name!r} is" if name else "among the engines is"
    return RegistrationError(
        f"{what} {reprlib.repr(given)}, which is no engine.",
        hint="give objects with the methods of teola_plugin.engines.base.Engine, in a list or by name",
    )


def default_engine(name: str, given: str, drafts: str | Mapping[str, Any] | None = None) -> Engine:
    """Return the engine for a keyword of `EnginePool.local`. Imports are delayed; `drafts` is for an LLM."""
    if name == "llm":
        from teola_plugin.engines.vllm import VllmEngine

        return VllmEngine(name, given) if drafts is None else VllmEngine(name, given, drafts=drafts)
    if name == "embedder":
        from teola_plugin.engines.sentence_transformers import EmbeddingEngine

        return EmbeddingEngine(name, given)
    if name == "reranker":
        from teola_plugin.engines.sentence_transformers import RerankingEngine

        return RerankingEngine(name, given)
    from teola_plugin.engines.pgvector import PgVectorEngine

    return PgVectorEngine(name, dsn=None if given == "embedded" else given)


def prepared(
    found: Mapping[str, Engine | Sequence[Engine]],
    policy: str | Mapping[str, str],
    details: bool,
    loop: SameLoop | None,
    tracing: str | TracerProvider | None = None,
    max_queued: Mapping[str, int] | None = None,
) -> tuple[LocalRuntime, dict[str, Sequence[Engine]]]:
    if not found:
        raise RegistrationError("a pool needs at least one engine.", hint="e.g. EnginePool.local(llm='path/to/model')")
    chosen = {n: _policy(one) for n, one in policy.items()} if isinstance(policy, Mapping) else _policy(policy)
    engines: dict[str, Sequence[Engine]] = {name: instances_of(name, given) for name, given in found.items()}
    sink = sink_of(tracing, engines)
    runtime = LocalRuntime(engines, policy=chosen, max_queued=max_queued, loop=loop, details=details, sink=sink)
    return runtime, engines


def _policy(name: str) -> BatchPolicy:
    """Raises `RegistrationError` for one that there is not."""
    if not isinstance(name, str) or name not in POLICIES:
        raise unknown_name("batch policy", name, list(POLICIES))
    return POLICIES[name]()


def sink_of(tracing: str | TracerProvider | None, engines: Mapping[str, Sequence[Engine]]) -> TraceSink | None:
    """Return the sink for traces besides `pool.traces`. It reads an engine's model name once the engine has started."""
    if tracing is None:
        return None
    return tracing_sink(tracing, lambda name: engines[name][0].versions().get("model", "") if name in engines else "")
