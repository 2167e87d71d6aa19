"""One live query at the runtime: its values, its requests, and the callables of its client."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from teola_plugin.graph import Graph, Primitive, PrimitiveKind, Query
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.runtime.handles import CallHandle
from teola_plugin.runtime.query_store import QueryStore
from teola_plugin.runtime.request_table import RequestEntry, RequestTable

if TYPE_CHECKING:
    from teola_plugin.runtime.local import LocalRuntime


@dataclass(slots=True, eq=False)
class LivePrimitiveRun:
    """A dispatched primitive: the requests it waits for, the decodings its request also serves."""

    primitive: Primitive
    entries: list[RequestEntry]
    depth: int
    group: tuple[Primitive, ...] = ()
    left: int = 0
    began: bool = False
    prefilled: bool = False
    items: Any = None
    """The `ItemStream` of a splittable group."""
    closed_items: int = 0


@dataclass(slots=True, eq=False)
class QueryRun:
    """What the adapters hold of a live query. `observe`, `call` and `close` may be used from any thread."""

    runtime: LocalRuntime
    query: Query
    graph: Graph | None
    calls: Mapping[str, Callable[..., Any]]
    ahead: bool
    store: QueryStore
    table: RequestTable = field(default_factory=RequestTable)
    primitives: dict[str, LivePrimitiveRun] = field(default_factory=dict)
    errors: dict[str, BaseException] = field(default_factory=dict)
    waiters: dict[str, list[str]] = field(default_factory=dict)
    """Request id -> primitives of the graph that wait for it."""
    output: Future[Any] = field(default_factory=Future)
    """The graph's output (queries that are not `ahead`)."""
    trace: Future[QueryTrace | None] = field(default_factory=Future)
    closed: bool = False
    claims: bool = True
    """Whether calls of the plain object may be served by what was asked for before; not when it is only watched."""
    calls_made: int = 0

    @property
    def id(self) -> str:
        return self.query.id

    def observe(self, primitive: str, value: Any) -> None:
        """The plain object has computed the value of an opaque primitive."""
        self.runtime.observe(self, primitive, value)

    def call(self, kind: PrimitiveKind, engine: str, payloads: Sequence[Any], *, stream: bool = False) -> CallHandle:
        """A call of the plain object: claims what the graph has asked for already, submits the rest."""
        return self.runtime.call(kind, engine, payloads, stream=stream, run=self)

    def close(self) -> None:
        """The plain object has its answer, or gave up: whatever nobody claimed is dropped."""
        self.runtime.close_run(self)

    def cancel(self) -> None:
        """The caller gave up: the query ends cancelled."""
        self.runtime.cancel_run(self)
