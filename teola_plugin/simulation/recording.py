"""The flow of an app's query, found by watching it: which engine work it asks for, and what each piece waits for.

One run on an idle cluster says what is asked for. What each work waits for shows when the engines take random times
instead: it is asked for in the very instant in which the last of those things happens, and over several runs each of
them is the last once. Nothing of the app is read; a plain object and an accelerated one are watched alike.

What a flow cannot tell: that an app asks for other things at load than alone (what it gives up, or begins early,
because an engine is busy). `run.simulate` runs the app itself; a test compares both.
"""

from __future__ import annotations

import asyncio
import inspect
import random
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from teola_plugin.engines.base import Engine
from teola_plugin.engines.fake import split_tokens
from teola_plugin.engines.fake.llm import PrefixCache
from teola_plugin.engines.profiles import noop
from teola_plugin.errors import TeolaError
from teola_plugin.graph import Batching, EngineProfile
from teola_plugin.graph.prefix_blocks import block_hashes
from teola_plugin.passes import DEFAULT_PASSES, resolve_passes
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate, Generation, IngestRow, Warmup
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Piece, Result
from teola_plugin.runtime.local import LocalRuntime
from teola_plugin.runtime.loop_thread import SameLoop
from teola_plugin.runtime.ports.engine_port import EnginePort
from teola_plugin.runtime.ports.port import PortListener
from teola_plugin.runtime.virtual_time import run_virtual
from teola_plugin.runtime.works.identities import Party
from teola_plugin.runtime.works.work import Work
from teola_plugin.scheduling.engine_events import Enqueue
from teola_plugin.simulation.cluster import Cluster
from teola_plugin.simulation.flows import END, After, Flow, FlowRequest, FlowWork
from teola_plugin.simulation.run import Make

RUNS = 8
"""Watched with engines of random times."""
Key = tuple[Any, ...]
"""What is asked for, the same in every run: engine, form, texts, and the how-manieth alike."""


def record(cluster: Cluster, app: str, make: Make, value: Any, *, runs: int = RUNS, seed: int = 0) -> Flow:
    """The flow of one query that is asked with this value. Raises `TeolaError` where the app fails."""
    alone = run_virtual(_watched(cluster, app, make, value, None), seed, inline=True)
    shaken = [
        run_virtual(_watched(cluster, app, make, value, random.Random(f"{seed} {number}")), seed, inline=True)
        for number in range(runs)
    ]
    return _flow(alone, shaken)


# ------------------------------------------------------------ one run


@dataclass(slots=True)
class _Asked:
    key: Key
    event: Enqueue
    works: list[Work]
    engine: Engine
    tenant: str
    after: frozenset[tuple[Key, int]]
    left: int
    tokens: int = 0
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class _Log:
    """What one run asked for, in order, and what had just happened each time."""

    asked: list[_Asked] = field(default_factory=list)
    end: frozenset[tuple[Key, int]] = frozenset()
    wants_blocks: bool = False
    _of: dict[str, _Asked] = field(default_factory=dict)
    """By request."""
    _news: set[tuple[Key, int]] = field(default_factory=set)
    _at: float = -1.0
    _alike: Counter[Key] = field(default_factory=Counter)

    def note(self, key: Key, token: int) -> None:
        now = asyncio.get_running_loop().time()
        if now != self._at:
            self._news, self._at = set(), now
        self._news.add((key, token))

    def just(self) -> frozenset[tuple[Key, int]]:
        """What has happened in this instant; ends say more than the tokens that came with them."""
        if not self.asked or asyncio.get_running_loop().time() == 0.0:
            return frozenset()
        ends = {key for key, token in self._news if token == END}
        return frozenset(one for one in self._news if one[1] == END or one[0] not in ends)

    def ask(self, engine: Engine, works: Sequence[Work], event: Enqueue) -> None:
        form = (engine.name, type(works[0].request.payload).__name__, *(_said(work.request.payload) for work in works))
        self._alike[form] += 1
        key = (*form, self._alike[form])
        tenant = works[0].request.tenant
        found = _Asked(key, event, list(works), engine, tenant, self.just(), len(works))
        self.asked.append(found)
        self._of.update(dict.fromkeys((work.request.id for work in works), found))

    def piece(self, work: Work) -> None:
        if (asked := self._of.get(work.request.id)) is not None:
            asked.tokens += 1
            self.note(asked.key, asked.tokens)

    def ended(self, work: Work, value: Any) -> None:
        if (asked := self._of.get(work.request.id)) is not None and work.request.id not in asked.values:
            asked.values[work.request.id] = value
            asked.left -= 1
            if not asked.left:
                self.note(asked.key, END)


def _said(payload: Any) -> int:
    """Its texts; ids of chunks are drawn anew in every run."""
    if isinstance(payload, Generate):
        return hash((payload.prompt.flat(), str(payload.sampling)))
    if isinstance(payload, Warmup):
        return hash(payload.prompt.known())
    return hash(payload.chunk.text) if isinstance(payload, IngestRow) else hash(str(payload))


class _Runtime(LocalRuntime):
    """Notes what its ports are asked for and what they tell; with `shaken`, its engines take random times."""

    def __init__(self, engines: Mapping[str, Sequence[Engine]], log: _Log, shaken: Mapping[str, Engine] | None) -> None:
        super().__init__(engines, loop=SameLoop())
        self._log, self._shaken = log, shaken

    def _port_of(self, name: str, instances: Sequence[Engine]) -> EnginePort:
        listener, log = self._listener, self._log

        def piece(work: Work, piece: Piece) -> None:
            log.piece(work)
            listener.piece(work, piece)

        def ended(work: Work, value: Any, error: BaseException | None) -> None:
            log.ended(work, value)
            listener.ended(work, value, error)

        heard = PortListener(listener.started, piece, ended)
        given = instances if self._shaken is None else [self._shaken[name]]
        return _Port(name, {str(number): one for number, one in enumerate(given)}, heard, log)


class _Port(EnginePort):
    def __init__(self, name: str, instances: Mapping[str, Engine], listener: PortListener, log: _Log) -> None:
        super().__init__(name, instances, listener)
        self._log = log
        log.wants_blocks |= self.scheduler.wants_blocks

    def enqueue(self, entries: Sequence[Work], event: Enqueue) -> None:
        if entries:
            self._log.ask(self.engine, entries, event)
        super().enqueue(entries, event)


class _Shaken:
    """An engine that takes every batch at once, each for a time of its own, and each token as well."""

    def __init__(self, inner: Any, profile: EngineProfile, rng: random.Random) -> None:
        self._inner, self._rng = inner, rng
        self.profile = replace(
            profile,
            batching=Batching.CONTINUOUS,
            max_batch=10**9,
            max_efficient_batch=10**9,
            max_requests=10**9,
            prefix_caching=False,
            interference=0.0,
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        results = [result async for result in self._inner.execute(batch)]
        await asyncio.sleep(self._rng.uniform(0.5, 2.0))
        for result in results:
            if isinstance(result, Piece):
                await asyncio.sleep(self._rng.uniform(0.005, 0.02))
            yield result


async def _watched(cluster: Cluster, app: str, make: Make, value: Any, rng: random.Random | None) -> _Log:
    engines, log, shaken = cluster.made(), _Log(), None
    if rng is not None:
        at_once = Cluster({name: replace(one, profile=noop()[one.like]) for name, one in cluster.engines.items()})
        inner = at_once.made()
        profiles = {name: one.profile for name, one in cluster.engines.items()}
        shaken = {name: _Shaken(found[0], profiles[name], rng) for name, found in inner.items()}
    runtime = _Runtime(engines, log, shaken)  # type: ignore[arg-type]
    async with EnginePool(runtime, engines, resolve_passes(DEFAULT_PASSES)) as pool:
        ask: Any = make(pool)
        ask = await ask if inspect.isawaitable(ask) else ask
        log.asked.clear()
        await asyncio.sleep(1.0)
        with pool.watching(app):
            await ask(value)
        log.end = log.just()
    return log


# ------------------------------------------------------------ putting runs together


def _flow(alone: _Log, shaken: Sequence[_Log]) -> Flow:
    places = {asked.key: number for number, asked in enumerate(alone.asked)}
    after: dict[Key, set[tuple[Key, int]]] = {}
    for log in shaken:
        for asked in log.asked:
            after.setdefault(asked.key, set()).update(asked.after)

    def known(number: int, news: set[tuple[Key, int]] | frozenset[tuple[Key, int]]) -> tuple[After, ...]:
        """Only what came before in the run that counts: no work waits for a later one."""
        found = {(places[key], token) for key, token in news if key in places}
        return tuple(sorted(one for one in found if one[0] < number))

    works = tuple(
        _work(asked, known(number, after.get(asked.key) or asked.after), blocks=alone.wants_blocks)
        for number, asked in enumerate(alone.asked)
    )
    ends = set().union(*(log.end for log in shaken))
    if not works or not ends:
        raise TeolaError("the app asked no engine of the cluster for anything.", hint="make it of the pool's objects")
    return Flow(works, known(len(works), ends))


def _work(asked: _Asked, after: tuple[After, ...], *, blocks: bool) -> FlowWork:
    event = asked.event
    return FlowWork(
        asked.engine.name,
        event.kind,
        tuple(_request(asked, work, blocks=blocks) for work in asked.works),
        after,
        asked.works[0].by is Party.EARLY,
        event.depth,
        event.objective,
        event.gang.partition("/")[2],
        event.session.partition("/")[2],
        event.when_idle,
        event.remaining,
    )


_names = PrefixCache(1)


def _request(asked: _Asked, work: Work, *, blocks: bool) -> FlowRequest:
    size, payload = asked.engine.size(work.request), work.request.payload
    if not isinstance(payload, Generate | Warmup):
        return FlowRequest(size)
    text = payload.prompt.known() if isinstance(payload, Warmup) else payload.prompt.flat()
    tokens = split_tokens(text)
    value = asked.values.get(work.request.id)
    output = value.completion_tokens if isinstance(value, Generation) else 0
    named = block_hashes(payload.prompt.known(), tenant=asked.tenant) if blocks else ()
    return FlowRequest(size, len(tokens), output, _names.keys(tokens, asked.tenant), named)
