"""An `EnginePort` by itself in virtual time, with scripted engines and a listener that records its reports."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from teola_plugin.engines.base import Engine, EngineLoad
from teola_plugin.graph import LLM_KINDS, Batching, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Done, Generate, Generation, Piece, Prompt, Request, Result
from teola_plugin.runtime.engine_requests import EngineRequest
from teola_plugin.runtime.ports.engine_port import EnginePort
from teola_plugin.runtime.ports.port import PortListener
from teola_plugin.runtime.virtual_time import run_virtual
from teola_plugin.scheduling.engine_queue import Enqueue

Script = Callable[[Sequence[Request]], AsyncIterator[Result]]


class Scripted:
    """An engine whose `execute` runs one script for each batch. The last script also serves all later batches."""

    kinds = LLM_KINDS

    def __init__(self, *scripts: Script, profile: EngineProfile | None = None, restarts: int = 100) -> None:
        self.name = "llm"
        self.profile = profile or EngineProfile(batching=Batching.CONTINUOUS, max_batch=64, max_requests=8)
        self.batches: list[tuple[Request, ...]] = []
        self.cancelled: list[str] = []
        self.restarted = 0
        self._scripts, self._restarts = list(scripts) or [answers], restarts

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def reset(self) -> None: ...

    async def restart(self) -> None:
        if self.restarted >= self._restarts:
            raise RuntimeError("no device")
        self.restarted += 1

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        script = self._scripts[min(len(self.batches), len(self._scripts) - 1)]
        self.batches.append(tuple(batch))
        async for result in script(batch):
            yield result

    async def cancel(self, request_id: str) -> None:
        self.cancelled.append(request_id)

    def size(self, request: Request) -> float:
        return 1

    def load(self) -> EngineLoad:
        return EngineLoad()

    def versions(self) -> Mapping[str, str]:
        return {"scripted": "1"}


async def answers(batch: Sequence[Request]) -> AsyncIterator[Result]:
    """Answer every request with its prompt, after one second."""
    await asyncio.sleep(1)
    for request in batch:
        yield Done(request.id, Generation(request.payload.prompt.text))


async def hangs(batch: Sequence[Request]) -> AsyncIterator[Result]:
    """Answer nothing until the test is over, even if cancelled."""
    test_over = _test_over[-1]
    while not test_over.is_set():
        try:
            await test_over.wait()
        except asyncio.CancelledError:
            pass
    for request in batch:
        yield Piece(request.id, "too late")


_test_over: list[asyncio.Event] = []


def driven(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` in virtual time. Scripts that hang until then end with it."""

    async def main() -> None:
        _test_over.append(asyncio.Event())
        try:
            await work
        finally:
            _test_over[-1].set()

    run_virtual(main())


def says(*texts: str, error: BaseException | None = None, value: str | None = None) -> Script:
    """Return a script that sends these pieces, then raises `error` or sends the result.

    The result is `value`, or all pieces joined if no value is given.
    """

    async def script(batch: Sequence[Request]) -> AsyncIterator[Result]:
        for request in batch:
            for text in texts:
                yield Piece(request.id, text)
        if error is not None:
            raise error
        for request in batch:
            yield Done(request.id, Generation("".join(texts) if value is None else value))

    return script


def raises(error: BaseException) -> Script:
    return says(error=error)


def entry(name: str, payload: Any = None, *, primitive: str = "", stream: bool = False) -> EngineRequest:
    request = Request(name, PrimitiveKind.PREFILLING, payload or Generate(Prompt(text=name)), query="q", stream=stream)
    return EngineRequest(request, "llm", None, primitive or name)


def event(name: str, **fields: Any) -> Enqueue:
    return Enqueue(0.0, "q", name, PrimitiveKind.PREFILLING, (), **fields)


@dataclass
class PortReports:
    """The starts, pieces and outcomes that a port reports to its listener."""

    ends: dict[str, tuple[Any, BaseException | None, float]] = field(default_factory=dict)
    """Value, error and time of the outcome, by request."""
    pieces: dict[str, str] = field(default_factory=dict)
    started: list[tuple[str, str]] = field(default_factory=list)

    def listener(self) -> PortListener:
        return PortListener(self._started, self._piece, self._ended)

    def _started(self, entry: EngineRequest, replica: str, batch: int) -> None:
        self.started.append((entry.request.id, replica))

    def _piece(self, entry: EngineRequest, piece: Piece) -> None:
        entry.stream.add(piece)
        self.pieces[entry.request.id] = self.pieces.get(entry.request.id, "") + piece.text

    def _ended(self, entry: EngineRequest, value: Any, error: BaseException | None) -> None:
        assert entry.request.id not in self.ends, "a request ended twice"
        entry.resolve(value, error)
        self.ends[entry.request.id] = value, error, asyncio.get_running_loop().time()

    def text(self, name: str) -> Any:
        value, error, _ = self.ends[name]
        assert error is None, error
        return value.text

    def error(self, name: str) -> Any:
        return self.ends[name][1]

    def at(self, name: str) -> float:
        return self.ends[name][2]


def port(engines: Mapping[str, Engine] | Engine, reports: PortReports, **more: Any) -> EnginePort:
    engines_by_name = engines if isinstance(engines, Mapping) else {"0": engines}
    return EnginePort("llm", engines_by_name, reports.listener(), **more)


def enqueue_requests(port: EnginePort, *names: str, **fields: Any) -> list[EngineRequest]:
    """Enqueue one request for each name, each with a primitive of its own."""
    requests = [entry(name) for name in names]
    for request in requests:
        port.enqueue([request], event(request.primitive, **fields))
    return requests
