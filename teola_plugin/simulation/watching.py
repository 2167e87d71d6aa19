"""One query, watched on its way through a pool: what it asks of engines, gives up and changes, and after what."""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from teola_plugin.engines.base import Engine
from teola_plugin.graph import Batching
from teola_plugin.passes import DEFAULT_PASSES, resolve_passes
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate, IngestRow, Warmup
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Piece, Result
from teola_plugin.runtime.engine_requests.engine_request import EngineRequest
from teola_plugin.runtime.local import LocalRuntime
from teola_plugin.runtime.loop_thread import SameLoop
from teola_plugin.runtime.ports.engine_port import EnginePort
from teola_plugin.runtime.ports.port import PortListener
from teola_plugin.scheduling.engine_events import DepthChanged, Enqueue
from teola_plugin.simulation.cluster import Cluster
from teola_plugin.simulation.flows import END
from teola_plugin.simulation.run import Make

Key = tuple[Any, ...]
"""What is asked for, the same in every run: engine, form, texts, and the how-manieth alike."""
Act = tuple[Any, ...]
"""Something that the query does: ("ask", key), ("leave", key), ("change", key, number) or ("answer",)."""
QUICK, SLOW = 1e-3, 1.0
"""Speed of the engines where one work is held up, times their own; seconds from each token of that work to the next."""


@dataclass(slots=True, repr=False)
class Asked:
    """One primitive, or one call of the plain object, as its engine's queue got it."""

    key: Key
    event: Enqueue
    works: list[EngineRequest]
    engine: Engine
    tenant: str
    left: int
    tokens: int = 0
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, repr=False)
class Log:
    """What one run did, in order. With `held`, also after which news of that work it did it."""

    held: Key | None = None
    asked: list[Asked] = field(default_factory=list)
    acts: dict[Act, int] = field(default_factory=dict)
    """The token of `held` that came last before it, or `END`; 0 where nothing of it had come."""
    at: dict[Act, float] = field(default_factory=dict)
    """When."""
    changes: dict[Act, DepthChanged] = field(default_factory=dict)
    wants_blocks: bool = False
    begun: bool = False
    _news: int = 0
    _of: dict[str, Asked] = field(default_factory=dict)
    """By request."""
    _named: dict[str, Asked] = field(default_factory=dict)
    """By primitive."""
    _alike: Counter[Key] = field(default_factory=Counter)

    def act(self, *what: Any) -> None:
        if self.begun and what not in self.acts:
            self.acts[what] = self._news
            self.at[what] = asyncio.get_running_loop().time()

    def ask(self, engine: Engine, works: Sequence[EngineRequest], event: Enqueue) -> None:
        if not self.begun:
            return
        form = (engine.name, type(works[0].request.payload).__name__, *(said(work.request.payload) for work in works))
        self._alike[form] += 1
        found = Asked((*form, self._alike[form]), event, list(works), engine, works[0].request.tenant, len(works))
        self.asked.append(found)
        self._named[event.primitive] = found
        self._of.update(dict.fromkeys((work.request.id for work in works), found))
        self.act("ask", found.key)

    def leave(self, works: Iterable[EngineRequest]) -> None:
        for work in works:
            if (found := self._of.get(work.request.id)) is not None and found.left:
                self.act("leave", found.key)

    def change(self, event: DepthChanged) -> None:
        for name in (*event.depths, *event.objectives):
            if (found := self._named.get(name)) is not None and found.left:
                number = sum(act[:2] == ("change", found.key) for act in self.acts)
                what = ("change", found.key, number)
                self.act(*what)
                self.changes[what] = event

    def holds_up(self, request: Request) -> bool:
        return (found := self._of.get(request.id)) is not None and found.key == self.held

    def piece(self, work: EngineRequest) -> None:
        found = self._of.get(work.request.id)
        if found is not None and len(found.works) == 1:
            found.tokens += 1
            if found.key == self.held:
                self._news = found.tokens

    def ended(self, work: EngineRequest, value: Any, error: BaseException | None) -> None:
        found = self._of.get(work.request.id)
        if found is not None and work.request.id not in found.values:
            found.values[work.request.id] = value
            found.left -= 1
            if not (found.left or error) and found.key == self.held:
                self._news = END


def said(payload: Any) -> int:
    """Its texts; ids of chunks are drawn anew in every run."""
    if isinstance(payload, Generate):
        return hash((payload.prompt.flat(), str(payload.sampling)))
    if isinstance(payload, Warmup):
        return hash(payload.prompt.known_prefix())
    return hash(payload.chunk.text) if isinstance(payload, IngestRow) else hash(str(payload))


async def watched(cluster: Cluster, app: str, make: Make, value: Any, held: Key | None = None) -> Log:
    """One query on idle engines. With `held`, that work takes as long as is needed to see what waits for which of its
    tokens: all others are a thousand times as fast, and hinder nobody."""
    engines, log = cluster.made(), Log(held)
    ports = engines if held is None else _quick(cluster, log)
    runtime = _Runtime(engines, log, ports)
    async with EnginePool(runtime, engines, resolve_passes(DEFAULT_PASSES)) as pool:
        ask: Any = make(pool)
        ask = await ask if inspect.isawaitable(ask) else ask
        await asyncio.sleep(1.0)
        log.begun = True
        with pool.watching(app):
            await ask(value)
        log.act("answer")
    return log


def _quick(cluster: Cluster, log: Log) -> dict[str, list[Any]]:
    quick = {
        name: replace(
            one,
            instances=1,
            profile=replace(
                one.profile.scaled(QUICK),
                batching=Batching.CONTINUOUS,
                max_batch=10**9,
                max_efficient_batch=10**9,
                max_requests=10**9,
                prefix_caching=False,
                interference=0.0,
            ),
        )
        for name, one in cluster.engines.items()
    }
    return {name: [_HeldUp(found[0], log)] for name, found in Cluster(quick).made().items()}


class _HeldUp:
    """An engine that holds up the requests of one work, and no others."""

    def __init__(self, inner: Any, log: Log) -> None:
        self._inner, self._log = inner, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        held = [[request] for request in batch if self._log.holds_up(request)]
        free = [request for request in batch if not self._log.holds_up(request)]
        results: asyncio.Queue[Result] = asyncio.Queue()
        parts = [(part, SLOW) for part in held] + ([(free, 0.0)] if free else [])
        tasks = [asyncio.create_task(self._part(part, results, pause)) for part, pause in parts]
        try:
            left = {request.id for request in batch}
            while left:
                result = await results.get()
                if not isinstance(result, Piece):
                    left.discard(result.request_id)
                yield result
        finally:
            for task in tasks:
                task.cancel()

    async def _part(self, batch: Sequence[Request], results: asyncio.Queue[Result], pause: float) -> None:
        streamed = False
        async for result in self._inner.execute(batch):
            if pause and (isinstance(result, Piece) or not streamed):  # the last token and the end come together
                await asyncio.sleep(pause)
            streamed |= isinstance(result, Piece)
            results.put_nowait(result)


class _Runtime(LocalRuntime):
    """Notes what its ports are asked for and what they tell. `ports`: the engines behind them."""

    def __init__(
        self, engines: Mapping[str, Sequence[Engine]], log: Log, ports: Mapping[str, Sequence[Engine]]
    ) -> None:
        super().__init__(engines, loop=SameLoop())
        self._log, self._behind = log, ports

    def _port_of(self, name: str, instances: Sequence[Engine]) -> EnginePort:
        listener, log = self._listener, self._log

        def piece(work: EngineRequest, piece: Piece) -> None:
            log.piece(work)
            listener.piece(work, piece)

        def ended(work: EngineRequest, value: Any, error: BaseException | None) -> None:
            log.ended(work, value, error)
            listener.ended(work, value, error)

        heard = PortListener(listener.started, piece, ended)
        return _Port(name, {str(number): one for number, one in enumerate(self._behind[name])}, heard, log)


class _Port(EnginePort):
    def __init__(self, name: str, instances: Mapping[str, Engine], listener: PortListener, log: Log) -> None:
        super().__init__(name, instances, listener)
        self._log = log
        log.wants_blocks |= self.scheduler.wants_blocks

    def enqueue(self, entries: Sequence[EngineRequest], event: Enqueue) -> None:
        if entries:
            self._log.ask(self.engine, entries, event)
        super().enqueue(entries, event)

    def cancel(self, entries: Sequence[EngineRequest]) -> None:
        self._log.leave(entries)
        super().cancel(entries)

    def depths(self, event: DepthChanged) -> None:
        self._log.change(event)
        super().depths(event)
