"""The engine seam: engines execute batches and stream results per request; they never schedule."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

from teola_plugin.engines.payloads import Version
from teola_plugin.errors import EngineError
from teola_plugin.graph import EngineProfile, PrimitiveKind


@dataclass(frozen=True, slots=True)
class Request:
    """One unit of work of a primitive."""

    id: str
    """Unique within the process."""
    kind: PrimitiveKind
    payload: Any
    """See `payloads`."""
    query: str = ""
    tenant: str = ""
    priority: int = 0
    """Admission sequence number of the engine scheduler, lower is more urgent; later by a lag in a gang."""
    stream: bool = False
    """Whether somebody reads the pieces; without a reader an engine may send only the end."""
    background: bool = False
    """Work that must not delay others on the instance (a warm-up beside deeper decodings)."""
    stays: bool = False
    """Whether only engines read its value: a shared pool may leave it where it is made, if it is large."""
    depth: int = 0
    """Of its primitive, when it was admitted: the longest way to the output of its query."""
    objective: str = "latency"
    """What is wanted of it: `latency`, `throughput` or `spare`."""

    def admitted(self, priority: int, depth: int, objective: str) -> Request:
        """As it goes to its engine. (`dataclasses.replace` takes five times as long, and this is done for each.)"""
        return Request(
            self.id,
            self.kind,
            self.payload,
            self.query,
            self.tenant,
            priority,
            self.stream,
            self.background,
            self.stays,
            depth,
            objective,
        )


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a streamed value, in order. The first piece ends the prefilling."""

    request_id: str
    text: str
    tokens: int = 1


@dataclass(frozen=True, slots=True)
class Done:
    """The value of a request; exactly one `Done` or `Failed` ends it."""

    request_id: str
    value: Any
    stats: Mapping[str, float] = field(default_factory=dict)
    version: Version | None = None
    """SEARCHING: of the collection, read in the search's own snapshot; None from a store that cannot tell."""


@dataclass(frozen=True, slots=True)
class Failed:
    request_id: str
    error: EngineError


Result = Piece | Done | Failed


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """What placement looks at."""

    requests: int = 0
    kv_used: float = 0.0
    """Share of the KV cache in use, 0 to 1; 0 for engines without one."""


@runtime_checkable
class Engine(Protocol):
    """One instance of an engine. All coroutines run on the pool's loop.

    Contract, checked by `conformance.EngineConformance`:

    * `execute` yields, for every request, any number of `Piece`s and then exactly one `Done` or `Failed`. It never
      raises for a request's sake: a bad request fails alone. Should it raise, every unfinished request failed.
    * `cancel` is idempotent, takes unknown ids, and makes `execute` end the request with `Failed(retryable=False)`. An
      engine that has not done so after 10 s counts as hanging (`runtime.watchdog.Patience`): it is started again.
    * `start` and `stop` are idempotent; after `stop` no process, thread or file of the engine is left.
    * `execute` may be called again while an earlier call is running when `profile.batching` is CONTINUOUS.
    """

    name: str
    kinds: frozenset[PrimitiveKind]

    @property
    def profile(self) -> EngineProfile: ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]: ...

    async def cancel(self, request_id: str) -> None: ...

    def size(self, request: Request) -> float:
        """Slots the request takes: its prompt tokens for an LLM, elsewhere 1, or less where it is less work than the
        samples that the profile was measured with. An estimate is fine."""
        ...

    def load(self) -> EngineLoad: ...

    async def reset(self) -> None:
        """Forget what earlier requests left behind (prefix caches). Data that was asked to be kept stays."""
        ...

    def versions(self) -> Mapping[str, str]:
        """Names and versions of what runs below, e.g. `{"vllm": "0.32.0", "model": "..."}`."""
        ...
