"""The engine seam: engines execute batches and stream results per request; they never schedule."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Done, Failed, Piece, Request, Result

__all__ = ["Done", "Engine", "EngineLoad", "Failed", "Piece", "Request", "Result"]


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """The current load of a replica, which placement compares."""

    requests: int = 0
    kv_used: float = 0.0
    """Share of the KV cache in use, 0 to 1; 0 for engines without one."""
    kv_tokens: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Tokens of the running generations in the KV cache by app, of prompts and answers; {} if not reported.

    A prefix that several share counts for each.
    """


@runtime_checkable
class Engine(Protocol):
    """One replica of an engine. All coroutines run on the pool's loop.

    Contract, checked by `conformance.EngineConformance`:

    * `execute` yields, for every request, any number of `Piece`s and then exactly one `Done` or `Failed`. It never
      raises for a request's sake: a bad request fails alone. Should it raise, every unfinished request failed.
    * `cancel` is idempotent, takes unknown ids, and makes `execute` end the request with `Failed(retryable=False)`. An
      engine that has not done so after 10 s counts as hanging (`runtime.ports.batches.Patience`): it is started again.
    * A request without `stream` need yield no piece but the first; see `takes_late_readers`.
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
        """Return the slots of a request: its prompt tokens for an LLM, else 1, or less for less work than a sample.

        Samples are what the profile was measured with. An estimate is fine.
        """
        ...

    def load(self) -> EngineLoad: ...

    async def reset(self) -> None:
        """Forget what earlier requests left behind (prefix caches). Data that was asked to be kept stays.

        An engine that learns from a tenant's requests has `async def forget(tenant: str)`, too; see `forget`.
        """
        ...

    def versions(self) -> Mapping[str, str]:
        """Return versions of the software and the model, e.g. `{"vllm": "0.32.0", "model": "..."}`."""
        ...


def takes_late_readers(engine: Engine) -> bool:
    """Return True if an engine accepts requests of running queries whose pieces are not read yet.

    Such an engine has `takes_late_readers = True` and `def announce_reader(request_id: str) -> None`. Once a reader is
    announced, it yields pieces, first the text generated so far; unknown ids are ignored. For a request without a
    reader it still yields the first piece at once, because that piece ends the prefilling. Any other engine is asked
    to stream every request that may get a reader.
    """
    return bool(getattr(engine, "takes_late_readers", False))


def announce_reader(engine: Engine, request_id: str) -> None:
    """Tell an engine that a request has a reader now. Engines that take no late readers stream it from the start."""
    if takes_late_readers(engine):
        engine.announce_reader(request_id)  # type: ignore[attr-defined]


async def forget(engine: Engine, tenant: str) -> None:
    """Have an engine forget what it has learned from a tenant's requests, if it learns anything."""
    forget_tenant = getattr(engine, "forget", None)
    if forget_tenant is not None:
        await forget_tenant(tenant)
