"""The arguments of `accelerate` as one record, for the adapters of all frameworks."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from teola_plugin.adapters.prompt_cache import PromptCache
from teola_plugin.adapters.thread_safety import ThreadSafety, concurrent_objects
from teola_plugin.errors import RegistrationError, unknown_name
from teola_plugin.passes import Pass, resolve_passes
from teola_plugin.passes.base import SPECULATE
from teola_plugin.pool import EnginePool, need_pool

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
        return cls(pool, pairs(bind), resolved_passes, speculate, app, shadow, threads, strict, engines, tools, cache)

    @property
    def threads(self) -> ThreadSafety:
        """The objects that take several sync calls at once."""
        return ThreadSafety(self.concurrent)

    def inside(self) -> Options:
        """Return the options for a part of the object: bindings are done by then, and only whole calls are compared."""
        return replace(self, bind=(), shadow=0.0, engines=None, strict=False, prompt_cache=None)


def pairs(bind: Bindings | None) -> tuple[tuple[Any, str], ...]:
    """Return the pairs of an object and the name of its engine."""
    return tuple(bind.items() if isinstance(bind, Mapping) else bind or ())
