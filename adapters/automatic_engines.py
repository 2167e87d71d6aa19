"""`engines=`: engines that are made by themselves, in one pool for the process, and the models that they serve."""

from __future__ import annotations

import atexit
import os
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from teola_plugin.adapters.engine_specs import EngineSpec, Wanted
from teola_plugin.errors import RegistrationError, TeolaError
from teola_plugin.pool import EnginePool


class ServedPool:
    """Makes each engine once, and keeps it until the process ends."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pool: EnginePool | None = None
        self._specs: dict[str, EngineSpec] = {}

    @property
    def pool(self) -> EnginePool | None:
        """None before the first engine."""
        return self._pool

    def engine_for(self, spec: EngineSpec) -> tuple[EnginePool, str]:
        """The pool, running, and the name of the engine in it. Raises what starting an engine raises."""
        with self._lock:
            pool = self._pool if self._pool is not None and self._pool.running else None
            if pool is None:
                self._specs = {}
            for name in self._specs:
                if pool is not None and spec.is_done_by(pool.engine(name)):
                    return pool, name
            name = self._free(spec.NAME)
            if pool is None:
                pool = EnginePool.local({name: spec.make(name)}).start()
                atexit.register(pool.close)
            else:
                pool.add(spec.make(name))
            self._pool, self._specs[name] = pool, spec
            return pool, name

    def _free(self, name: str) -> str:
        """`llm`, `llm2`, `llm3`, ..."""
        number = sum(name == known.NAME for known in self._specs.values())
        return f"{name}{number + 1}" if number else name

    def forget(self) -> None:
        """In a process that was forked: the pool, and its threads, are the parent's."""
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
    why: str


@dataclass(frozen=True, slots=True)
class Serving:
    """Of one object."""

    mode: str
    """As `engines=` was given."""
    pool: EnginePool | None = None
    bound: tuple[Bound, ...] = ()
    left: tuple[LeftAlone, ...] = ()
    given: bool = False
    """Whether the pool is the user's own."""

    @property
    def bind(self) -> tuple[tuple[Any, str], ...]:
        """As the argument of that name."""
        return tuple((one.obj, one.engine) for one in self.bound)


Try = Callable[[Any, str, EnginePool], Any]
"""Binds one object for a test. Raises `RegistrationError` where `bind=` would."""


def serve(
    models: Iterable[Any], want: Callable[[Any], Wanted], attempt: Try, mode: str, pool: EnginePool | None
) -> Serving:
    """Each model on an engine, of `pool` or, without one, of the process's own; or why it is not.

    What `bind=` would refuse, and an engine that does not start, leaves that one model alone.
    """
    bound, left, used = list[Bound](), list[LeftAlone](), pool
    for obj in models:
        wanted = want(obj)
        found = wanted if isinstance(wanted, str) else _engine_for(obj, wanted, attempt, pool)
        if isinstance(found, str) or isinstance(wanted, str):
            left.append(LeftAlone(obj, str(found)))
        else:
            used, engine = found
            bound.append(Bound(obj, engine, wanted))
    return Serving(mode, used, tuple(bound), tuple(left), pool is not None)


def _engine_for(obj: Any, wanted: EngineSpec, attempt: Try, pool: EnginePool | None) -> tuple[EnginePool, str] | str:
    """A pool and its engine; or why there is none."""
    if pool is None:
        try:
            made, engine = PROCESS.engine_for(wanted)
        except TeolaError as why:
            return _said(why)
        pool, names = made, [engine]
    else:
        names = [name for name in pool.engine_names if wanted.may_be(pool.engine(name))]
    said = f"the pool has no {wanted.written()}"
    for name in names:
        try:
            attempt(obj, name, pool)
        except RegistrationError as why:
            said = _said(why)
        else:
            return pool, name
    return said


def _said(error: TeolaError) -> str:
    return str(error).partition("\n")[0].rstrip(".")


# ------------------------------------------------------------ in words


def served_text(serving: Serving) -> str:
    """Which models engines serve, which stay as they are and why, and the lines that do the same by hand."""
    lines = [f"{_title(one.obj)}: engine {one.engine!r}, {one.spec.place()}" for one in serving.bound]
    lines += [f"{_title(one.obj)}: left as it is, since {one.why}" for one in serving.left]
    if not lines:
        return "No models were found."
    if serving.bound:
        lines += ["", "By hand:", *(f"    {line}" for line in _by_hand(serving))]
    return "\n".join(lines)


def served_section(serving: Serving | None) -> str:
    """The same as the last section of what `explain()` says; empty without `engines=`."""
    title = "" if serving is None else f'Served (engines="{serving.mode}")'
    return "" if serving is None else f"\n\n{title}\n{'-' * len(title)}\n{served_text(serving)}"


def _title(obj: Any) -> str:
    name = next((value for key in ("model_name", "model") if isinstance(value := getattr(obj, key, None), str)), "")
    return f"{type(obj).__name__} {name!r}" if name else type(obj).__name__


def _by_hand(serving: Serving) -> list[str]:
    made = {one.engine: one.spec.written() for one in serving.bound}
    pool = [f"    {name!r}: {line}," for name, line in made.items()]
    start = [] if serving.given else ["pool = EnginePool.local({", *pool, "}).start()"]
    names = _names([one.obj for one in serving.bound])
    pairs = ", ".join(f"({name}, {one.engine!r})" for name, one in zip(names, serving.bound, strict=True))
    return [*start, f"accelerate(..., pool=pool, bind=[{pairs}])"]


def _names(objects: Sequence[Any]) -> list[str]:
    """A variable for each: `chat_openai`, `chat_openai2`."""
    found: list[str] = []
    for obj in objects:
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", type(obj).__name__).lower()
        count = sum(re.fullmatch(rf"{name}\d*", one) is not None for one in found)
        found.append(f"{name}{count + 1}" if count else name)
    return found
