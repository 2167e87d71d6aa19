"""Records one call of a program with everything observable, and compares two of them.

It can also tell whether the original differs from itself.
"""

from __future__ import annotations

import asyncio
import copy
import gc
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from differential.cookbook.compare import anonymous
from differential.recording import Recorder, plain
from generated.own_objects import OWN
from generated.words import base, run_text
from generated.worlds import Latency, World, world_of
from langchain_core.runnables import Runnable
from support.request_counts import RequestCounts

from teola_plugin import accelerate
from teola_plugin.engines.base import Engine
from teola_plugin.runtime.virtual_time import run_virtual

Chain = Runnable[Any, Any]


def _pairs(found: Iterable[tuple[int, Any]]) -> str:
    return str(sorted(f"{index}: {plain(value)}" for index, value in found))


def _twice(given: Any) -> list[Any]:
    return [given, {**copy.deepcopy(given), "question": f"{given['question']} And why?"}]


SYNC: dict[str, Callable[[Chain, Any, Any], Any]] = {
    "invoke": lambda chain, given, config: chain.invoke(given, config),
    "batch": lambda chain, given, config: chain.batch(_twice(given), config),
    "stream": lambda chain, given, config: list(chain.stream(given, config)),
    "transform": lambda chain, given, config: list(chain.transform(iter([given]), config)),
    "batch_as_completed": lambda chain, given, config: _pairs(chain.batch_as_completed(_twice(given), config)),
}


async def _one(given: Any) -> AsyncIterator[Any]:
    yield given


async def _abatch(chain: Chain, given: Any, config: Any) -> Any:
    return await chain.abatch(_twice(given), config)


async def _astream(chain: Chain, given: Any, config: Any) -> list[Any]:
    return [chunk async for chunk in chain.astream(given, config)]


async def _atransform(chain: Chain, given: Any, config: Any) -> list[Any]:
    return [chunk async for chunk in chain.atransform(_one(given), config)]


async def _as_completed(chain: Chain, given: Any, config: Any) -> str:
    return _pairs([found async for found in chain.abatch_as_completed(_twice(given), config)])


async def _events(chain: Chain, given: Any, config: Any) -> str:
    seen = [e async for e in chain.astream_events(given, config, version="v2")]
    return str(sorted(f"{e['event']} {e['name']} {e['tags']} {len(e['parent_ids'])} {plain(e['data'])}" for e in seen))


ASYNC: dict[str, Callable[[Chain, Any, Any], Coroutine[Any, Any, Any]]] = {
    "ainvoke": lambda chain, given, config: chain.ainvoke(given, config),
    "abatch": _abatch,
    "astream": _astream,
    "atransform": _atransform,
    "abatch_as_completed": _as_completed,
    "astream_events": _events,
}
WAYS = (*SYNC, *ASYNC)


@dataclass(frozen=True, slots=True)
class Program:
    """A text that sets `chain` and `given`, and how it is called."""

    seed: int
    text: str
    way: str
    config: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)
    """Of `accelerate`."""

    def __str__(self) -> str:
        return f"# seed {self.seed}: {self.way}, config {self.config}, accelerate {self.options}\n{self.text}"


@dataclass(frozen=True, slots=True)
class Seen:
    result: str
    failed: bool
    events: Counter[str]
    counts: RequestCounts
    rows: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Stage:
    """Where programs run: engines, names beyond the framework's, and the rows of the stores."""

    engines: Callable[[Latency], list[Engine]]
    words: Callable[[World, dict[str, Any]], dict[str, Any]]
    rows: Callable[[World], list[str]]
    first: Callable[[World], Coroutine[Any, Any, None]]
    aside: Callable[[], Any] = lambda: None
    virtual: bool = True
    """Whether async entries run in virtual time, where latencies are exact."""

    def see(self, program: Program, latency: Latency, *, fast: bool) -> Seen:
        """Make one call on a new pool. Return everything observable about it."""
        aside, virtual = self.aside(), self.virtual and program.way in ASYNC
        sight = _Sight(program, Recorder())
        if virtual:
            run_virtual(self._aseen(sight, latency, aside, fast=fast))
        else:
            self._seen(sight, latency, aside, fast=fast)
        world, events = sight.world, _anonymous(sight.recorder.events)
        return Seen(anonymous(sight.result), sight.failed, events, world.counts.copy(), tuple(self.rows(world)))

    def _seen(self, sight: _Sight, latency: Latency, aside: Any, *, fast: bool) -> None:
        world = sight.world = world_of(self.engines(latency), aside, scale=latency.scale)
        with world.pool as pool:
            pool.runtime.loop.run(self.first(world)).result(30)
            chain, given = self._made(sight, fast)
            way, config = sight.program.way, sight.config
            with sight.looking():
                if way in SYNC:
                    sight.shows(SYNC[way](chain, given, config))
                else:
                    sight.shows(asyncio.run(ASYNC[way](chain, given, config)))

    async def _aseen(self, sight: _Sight, latency: Latency, aside: Any, *, fast: bool) -> None:
        world = sight.world = world_of(self.engines(latency), aside, scale=latency.scale, virtual=True)
        async with world.pool:
            await self.first(world)
            chain, given = self._made(sight, fast)
            with sight.looking():
                sight.shows(await ASYNC[sight.program.way](chain, given, sight.config))

    def _made(self, sight: _Sight, fast: bool) -> tuple[Chain, Any]:
        world, program = sight.world, sight.program
        names = base(world)
        names |= self.words(world, names)
        accelerated = partial(accelerate, pool=world.pool, **program.options)
        names["nested"] = accelerated if fast else _unchanged
        run_text(program.text, names, f"<program {program.seed}>")
        chain = accelerated(names["chain"]) if fast else names["chain"]
        world.counts.clear()
        return chain, names["given"]


def _unchanged(part: Any) -> Any:
    """Return a part as it is: an accelerated one is of its class, so LangChain treats both alike."""
    return part


class _Sight:
    """Observes one call."""

    world: World

    def __init__(self, program: Program, recorder: Recorder) -> None:
        self.program, self.recorder = program, recorder
        self.result, self.failed = "", False
        tags, metadata = program.config.get("tags", ["mine"]), program.config.get("metadata", {"user": 7})
        self.config = {**program.config, "callbacks": [recorder], "tags": tags, "metadata": metadata}

    def shows(self, value: Any) -> None:
        raced = "stream" in self.program.way or "transform" in self.program.way
        raced = raced and isinstance(value, list) and any(isinstance(chunk, dict) for chunk in value)
        self.result = str(sorted(map(plain, value))) if raced else plain(value)  # branches stream in a race

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Record an exception as a result, and close generators that were not read to their end."""
        try:
            yield
        except Exception as error:
            self.result, self.failed = f"{type(error).__name__}{plain(list(error.args))} {error}", True
        gc.collect()


def _anonymous(events: Counter[Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for event, n in events.items():
        found[anonymous(str(event))] += n
    return found


def differences(before: Seen, after: Seen, *, early: bool = True, spare: bool = False) -> dict[str, str]:
    """Return the differences of two calls, by aspect.

    With `early`, the second call may have made more engine requests than it used, and equal work once, but no other
    writes. With `spare`, it may have called the user's own models more often.
    """
    found = {}
    if before.result != after.result:
        found["result"] = f"{before.result}\n     then: {after.result}"
    if before.rows != after.rows:
        found["rows"] = _difference(Counter(before.rows), Counter(after.rows))
    if before.events != after.events:
        found["events"] = _difference(before.events, after.events)
    old, new = before.counts, after.counts
    if old.original_requests != new.original_requests:
        found["original_requests"] = _difference(old.original_requests, new.original_requests)
    if old.side_effects - new.side_effects or any(
        not (spare and key.startswith(OWN)) for key in new.side_effects - old.side_effects
    ):
        found["side_effects"] = _difference(old.side_effects, new.side_effects)
    if old.missing(new) or (not early and old.engine_requests != new.engine_requests):
        found["engine_requests"] = _difference(old.engine_requests, new.engine_requests)
    if old.writes != new.writes:
        found["writes"] = _difference(old.writes, new.writes)
    return found


def _difference(old: Counter[str], new: Counter[str]) -> str:
    return f"missing {_listed(old - new)}, more {_listed(new - old)}"


def _listed(some: Iterable[str]) -> str:
    return "".join(f"\n       {str(each)[:300]}" for each in some) or "nothing"


_HOW_FAR = ("events", "original_requests", "engine_requests", "side_effects")


def _raced_by_failures(way: str, *, both: bool) -> tuple[str, ...]:
    """Aspects that are a race once something has failed, by how far the rest of a stream or of a batch got.

    A stream that fails ends for one of its readers with the error, and for the others as if it were complete: so the
    error that is raised may be that of a reader that misses something. `both`: plain and accelerated have failed.
    """
    if way.endswith("as_completed"):
        return (*_HOW_FAR, "result")
    if "stream" in way or "transform" in way:
        return (*_HOW_FAR, "rows", "writes", *(("result",) if both else ()))
    return () if way in ("invoke", "ainvoke") else _HOW_FAR


CONTROLS: tuple[tuple[int, float, tuple[str, ...]], ...] = (
    (1, 1.0, ()),
    (0, 0.0, ()),
    (0, 1.0, ("llm",)),
    (0, 1.0, ("embedder", "store", "reranker")),
    (0, 1.0, ("llm", "embedder", "store", "reranker")),
    (2, 3.0, ()),
    (3, 1.0, ()),
)
"""Other latencies: seeds, scales, and what answers at once. What depends on them is a race of the plain object."""


def compared(stage: Stage, program: Program) -> dict[str, str]:
    """Return the differences between the original and the accelerated object, by aspect.

    Aspects in which the original differs from itself at other latencies are left out. After a failed model, or with
    `speculate="all"`, the user's own models may have been called more often.
    """
    latency = Latency(program.seed)
    before = stage.see(program, latency, fast=False)
    spare = before.counts.poisoned_calls > 0 or program.options.get("speculate") == "all"
    after = stage.see(program, latency, fast=True)
    found = differences(before, after, spare=spare)
    if before.failed:
        raced = _raced_by_failures(program.way, both=after.failed)
        found = {aspect: text for aspect, text in found.items() if aspect not in raced}
    for seed, scale, at_once in CONTROLS if found else ():
        again = stage.see(program, Latency(program.seed + seed, scale, at_once), fast=False)
        unsteady = differences(before, again, early=False)
        found = {aspect: text for aspect, text in found.items() if aspect not in unsteady}
        if not found:
            break
    return found
