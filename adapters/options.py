"""The arguments of `accelerate` as one record, for the adapters of all frameworks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from teola_plugin.adapters.prompt_cache import PromptCache
from teola_plugin.adapters.thread_safety import ThreadSafety, concurrent_objects
from teola_plugin.errors import RegistrationError, unknown_name
from teola_plugin.lazy_names import later
from teola_plugin.observe.spans import Price, checked_prices
from teola_plugin.passes import Pass, resolve_passes
from teola_plugin.passes.base import SPECULATE
from teola_plugin.pool import EnginePool, need_pool
from teola_plugin.runtime.usage import CostMeter

Bindings = Mapping[Any, str] | Iterable[tuple[Any, str]]
"""Objects and the engine that serves each; pairs where an object cannot be hashed. Objects count by identity."""
ENGINES = ("auto", "dedicated")


@dataclass(frozen=True, slots=True)
class Options:
    """The checked arguments of `teola_plugin.accelerate`. Names of engines are not checked yet."""

    pool: EnginePool | None = None
    bind: tuple[tuple[Any, str], ...] = ()
    passes: tuple[Pass, ...] | None = None
    """None for those of the pool."""
    speculate: str = "auto"
    app: str | None = None
    shadow: float = 0.0
    concurrent: tuple[Any, ...] = ()
    strict: bool = True
    """True if it is an error that something in `bind` does not occur in the object."""
    engines: str | None = None
    """Which of the user's own models get engines by themselves: see `adapters.automatic_engines`."""
    read_only: tuple[Any, ...] = ()
    """Tools, names of tools, predicates and MCP servers: see `adapters.langchain.tools.ReadOnlyTools`."""
    prompt_cache: PromptCache | None = None
    """The cache keys and markers of the app's requests; None for requests as the original sends them."""
    meter: CostMeter | None = None
    """Counts the calls of models and their dollars; None without prices."""

    @classmethod
    def of(
        cls,
        pool: EnginePool | None,
        bind: Bindings | None,
        passes: Iterable[Pass | str] | None,
        speculate: str,
        app: str | None,
        shadow: float,
        concurrent: Iterable[Any] | None = None,
        strict: bool = True,
        engines: str | None = None,
        read_only: Iterable[Any] | None = None,
        prompt_cache: bool = False,
        prices: Mapping[str, Price] | None = None,
    ) -> Options:
        """Check the arguments. Raise `RegistrationError` for unknown passes and values, and for a pool that is none."""
        if isinstance(read_only, str) or not isinstance(read_only or (), Iterable):
            raise RegistrationError(
                f"read_only is {read_only!r}, which is no list.", hint='write read_only=["search"] for one tool, too'
            )
        if speculate not in SPECULATE:
            raise unknown_name("value of speculate", speculate, list(SPECULATE))
        if engines not in (None, *ENGINES):
            raise unknown_name("value of engines", str(engines), list(ENGINES))
        if not isinstance(prompt_cache, bool):
            raise RegistrationError(f"prompt_cache is {prompt_cache!r}.", hint="write prompt_cache=True")
        if pool is not None:
            need_pool(pool)
        resolved_passes = None if passes is None else resolve_passes(passes)
        threads = concurrent_objects(concurrent)
        tools = tuple(read_only or ())
        cache = PromptCache(app or "") if prompt_cache else None
        table = pool.prices if prices is None and pool is not None else prices
        meter = None
        if table is not None:  # that module knows the frameworks, which do not import each other
            meter = CostMeter(checked_prices(table), later("teola_plugin.adapters.app_frameworks", "tokens_of"))
        bindings = pairs(bind)
        return cls(
            pool, bindings, resolved_passes, speculate, app, shadow, threads, strict, engines, tools, cache, meter
        )

    @property
    def threads(self) -> ThreadSafety:
        """The objects that take several sync calls at once."""
        return ThreadSafety(self.concurrent)

    def inside(self) -> Options:
        """Return the options for a part of the object: bindings are done by then, and only whole calls are compared."""
        return replace(self, bind=(), shadow=0.0, engines=None, strict=False, prompt_cache=None, meter=None)


def pairs(bind: Bindings | None) -> tuple[tuple[Any, str], ...]:
    """Return the pairs of an object and the name of its engine."""
    return tuple(bind.items() if isinstance(bind, Mapping) else bind or ())
