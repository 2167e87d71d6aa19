"""Large values go from replica to replica: a Ray object holds them, parcels hold references to it.

The replica that made the values owns the object. Ray counts its readers and frees it when the last one has let go.
When the owner dies, the values are lost, and whoever needs them requests them again (`SharedPort`).
"""

from __future__ import annotations

import asyncio
import logging
import pickle
from collections.abc import Awaitable, Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import fields, is_dataclass, replace
from typing import Any

from teola_plugin.errors import EngineError, EngineUnavailable
from teola_plugin.requests.payloads import Done, Failed, Request, Result
from teola_plugin.runtime.claims import RemoteValue

log = logging.getLogger("teola_plugin")
LARGE_BYTES = 64 * 1024
"""Size of one batch's values, in bytes, from which on they stay: smaller ones cost less to carry than references."""
FETCH_TIMEOUT_S = 30.0
"""Seconds that a look-up may take before the value counts as lost."""
_refs: ContextVar[list[Any]] = ContextVar("teola_refs")


class ValueLost(EngineError):
    """Tells the client that a value which a request was to read is lost: the client requests it again."""


@contextmanager
def collecting_refs(refs: list[Any]) -> Iterator[None]:
    """Collect Ray's references while a parcel is packed or unpacked: they travel beside its bytes, so that Ray counts
    them."""
    token = _refs.set(refs)
    try:
        yield
    finally:
        _refs.reset(token)


class RayBatch:
    """A Ray object with the values of one batch."""

    __slots__ = ("ref",)

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def __reduce__(self) -> Any:
        """Pickle the batch as an index into the list of references that travels with its parcel.

        Raise LookupError outside of `collecting_refs`, since Ray must see the references to count them.
        """
        refs = _refs.get()
        refs.append(self.ref)
        return _ray_batch, (len(refs) - 1,)


def _ray_batch(at: int) -> RayBatch:
    return RayBatch(_refs.get()[at])


class RayValue(RemoteValue):
    """One of the values. Only the client sets `remake`, which requests the value again."""

    __slots__ = ("batch", "index", "remake")

    def __init__(self, batch: RayBatch, index: int) -> None:
        self.batch, self.index = batch, index
        self.remake: Callable[[], Awaitable[Any]] | None = None

    def __reduce__(self) -> Any:
        return RayValue, (self.batch, self.index)


# ---------------------------------------------------------------- at the replica that makes the values


def store_large(results: list[Result], kept_requests: Collection[str]) -> list[Result]:
    """Return the results, with references in place of the values of `kept_requests` if these are large together."""
    done = [result for result in results if isinstance(result, Done) and result.request_id in kept_requests]
    values = pickle.dumps([result.value for result in done], protocol=5) if done else b""
    if len(values) < LARGE_BYTES:
        return results
    import ray

    try:
        batch = RayBatch(ray.put(values))
    except Exception as error:  # no room: they are carried
        log.warning("%d bytes of values cannot be kept: %r", len(values), error)
        return results
    references = {
        result.request_id: replace(result, value=RayValue(batch, number)) for number, result in enumerate(done)
    }
    return [references.get(result.request_id, result) for result in results]


# ---------------------------------------------------------------- at the readers


def remote_values_in(payload: Any) -> list[RayValue]:
    """Return the remote values among a payload's fields."""
    if not is_dataclass(payload):
        return []
    return [value for field in fields(payload) if isinstance(value := getattr(payload, field.name), RayValue)]


def with_values(payload: Any, fetched: Mapping[RayValue, Any]) -> Any:
    """Return the payload with the fetched values in place of remote ones.

    Raise KeyError if a remote value is not among the fetched ones.
    """
    values = {f.name: fetched[v] for f in fields(payload) if isinstance(v := getattr(payload, f.name), RayValue)}
    return replace(payload, **values)


async def fetch_inputs(batch: Sequence[Request]) -> tuple[list[Request], list[Failed]]:
    """Return the batch with the values that it reads, and a failure for each request whose values are lost."""
    remote_inputs = {request.id: remote for request in batch if (remote := remote_values_in(request.payload))}
    if not remote_inputs:
        return list(batch), []
    fetched = await fetch([value for remote in remote_inputs.values() for value in remote])
    ready: list[Request] = []
    failures: list[Failed] = []
    for request in batch:
        if not all(value in fetched for value in remote_inputs.get(request.id, ())):
            failures.append(Failed(request.id, ValueLost("a value that it reads is lost.")))
        else:
            ready.append(
                replace(request, payload=with_values(request.payload, fetched))
                if request.id in remote_inputs
                else request
            )
    return ready, failures


async def fetch(remote_values: Iterable[RayValue]) -> dict[RayValue, Any]:
    """Return the values, by their references; lost ones are left out.

    Each batch is read once, and all are read at the same time. Call it on a loop.
    """
    requested = list(remote_values)
    refs = list({value.batch.ref for value in requested})
    batches = dict(zip(refs, await asyncio.gather(*map(_read, refs)), strict=True))
    return {value: values[value.index] for value in requested if (values := batches[value.batch.ref]) is not None}


async def _read(ref: Any) -> list[Any] | None:
    """Return the values that a Ray object holds; None if they are lost or do not come within `FETCH_TIMEOUT_S`."""
    from ray.exceptions import RayError

    try:
        values: list[Any] = pickle.loads(await asyncio.wait_for(asyncio.wrap_future(ref.future()), FETCH_TIMEOUT_S))
    except (RayError, TimeoutError) as error:
        log.warning("values that a replica kept are lost (%s): they are made again", type(error).__name__)
        return None
    return values


async def fetch_or_remake(remote_values: Sequence[RayValue]) -> dict[RayValue, Any]:
    """Return the values at the client; lost ones are made again. Raises what their engine raises."""
    fetched = await fetch(remote_values)
    missing = [value for value in remote_values if value not in fetched]
    return fetched | dict(zip(missing, await asyncio.gather(*map(_remake, missing)), strict=True))


async def _remake(remote_value: RayValue) -> Any:
    """Compute a lost value again and return it. Raise `EngineUnavailable` for one that cannot be made again.

    The error is marked as retryable.
    """
    if remote_value.remake is None:
        raise EngineUnavailable("a value of the shared pool is lost.", retryable=True, hint="ask again")
    return await remote_value.remake()
