"""The flow of an app's query, found by watching it: its engine work, and what each piece waits for.

One run on an idle cluster shows what is requested, given up and changed. What each of these waits for is found by
delaying one work after the other, and nothing else: whatever then does not happen before one of its tokens, or its end,
waits for that. Nothing is inferred from the order in which things happen. The app's code is not read; an original and
an accelerated app are watched alike.

A flow cannot show that an app makes other requests under load than alone, or that it goes on with whichever of several
results is first. `run.simulate` runs the app itself; a test compares both.
"""

from __future__ import annotations

import asyncio
import inspect
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from teola_plugin.engines.base import Engine
from teola_plugin.engines.fake import split_tokens
from teola_plugin.engines.fake.llm import PrefixCache
from teola_plugin.errors import TeolaError
from teola_plugin.graph import Batching
from teola_plugin.graph.prefix_blocks import block_hashes
from teola_plugin.passes import DEFAULT_PASSES, resolve_passes
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate, Generation, IngestRow, Piece, Request, Result, Warmup
from teola_plugin.runtime.claims import Caller
from teola_plugin.runtime.engine_requests import EngineRequest
from teola_plugin.runtime.local import LocalRuntime
from teola_plugin.runtime.loop_thread import SameLoop
from teola_plugin.runtime.ports.engine_port import EnginePort
from teola_plugin.runtime.ports.port import PortListener
from teola_plugin.runtime.virtual_time import run_virtual
from teola_plugin.scheduling.engine_queue import DepthChanged, Enqueue
from teola_plugin.simulation.cluster import Cluster
from teola_plugin.simulation.flows import END, After, Flow, FlowChange, FlowRequest, FlowWork
from teola_plugin.simulation.run import Make

# ------------------------------------------------------------ watching one query

Key = tuple[Any, ...]
"""Names a work, the same in every run: engine, form, texts, and its number among equal ones."""
Action = tuple[Any, ...]
"""An action of the query: ("ask", key), ("leave", key), ("change", key, number) or ("answer",)."""
SPEED_FACTOR, TOKEN_DELAY_S = 1e-3, 1.0
"""Factor on the times of all engines while one work is delayed; seconds from each token of that work to the next."""


@dataclass(slots=True, repr=False)
class RecordedWork:
    """One primitive, or one call of the original, as its engine's queue got it."""

    key: Key
    event: Enqueue
    works: list[EngineRequest]
    engine: Engine
    tenant: str
    unfinished: int
    tokens: int = 0
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True, repr=False)
class Log:
    """The actions of one run, in order. With `delayed_key`, also the last token of that work before each."""

    delayed_key: Key | None = None
    works_in_order: list[RecordedWork] = field(default_factory=list)
    actions: dict[Action, int] = field(default_factory=dict)
    """By action: the token of the delayed work that came last before it, or `END`; 0 if none had come."""
    at: dict[Action, float] = field(default_factory=dict)
    """When each action happened."""
    changes: dict[Action, DepthChanged] = field(default_factory=dict)
    wants_blocks: bool = False
    is_recording: bool = False
    _last_token: int = 0
    _by_request: dict[str, RecordedWork] = field(default_factory=dict)
    """Works by request id."""
    _by_primitive: dict[str, RecordedWork] = field(default_factory=dict)
    """Works by primitive."""
    _counts: Counter[Key] = field(default_factory=Counter)

    def act(self, *action: Any) -> None:
        if self.is_recording and action not in self.actions:
            self.actions[action] = self._last_token
            self.at[action] = asyncio.get_running_loop().time()

    def ask(self, engine: Engine, works: Sequence[EngineRequest], event: Enqueue) -> None:
        """Record a work that an engine's queue gets, under a key that is the same in every run."""
        if not self.is_recording:
            return
        form = (
            engine.name,
            type(works[0].request.payload).__name__,
            *(payload_hash(work.request.payload) for work in works),
        )
        self._counts[form] += 1
        recorded = RecordedWork(
            (*form, self._counts[form]), event, list(works), engine, works[0].request.tenant, len(works)
        )
        self.works_in_order.append(recorded)
        self._by_primitive[event.primitive] = recorded
        self._by_request.update(dict.fromkeys((work.request.id for work in works), recorded))
        self.act("ask", recorded.key)

    def leave(self, works: Iterable[EngineRequest]) -> None:
        for work in works:
            if (recorded := self._by_request.get(work.request.id)) is not None and recorded.unfinished:
                self.act("leave", recorded.key)

    def change(self, event: DepthChanged) -> None:
        """Record that depths or objectives change, for each work concerned that has not ended."""
        for name in (*event.depths, *event.objectives):
            if (recorded := self._by_primitive.get(name)) is not None and recorded.unfinished:
                number = sum(act[:2] == ("change", recorded.key) for act in self.actions)
                action = ("change", recorded.key, number)
                self.act(*action)
                self.changes[action] = event

    def is_delayed(self, request: Request) -> bool:
        return (recorded := self._by_request.get(request.id)) is not None and recorded.key == self.delayed_key

    def piece(self, work: EngineRequest) -> None:
        """Count a token of a work with one request. If it is the delayed work, later actions come after this token."""
        recorded = self._by_request.get(work.request.id)
        if recorded is not None and len(recorded.works) == 1:
            recorded.tokens += 1
            if recorded.key == self.delayed_key:
                self._last_token = recorded.tokens

    def end_request(self, work: EngineRequest, value: Any, error: BaseException | None) -> None:
        """Record the value of a request. If the delayed work ends with it, later actions come after that end."""
        recorded = self._by_request.get(work.request.id)
        if recorded is not None and work.request.id not in recorded.values:
            recorded.values[work.request.id] = value
            recorded.unfinished -= 1
            if not (recorded.unfinished or error) and recorded.key == self.delayed_key:
                self._last_token = END


def payload_hash(payload: Any) -> int:
    """Return a hash of the payload's texts; ids of chunks are drawn anew in every run."""
    if isinstance(payload, Generate):
        return hash((payload.prompt.flat(), str(payload.sampling)))
    if isinstance(payload, Warmup):
        return hash(payload.prompt.known_prefix())
    return hash(payload.chunk.text) if isinstance(payload, IngestRow) else hash(str(payload))


async def watch_query(cluster: Cluster, app: str, make: Make, value: Any, delayed_key: Key | None = None) -> Log:
    """Run one query on idle engines and return the log.

    With `delayed_key`, that work takes as long as is needed to see what waits for which of its tokens: all others are a
    thousand times as fast, and delay nobody.
    """
    engines, log = cluster.make_engines(), Log(delayed_key)
    ports = engines if delayed_key is None else _fast_engines(cluster, log)
    runtime = _Runtime(engines, log, ports)
    async with EnginePool(runtime, engines, resolve_passes(DEFAULT_PASSES)) as pool:
        call: Any = make(pool)
        call = await call if inspect.isawaitable(call) else call
        await asyncio.sleep(1.0)
        log.is_recording = True
        with pool.watching(app):
            await call(value)
        log.act("answer")
    return log


def _fast_engines(cluster: Cluster, log: Log) -> dict[str, list[Any]]:
    """Return one replica of each engine, a thousand times as fast and without limits, that delays the log's work."""
    fast = {
        name: replace(
            engine,
            replicas=1,
            profile=replace(
                engine.profile.scaled(SPEED_FACTOR),
                batching=Batching.CONTINUOUS,
                max_batch=10**9,
                max_efficient_batch=10**9,
                max_requests=10**9,
                prefix_caching=False,
                interference=0.0,
            ),
        )
        for name, engine in cluster.engines.items()
    }
    return {name: [_DelayingEngine(replicas[0], log)] for name, replicas in Cluster(fast).make_engines().items()}


class _DelayingEngine:
    """An engine that delays the requests of one work, and no others."""

    def __init__(self, inner: Any, log: Log) -> None:
        self._inner, self._log = inner, log

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        """Execute a batch: requests of the delayed work slowly, each by itself, and all others together at once."""
        delayed = [[request] for request in batch if self._log.is_delayed(request)]
        undelayed = [request for request in batch if not self._log.is_delayed(request)]
        results: asyncio.Queue[Result] = asyncio.Queue()
        parts = [(part, TOKEN_DELAY_S) for part in delayed] + ([(undelayed, 0.0)] if undelayed else [])
        tasks = [asyncio.create_task(self._part(part, results, pause)) for part, pause in parts]
        try:
            unfinished = {request.id for request in batch}
            while unfinished:
                result = await results.get()
                if not isinstance(result, Piece):
                    unfinished.discard(result.request_id)
                yield result
        finally:
            for task in tasks:
                task.cancel()

    async def _part(self, batch: Sequence[Request], results: asyncio.Queue[Result], pause: float) -> None:
        """Execute a part of a batch, and put its results into a queue, with `pause` seconds before each token."""
        streamed = False
        async for result in self._inner.execute(batch):
            if pause and (isinstance(result, Piece) or not streamed):  # the last token and the end come together
                await asyncio.sleep(pause)
            streamed |= isinstance(result, Piece)
            results.put_nowait(result)


class _Runtime(LocalRuntime):
    """Logs the requests of its ports and the events of these. `ports` are the engines behind them."""

    def __init__(
        self, engines: Mapping[str, Sequence[Engine]], log: Log, ports: Mapping[str, Sequence[Engine]]
    ) -> None:
        super().__init__(engines, loop=SameLoop())
        self._log, self._engines_behind = log, ports

    def _port_of(self, name: str, replicas: Sequence[Engine]) -> EnginePort:
        """Return a port of the engine in `ports`, which also logs pieces and ends of requests."""
        listener, log = self._listener, self._log

        def on_piece(work: EngineRequest, piece: Piece) -> None:
            log.piece(work)
            listener.on_piece(work, piece)

        def on_end(work: EngineRequest, value: Any, error: BaseException | None) -> None:
            log.end_request(work, value, error)
            listener.on_end(work, value, error)

        logging_listener = PortListener(listener.on_start, on_piece, on_end)
        return _Port(
            name,
            {str(number): engine for number, engine in enumerate(self._engines_behind[name])},
            logging_listener,
            log,
        )


class _Port(EnginePort):
    def __init__(self, name: str, replicas: Mapping[str, Engine], listener: PortListener, log: Log) -> None:
        super().__init__(name, replicas, listener)
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


# ------------------------------------------------------------ the flow of a query

Waits = Mapping[Action, tuple[After, ...]]


def record(cluster: Cluster, app: str, make: Make, value: object, *, seed: int = 0) -> Flow:
    """Return the flow of one query with this input; the query is run once for every work that it requests.

    Raises `TeolaError` if the app fails, or requests nothing.
    """

    def run(delayed_key: Key | None = None) -> Log:
        return run_virtual(watch_query(cluster, app, make, value, delayed_key), seed, inline=True)

    undelayed = run()
    if not undelayed.works_in_order:
        raise TeolaError("the app asked no engine of the cluster for anything.", hint="make it of the pool's objects")
    runs = [run(recorded.key) for recorded in undelayed.works_in_order]
    waits = _waits(undelayed, runs)
    works = tuple(_work(recorded, undelayed, waits) for recorded in undelayed.works_in_order)
    return Flow(works, waits[("answer",)])


def _waits(undelayed: Log, runs: Sequence[Log]) -> Waits:
    """Return what each action of the query waits for: (number of a work, its token).

    An action that did not happen at all waits for the work's end: by then, there was nothing left to change or to give
    up.
    """
    waits: dict[Action, tuple[After, ...]] = {}
    for action in undelayed.actions:
        own_key = action[1] if action[0] == "ask" else None
        last_tokens = (
            (number, log.actions.get(action, END)) for number, log in enumerate(runs) if log.delayed_key != own_key
        )
        waits[action] = tuple((number, token) for number, token in last_tokens if token)
    request_waits = [waits["ask", recorded.key] for recorded in undelayed.works_in_order]
    waits = {action: _reduced(after, request_waits) for action, after in waits.items()}
    for log in runs:
        leave_action = ("leave", log.delayed_key)
        if leave_action not in waits and (request_action := _overtaking(log, leave_action, undelayed)) is not None:
            waits[leave_action] = waits[request_action]
    return waits


def _reduced(after: tuple[After, ...], asks: Sequence[tuple[After, ...]]) -> tuple[After, ...]:
    """Return what an action waits for without what others of these have waited for themselves."""
    awaited: dict[int, float] = {}
    for work, _ in after:
        for number, token in asks[work]:
            awaited[number] = max(awaited.get(number, 0), _order(token))
    return tuple((number, token) for number, token in after if _order(token) > awaited.get(number, 0))


def _order(token: int) -> float:
    return float("inf") if token == END else token


def _overtaking(log: Log, leave_action: Action, undelayed: Log) -> Action | None:
    """Return the request that made the query give up a delayed warm-up: its prompt, which came first."""
    if leave_action not in log.at or log.at[leave_action] == log.at["answer",]:
        return None
    simultaneous = [
        action
        for action, time_s in log.at.items()
        if action[0] == "ask" and time_s == log.at[leave_action] and action in undelayed.actions
    ]
    return simultaneous[-1] if simultaneous else None


def _work(recorded: RecordedWork, log: Log, waits: Waits) -> FlowWork:
    """Return the recorded work as a part of a flow, with what it, its changes and its end by the query wait for."""
    event = recorded.event
    return FlowWork(
        recorded.engine.name,
        event.kind,
        tuple(_request(recorded, work, blocks=log.wants_blocks) for work in recorded.works),
        waits["ask", recorded.key],
        recorded.works[0].claims.made_by is Caller.PLANNER,
        event.depth,
        event.objective,
        _inside(event.gang),
        _inside(event.session),
        event.when_idle,
        event.remaining,
        waits.get(("leave", recorded.key)),
        tuple(_change(recorded, change, waits[act]) for act, change in log.changes.items() if act[1] == recorded.key),
    )


def _inside(name: str) -> str:
    """Return the name without the query's own name in front of it."""
    return name.partition("/")[2]


def _change(recorded: RecordedWork, event: DepthChanged, after: tuple[After, ...]) -> FlowChange:
    """Return a recorded change of a work's depth or objective as a part of a flow."""
    name = recorded.event.primitive
    objective = event.objectives.get(name)
    return FlowChange(
        after,
        event.depths.get(name),
        None if objective is None else objective[0],
        _inside(objective[1]) if objective else "",
    )


_names = PrefixCache(1)


def _request(recorded: RecordedWork, work: EngineRequest, *, blocks: bool) -> FlowRequest:
    """Return a recorded request as a part of a flow: sizes, keys of its prefix, and hashes of blocks if needed."""
    size, payload = recorded.engine.size(work.request), work.request.payload
    if not isinstance(payload, Generate | Warmup):
        return FlowRequest(size)
    text = payload.prompt.known_prefix() if isinstance(payload, Warmup) else payload.prompt.flat()
    tokens = split_tokens(text)
    value = recorded.values.get(work.request.id)
    output = value.completion_tokens if isinstance(value, Generation) else 0
    block_names = block_hashes(payload.prompt.known_prefix(), tenant=recorded.tenant) if blocks else ()
    return FlowRequest(size, len(tokens), output, _names.keys(tokens, recorded.tenant), block_names)
