"""`engines=`: engines that are made by themselves, in one pool for the process, and the models that they serve.

A pool without engines of its own leaves the work to the user's own models, and plans and traces it.
"""

from __future__ import annotations

import atexit
import os
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from teola_plugin.adapters.engine_specs import EngineSpec, SpecOrReason
from teola_plugin.adapters.plan_report import PlanReport, Reason, switched_off
from teola_plugin.adapters.prompt_cache import prompt_cache_section
from teola_plugin.adapters.routing import RoutingRules
from teola_plugin.errors import RegistrationError, TeolaError
from teola_plugin.graph import EngineProfile
from teola_plugin.pool import EnginePool
from teola_plugin.runtime.local import LocalRuntime
from teola_plugin.runtime.prefetch_gate import PrefetchGate
from teola_plugin.runtime.threads import ForkedLock


class ServedPool:
    """A pool that creates each engine once, and keeps it until the process ends."""

    def __init__(self) -> None:
        """Begin without a pool: it is made when the first object asks for engines.

        `_specs`: the specifications of the engines that were made, by the engines' names.
        """
        self._lock = threading.Lock()
        self._pool: EnginePool | None = None
        self._specs: dict[str, EngineSpec] = {}

    @property
    def pool(self) -> EnginePool | None:
        """The pool; None before the first engine."""
        return self._pool

    def engine_for(self, spec: EngineSpec) -> tuple[EnginePool, str]:
        """Return the running pool and the name of the engine in it. Raise what starting an engine raises."""
        with self._lock:
            pool = self._pool if self._pool is not None and self._pool.running else None
            if pool is None:
                self._specs = {}
            for name in self._specs:
                if pool is not None and spec.matches(pool.engine(name)):
                    return pool, name
            name = self._free(spec.NAME)
            if pool is None:
                pool = EnginePool.local({name: spec.create(name)}).start()
                atexit.register(pool.close)
            else:
                pool.add(spec.create(name))
            self._pool, self._specs[name] = pool, spec
            return pool, name

    def _free(self, name: str) -> str:
        """Return a free name: `llm`, `llm2`, `llm3`, ...

        `name`: the name of the engine's kind. Names are counted up within one pool. The caller holds the lock.
        """
        number = sum(name == spec.NAME for spec in self._specs.values())
        return f"{name}{number + 1}" if number else name

    def forget(self) -> None:
        """Forget the pool in a forked process: it and its threads are the parent's."""
        self.__init__()  # type: ignore[misc]


PROCESS = ServedPool()
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=PROCESS.forget)


@dataclass(frozen=True, slots=True)
class Bound:
    """A model that an engine serves."""

    obj: Any
    engine: str
    spec: EngineSpec


@dataclass(frozen=True, slots=True)
class LeftAlone:
    """A model that stays as it is."""

    obj: Any
    reason: str


@dataclass(frozen=True, slots=True)
class Serving:
    """The result of `engines=` for one object."""

    mode: str
    """The value of `engines=`."""
    pool: EnginePool | None = None
    bound: tuple[Bound, ...] = ()
    left: tuple[LeftAlone, ...] = ()
    has_own_pool: bool = False
    """True if the pool is the user's own."""

    @property
    def bind(self) -> tuple[tuple[Any, str], ...]:
        """The bindings in the form of the argument `bind=`."""
        return tuple((one.obj, one.engine) for one in self.bound)


BindingCheck = Callable[[Any, str, EnginePool], Any]
"""Binds one object as a test. Raises `RegistrationError` where `bind=` would."""


def serve(
    models: Iterable[Any],
    choose_spec: Callable[[Any], SpecOrReason],
    attempt: BindingCheck,
    mode: str,
    pool: EnginePool | None,
) -> Serving:
    """Bind each model to an engine of `pool` or, without one, of the process's pool.

    A model that `bind=` would refuse, or whose engine does not start, is left as it is, with the reason.
    """
    bound, left, pool_in_use = list[Bound](), list[LeftAlone](), pool
    for obj in models:
        spec = choose_spec(obj)
        choice = spec if isinstance(spec, str) else _engine_for(obj, spec, attempt, pool)
        if isinstance(choice, str) or isinstance(spec, str):
            left.append(LeftAlone(obj, str(choice)))
        else:
            pool_in_use, engine = choice
            bound.append(Bound(obj, engine, spec))
    return Serving(mode, pool_in_use, tuple(bound), tuple(left), pool is not None)


def _engine_for(
    obj: Any, spec: EngineSpec, attempt: BindingCheck, pool: EnginePool | None
) -> tuple[EnginePool, str] | str:
    """Return a pool and its engine, or the reason why there is none."""
    if pool is None:
        try:
            process_pool, engine = PROCESS.engine_for(spec)
        except TeolaError as error:
            return _first_line(error)
        pool, names = process_pool, [engine]
    else:
        names = [name for name in pool.engine_names if spec.is_kind_of(pool.engine(name))]
    reason = f"the pool has no {spec.source_line()}"
    for name in names:
        try:
            attempt(obj, name, pool)
        except RegistrationError as error:
            reason = _first_line(error)
        else:
            return pool, name
    return reason


def _first_line(error: TeolaError) -> str:
    return str(error).partition("\n")[0].rstrip(".")


# ------------------------------------------------------------ in words


def served_text(serving: Serving) -> str:
    """Say which models engines serve, which stay as they are and why, and which lines do the same by hand."""
    lines = [f"{_title(one.obj)}: engine {one.engine!r}, {one.spec.location()}" for one in serving.bound]
    lines += [f"{_title(one.obj)}: left as it is, since {one.reason}" for one in serving.left]
    if not lines:
        return "No models were found."
    if serving.bound:
        lines += ["", "By hand:", *(f"    {line}" for line in _equivalent_lines(serving))]
    return "\n".join(lines)


def report_with_rules(
    report: PlanReport, serving: Serving | None, rules: RoutingRules | None, gate: PrefetchGate | None = None
) -> PlanReport:
    """Return the report of an object with what `engines=`, `prompt_cache=` and `prices=` did, if it has these options.

    They make the last sections of `explain()`. `gate`: says whether the calls are prefetched at present.
    """
    if gate is not None and gate.is_closed and report.prefetched:
        calls = tuple(switched_off(report.calls, Reason.NO_WAIT))
        expect = f"no gain: {Reason.NO_WAIT.text}; they are prefetched once they take longer"
        report = replace(report, prefetched=(), expect=expect, calls=calls, advice=())
    title = "" if serving is None else f'Served (engines="{serving.mode}")'
    text = "" if serving is None else f"\n\n{title}\n{'-' * len(title)}\n{served_text(serving)}"
    text += prompt_cache_section(None if rules is None else rules.prompt_cache)
    cost = None if rules is None or rules.meter is None else rules.meter.cost()
    if cost is not None:
        title = "Cost" if cost.queries == 1 else f"Cost of a query, the mean of the last {cost.queries}"
        text += f"\n\n{title}\n{'-' * len(title)}\n{cost.text()}"
    return replace(report, engines_text=text, cost=cost)


def _title(obj: Any) -> str:
    name = next((value for key in ("model_name", "model") if isinstance(value := getattr(obj, key, None), str)), "")
    return f"{type(obj).__name__} {name!r}" if name else type(obj).__name__


def _equivalent_lines(serving: Serving) -> list[str]:
    """Return the lines of Python by which the user would get the same engines and bindings without `engines=`.

    For `explain()` and other reports. Without a pool of the user's own, the lines start one.
    """
    engine_lines = {one.engine: one.spec.source_line() for one in serving.bound}
    pool = [f"    {name!r}: {line}," for name, line in engine_lines.items()]
    start = [] if serving.has_own_pool else ["pool = EnginePool.local({", *pool, "}).start()"]
    names = _names([one.obj for one in serving.bound])
    pairs = ", ".join(f"({name}, {one.engine!r})" for name, one in zip(names, serving.bound, strict=True))
    return [*start, f"accelerate(..., pool=pool, bind=[{pairs}])"]


def _names(objects: Sequence[Any]) -> list[str]:
    """Return a name of a variable for each object: `chat_openai`, `chat_openai2`."""
    variables: list[str] = []
    for obj in objects:
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(obj).__name__).lower()
        count = sum(re.fullmatch(rf"{name}\d*", one) is not None for one in variables)
        variables.append(f"{name}{count + 1}" if count else name)
    return variables


_lock = ForkedLock()


class OwnPool(EnginePool):
    """A pool without engines. One serves all objects of a framework in the process that have no pool."""

    @property
    def profiles(self) -> Mapping[str, EngineProfile]:
        """Return no profiles: passes leave unknown engines alone."""
        return {}

    def forked(self) -> None:
        """Begin anew in a child process, with its first query; the user's objects are there, too."""
        super().forked()
        self._started = False
        self.runtime.renew()

    def running_now(self) -> None:
        """Start the loop, which runs until the process ends. Raise `EngineUnavailable` if that fails."""
        with _lock.lock:
            if not self._started:
                self.start()
                atexit.unregister(self.close)  # of a parent process
                atexit.register(self.close)


_watching: list[OwnPool] = []


def watching_pool() -> OwnPool:
    """Return the process's pool without engines, in which queries are traced. Raise `EngineUnavailable` if it fails."""
    with _lock.lock:
        if not _watching:
            _watching.append(OwnPool(LocalRuntime({}), {}, ()))
    _watching[0].running_now()
    return _watching[0]
