"""Engine pools: which engines there are, where they run, and the pass pipeline in force."""

from __future__ import annotations

import asyncio
import reprlib
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, NoReturn

from teola_plugin.engines.base import Engine
from teola_plugin.errors import RegistrationError, require_modules, unknown_name
from teola_plugin.graph import EngineProfile, PrimitiveKind, Query, RequestContext, Shape, WorkflowTemplate
from teola_plugin.lazy_names import later
from teola_plugin.observe.recorder import TraceSink
from teola_plugin.observe.spans import Price, QueryTrace
from teola_plugin.passes import DEFAULT_PASSES, GraphCache, Optimised, Pass, PassContext, PassPipeline, resolve_passes
from teola_plugin.pool_engines import Engines, by_name, default_engine, prepared, sink_of
from teola_plugin.runtime.local import LocalRuntime
from teola_plugin.runtime.loop_thread import CallHandle, SameLoop
from teola_plugin.runtime.query_run import QueryRun, current_run
from teola_plugin.runtime.threads import tell_of_forks

if TYPE_CHECKING:
    from opentelemetry.trace import TracerProvider

    from teola_plugin.cluster.config import PoolConfig

MAX_CLEAN_UP_S = 10.0
"""Seconds that closing waits for what is to be cleaned up first."""
PIPELINES = 16
"""Different `passes=` whose plans a pool keeps."""


class EnginePool:
    """Engines that apps share. A context manager: `with EnginePool.local(...) as pool:`.

    Objects of the pool (`ChatTeola(pool=pool)`, ...) work inside accelerated objects and outside of them.
    """

    def __init__(
        self, runtime: LocalRuntime, engines: Mapping[str, Sequence[Engine]], passes: Iterable[Pass | str]
    ) -> None:
        self.runtime = runtime
        self._engines = {name: tuple(replicas) for name, replicas in engines.items()}
        self.passes = resolve_passes(passes)
        self._caches: dict[tuple[Pass, ...], GraphCache] = {}
        self.times_forgotten = 0
        """Calls of `forget`: who keeps plans of the pool drops those that are older."""
        self.prices: Mapping[str, Price] | None = None
        """The price of each model by its name, for objects that are accelerated without `prices=`; None for none."""
        self._deployments: dict[str, Any] = {}
        self._outstanding: set[Future[Any]] = set()
        self._started = False
        self._changing = threading.RLock()
        tell_of_forks(self)

    def forked(self) -> None:
        """In a child process: whoever was starting or closing it is not there."""
        self._changing = threading.RLock()

    @classmethod
    def local(
        cls,
        engines: Engines | None = None,
        *,
        llm: str | Engine | None = None,
        embedder: str | Engine | None = None,
        reranker: str | Engine | None = None,
        store: str | Engine | None = None,
        drafts: str | Mapping[str, Any] | None = None,
        passes: Iterable[Pass | str] = DEFAULT_PASSES,
        policy: str | Mapping[str, str] = "topology-aware",
        details: bool = False,
        tracing: str | TracerProvider | None = None,
    ) -> EnginePool:
        """A pool in this process; its engines start with `start()` or on entering.

        `engines` are ready-made engines by name. The four keywords make or take the usual ones under those names:
        `llm`, `embedder` and `reranker` a model (path or hub id) or an engine, `store` a PostgreSQL DSN, `"embedded"`
        or an engine. `drafts` are those of an `llm` that is given as a model, as `VllmEngine` takes them. `policy`
        (of all engines, or of each by name) is one of `scheduling.POLICIES`. `details` keeps prompts and documents in
        traces.
        `tracing="opentelemetry"` sends every query's trace there, a tracer provider to that one (extra `otel`). Models
        compute on GPUs where there are any, and share their memory by the rule of `engines.devices.budget`.
        Raises `RegistrationError`, `ConfigError`.
        """
        engines_by_name = by_name({} if engines is None else engines)
        for name, engine in (("llm", llm), ("embedder", embedder), ("reranker", reranker), ("store", store)):
            if engine is not None:
                engines_by_name[name] = default_engine(name, engine, drafts) if isinstance(engine, str) else engine
        if drafts is not None and not isinstance(llm, str):
            raise RegistrationError(
                "drafts are said of a model, and llm is none.", hint="say them of the engine: VllmEngine(..., drafts=)"
            )
        return cls(*prepared(engines_by_name, policy, details, None, tracing), passes)

    @classmethod
    def from_yaml(
        cls,
        config: str | Path | PoolConfig,
        *,
        passes: Iterable[Pass | str] = DEFAULT_PASSES,
        details: bool = False,
        tracing: str | TracerProvider | None = None,
    ) -> EnginePool:
        """A pool in this process with the engines of a pool's file (extra `yaml` or `ray`); not started.

        Policies, `max_queued` and `prices` are the file's; what only a cluster has (reserved resources, autoscaling) is
        left out. Raises `ConfigError`, `MissingPackage` without PyYAML and pydantic, and what engines raise when made.
        """
        from teola_plugin.cluster.config import PoolConfig
        from teola_plugin.cluster.deployment.engine_factory import engines_here

        settings = config if isinstance(config, PoolConfig) else PoolConfig.read(config)
        engines_by_name, policies, max_queued = engines_here(settings)
        parts = prepared(engines_by_name, policies, details, None, tracing, max_queued, may_be_empty=True)
        pool = cls(*parts, passes)
        pool.prices = settings.price_table
        return pool

    @classmethod
    def on_this_loop(
        cls,
        engines: Engines,
        *,
        passes: Iterable[Pass | str] = DEFAULT_PASSES,
        policy: str | Mapping[str, str] = "topology-aware",
        sink: TraceSink | None = None,
    ) -> EnginePool:
        """A pool on the running event loop, for virtual time. Use `async with`; only async calls work.

        `policy`: of all engines, or of each by name. `sink` is told of every query, see `TraceSink`.
        """
        runtime, replicas = prepared(by_name(engines), policy, False, SameLoop())
        runtime.recorder.sink = sink
        return cls(runtime, replicas, passes)

    @classmethod
    def connect(
        cls,
        address: str | None = None,
        *,
        pool: str = "default",
        passes: Iterable[Pass | str] = DEFAULT_PASSES,
        details: bool = False,
        tracing: str | TracerProvider | None = None,
    ) -> EnginePool:
        """A pool that runs on a Ray cluster, shared with other processes and apps: see `teola up`.

        `address` is the cluster's own (`host:port`; `auto` on one of its nodes); by default that of the pool of this
        name that was started on this machine. Engines and their schedulers are there, graphs, traces and your own
        code here; `details` and `tracing` as in `local`.
        Raises `EngineUnavailable` (no cluster, other versions), `ConfigError` (`ray://`), `RegistrationError`, and
        `MissingPackage` without the extra `ray`.
        """
        require_modules("EnginePool.connect", ("ray", "yaml", "pydantic"), "ray")
        from teola_plugin.cluster.client.client import ClusterRuntime, find_engines
        from teola_plugin.cluster.deployment.records import address_of

        engines = find_engines(address_of(pool, address), pool)
        replicas = {name: (engine,) for name, engine in engines.items()}
        sink = sink_of(tracing, replicas)
        return cls(ClusterRuntime(pool, engines, details=details, sink=sink), replicas, passes)

    # ------------------------------------------------------------ life

    def start(self) -> EnginePool:
        """Start all engines; again after `close()`, with the same settings and profiles. Idempotent.

        Raises `EngineUnavailable`, also in a process that was forked while they ran, and what engines raise; before
        anything starts `ConfigError`, where a device is not there or its memory does not suffice.
        """
        with self._changing:
            if not self._started or self.runtime.loop.was_forked:
                self.runtime.start()
                self._started = True
        return self

    def close(self) -> None:
        """Stop all engines. Idempotent. Calls under way fail as `EngineUnavailable`, and so does a `start()` of another
        thread. In a process that was forked while they ran, it does nothing: they are the parent's."""
        if self._outstanding:
            wait(list(self._outstanding), MAX_CLEAN_UP_S)
        self.runtime.break_off()
        with self._changing:
            if self._started:
                self._started = False
                self.runtime.stop()

    def __enter__(self) -> EnginePool:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> EnginePool:
        """Start the engines without blocking the running loop. If the wait is cancelled, a thread closes them again."""
        if isinstance(self.runtime.loop, SameLoop):
            await self.runtime.astart()
            self._started = True
            return self
        given_up: list[bool] = []

        def start() -> EnginePool:
            with self._changing:
                return self if given_up else self.start()

        def end() -> None:
            given_up.append(True)
            self.close()

        try:
            return await asyncio.get_running_loop().run_in_executor(None, start)
        except asyncio.CancelledError:  # the body is never reached, nor is `__aexit__`
            threading.Thread(target=end, name="teola-closing").start()
            raise

    async def __aexit__(self, *_: object) -> None:
        """Stop the engines without blocking the running loop."""
        if isinstance(self.runtime.loop, SameLoop):
            if self._outstanding:
                await asyncio.wait([asyncio.wrap_future(one) for one in self._outstanding], timeout=MAX_CLEAN_UP_S)
            self._started = False
            await self.runtime.astop()
        else:
            await asyncio.get_running_loop().run_in_executor(None, self.close)

    # ------------------------------------------------------------ engines

    @property
    def running(self) -> bool:
        """True if its engines are started."""
        return self._started

    def add(self, engine: Engine) -> None:
        """One more engine, under its own name; where the others run, it starts now. Not for shared pools.

        Raises `RegistrationError` for a name that is taken, and what `start` raises; the pool is as before then.
        """
        if self.shared or engine.name in self._engines:
            reason = "engines of a shared pool are said in its file" if self.shared else f"it has a {engine.name!r}"
            raise RegistrationError(
                f"the engine {engine.name!r} cannot be added: {reason}.",
                hint="see `teola up`"
                if self.shared
                else f"give it another name: {type(engine).__name__}('other', ...)",
            )
        self.runtime.add(engine, running=self._started)
        self._engines = {**self._engines, engine.name: (engine,)}  # others may be reading it

    def engine(self, name: str) -> Engine:
        """The (first) replica of an engine. Raises `RegistrationError`."""
        return self.replicas(name)[0]

    def replicas(self, name: str) -> tuple[Engine, ...]:
        """Return the replicas of an engine, or their client in a shared pool. Raise RegistrationError if unknown."""
        if name not in self._engines:
            raise unknown_name("engine", name, list(self._engines))
        return self._engines[name]

    @property
    def engine_names(self) -> tuple[str, ...]:
        return tuple(sorted(self._engines))

    @property
    def shared(self) -> bool:
        """True if the engines run in other processes, for several clients."""
        return self.runtime.shared

    @property
    def profiles(self) -> Mapping[str, EngineProfile]:
        return {name: replicas[0].profile for name, replicas in self._engines.items()}

    def versions(self) -> dict[str, dict[str, str]]:
        """Return the versions of the software below each engine, by engine name."""
        return {name: dict(replicas[0].versions()) for name, replicas in self._engines.items()}

    def call(
        self,
        kind: PrimitiveKind,
        engine: str,
        payloads: Sequence[Any],
        *,
        stream: bool = False,
        speculative: bool = False,
        keep_remote: bool = False,
        run: Any = None,
        request_context: RequestContext | None = None,
    ) -> CallHandle:
        """One request per payload on an engine; inside a live query (`run`), work done ahead is claimed.

        `speculative`: what is streamed is read as a guess at the result. With `keep_remote`, a shared pool may leave
        large values where they are made: see `RemoteValue`. `request_context` (tenant, app, deadline,
        weight) is that of a call
        that joins no live query.
        """
        return self.runtime.call(
            kind,
            engine,
            payloads,
            stream=stream,
            speculative=speculative,
            keep_remote=keep_remote,
            run=run,
            request_context=request_context,
        )

    def bound(self, obj: Any, engine: str) -> Any:
        """Return your own model, embeddings or cross encoder with its work done by `engine` wherever it is called.

        For use outside of accelerated objects, too. What is returned is of a subclass of the object's class and shares
        the object's state. Whether and how an engine serves it, and what it answers, is as with `bind=`, and so are the
        refusals. In LangChain it does its work itself after `teola_plugin.uninstall()`.
        Raises `RegistrationError` for what cannot be served faithfully.
        """
        # What knows the frameworks lies above this module, and is imported only when somebody has an object of theirs.
        return later("teola_plugin.adapters", "bound")(obj, engine, self)

    def admin(self, engine: str, method: str, *args: Any) -> Future[Any]:
        """Run a coroutine method of an engine that is no request, e.g. `count` of a store."""
        return self.runtime.admin(engine, method, *args)

    def clean_up(self, engine: str, method: str, *args: Any) -> Future[Any]:
        """Call a method of an engine as `admin` does, for a caller that does not wait for it; `close()` waits a while
        for it.

        Workflows delete their temporary collections with it. Raises what `admin` raises, such as for a pool that is
        closed.
        """
        result = self.admin(engine, method, *args)
        self._outstanding.add(result)
        result.add_done_callback(self._outstanding.discard)
        return result

    def reset(self) -> None:
        """Empty prefix caches, and forget outputs that engines draft from."""
        self.runtime.reset()

    def forget(self, tenant: str) -> None:
        """Forget what was learned from a tenant's requests.

        Engines stop drafting from the tenant's outputs, its traces are dropped, and so are all cached plans, which may
        contain prompts of its queries. Its prefixes stay in caches until their space is needed or `reset()` is called;
        prompts of other tenants never find them there.
        """
        self._caches.clear()
        self.times_forgotten += 1
        for one in self._deployments.values():
            one.forget()
        self.runtime.forget(tenant)

    # ------------------------------------------------------------ plans and traces

    def plan(
        self,
        template: WorkflowTemplate,
        shape: Shape | None = None,
        *,
        passes: Iterable[Pass | str] | None = None,
        speculate: str = "auto",
        as_dedicated: Collection[str] = (),
    ) -> Optimised:
        """The e-graph of a template on this pool's engines, from the cache when it was made before.

        `as_dedicated`: engines that are taken as declared dedicated. For reports: such a graph is not to be run.
        """
        pipeline = self.passes if passes is None else resolve_passes(passes)
        cache = self._caches.get(pipeline)
        if cache is None:
            cache = self._caches.setdefault(pipeline, GraphCache(PassPipeline(pipeline)))
            for other in list(self._caches)[:-PIPELINES]:
                self._caches.pop(other, None)
        profiles = self.profiles
        if as_dedicated:
            profiles = {**profiles, **{name: replace(profiles[name], dedicated=True) for name in as_dedicated}}
        context, prefetches = PassContext(profiles, speculate), bool(pipeline)
        speculates = prefetches and speculate != "off" and context.may_ask(*template.engines_of_open_choices())
        return cache.optimised(template, shape, context, certain=prefetches, open_choices=speculates)

    def deploy(self, name: str, deployment: Any) -> None:
        """Keep what `workflow.deploy(pool)` gives, under its name, for those that look it up, such as a server. The one
        that is deployed last under a name has it."""
        self._deployments = {**self._deployments, name: deployment}  # others may be reading it

    @property
    def deployments(self) -> Mapping[str, Any]:
        """Workflows that are deployed here, by name."""
        return self._deployments

    @contextmanager
    def watching(self, app: str = "plain") -> Iterator[QueryRun]:
        """Calls that original objects make in the body are traced as one query: `run.trace` after the body."""
        run = self.runtime.watch(Query({"input": None}, app=app))
        token = current_run.set(run)
        try:
            yield run
        finally:
            current_run.reset(token)
            run.close()

    @property
    def traces(self) -> tuple[QueryTrace, ...]:
        return self.runtime.traces

    def __repr__(self) -> str:
        return f"<EnginePool {', '.join(self.engine_names)}, {'running' if self._started else 'not running'}>"

    def __deepcopy__(self, memo: dict[int, Any]) -> EnginePool:
        return self  # engines are shared, whoever copies the objects that use them

    def __reduce__(self) -> NoReturn:
        """Raise RegistrationError: a pool cannot be pickled, since its engines live in this process."""
        raise RegistrationError(
            "an engine pool cannot be pickled: its engines live in this process.",
            hint="make the pool, and accelerate, in the process that asks; EnginePool.connect() shares engines",
        )


def need_pool(obj: object) -> EnginePool:
    """Return the object if it is a pool. Raise RegistrationError otherwise."""
    if not isinstance(obj, EnginePool):
        raise RegistrationError(
            f"pool is {reprlib.repr(obj)}, which is no engine pool.",
            hint="pass pool=EnginePool.local(...) or pool=EnginePool.connect()",
        )
    return obj
