"""The driver, as those see it that work for it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from teola_plugin.graph import Primitive
from teola_plugin.runtime.driver.client_code import ClientCode
from teola_plugin.runtime.driver.recording import RunTrace
from teola_plugin.runtime.ports.port import Port
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.scheduling.graph_events import GraphEvent
from teola_plugin.scheduling.live_query import LiveQuery


class Driver(Protocol):
    """What carries out the work of engines needs of the driver of the graph scheduler."""

    runs: dict[str, QueryRun]
    ports: Mapping[str, Port]
    trace: RunTrace
    code: ClientCode

    def now(self) -> float: ...

    def post(self, event: GraphEvent) -> None: ...

    def fail(self, run: QueryRun, name: str, error: BaseException) -> None: ...

    def died(self, run: QueryRun, p: Primitive, error: BaseException) -> None: ...

    def broken(self, query: str, primitive: str, error: Exception) -> None: ...

    def made(self, run: QueryRun, name: str) -> None: ...

    def dispatched(self, run: QueryRun, p: Primitive) -> None: ...

    def query(self, run: QueryRun) -> LiveQuery | None: ...
