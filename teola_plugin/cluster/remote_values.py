"""Large values go from instance to instance: a Ray object holds them, parcels hold references to it.

The instance that made the values owns the object. Ray counts its readers and frees it when the last one has let go;
when the owner dies, the values are lost, and whoever needs them has them made again (`SharedPort`).
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
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Done, Failed, Result
from teola_plugin.runtime.engine_requests.remote_values import RemoteValue

log = logging.getLogger("teola_plugin")
LARGE = 64 * 1024
"""Bytes of the values of one batch from which on they stay: below, references cost more than carrying the values."""
PATIENCE = 30.0
"""Seconds that a look-up may take before the value counts as lost."""
_refs: ContextVar[list[Any]] = ContextVar("teola_refs")


class ValueLost(EngineError):
    """From an instance to the client, which has the value made again: what a request was to read is gone."""


@contextmanager
def collecting_refs(refs: list[Any]) -> Iterator[None]:
    """While a parcel is packed or unpacked: Ray's references, which travel beside its bytes so that Ray counts them."""
    token = _refs.set(refs)
    try:
        yield
    finally:
        _refs.reset(token)


class RayBatch:
    """One Ray object, with the values of one batch."""

    __slots__ = ("ref",)

    def __init__(self, ref: Any) -> None:
        self.ref = ref

    def __reduce__(self) -> Any:
        refs = _refs.get()
        refs.append(self.ref)
        return _ray_batch, (len(refs) - 1,)


def _ray_batch(at: int) -> RayBatch:
    return RayBatch(_refs.get()[at])


class RayValue(RemoteValue):
    """One of the values. `remake` is known at the client alone: it asks for the value anew."""

    __slots__ = ("at", "held", "remake")

    def __init__(self, held: RayBatch, at: int) -> None:
        self.held, self.at = held, at
        self.remake: Callable[[], Awaitable[Any]] | None = None

    def __reduce__(self) -> Any:
        return RayValue, (self.held, self.at)


# ---------------------------------------------------------------- at the instance that makes them


def store_large(results: list[Result], staying: Collection[str]) -> list[Result]:
    """The results, with references in place of the values of the requests `staying`, if those are large together."""
    done = [result for result in results if isinstance(result, Done) and result.request_id in staying]
    values = pickle.dumps([result.value for result in done], protocol=5) if done else b""
    if len(values) < LARGE:
        return results
    import ray

    try:
        held = RayBatch(ray.put(values))
    except Exception as error:  # no room: they travel
        log.warning("%d bytes of values cannot be kept: %r", len(values), error)
        return results
    kept = {result.request_id: replace(result, value=RayValue(held, number)) for number, result in enumerate(done)}
    return [kept.get(result.request_id, result) for result in results]


# ---------------------------------------------------------------- where they are read


def remote_values_in(payload: Any) -> list[RayValue]:
    """What stands in a payload's fields for values."""
    if not is_dataclass(payload):
        return []
    return [value for field in fields(payload) if isinstance(value := getattr(payload, field.name), RayValue)]


def with_values(payload: Any, found: Mapping[RayValue, Any]) -> Any:
    """The payload with its values."""
    values = {f.name: found[v] for f in fields(payload) if isinstance(v := getattr(payload, f.name), RayValue)}
    return replace(payload, **values)


async def fetch_inputs(batch: Sequence[Request]) -> tuple[list[Request], list[Failed]]:
    """A batch with the values that it reads; requests whose values are lost fail."""
    wanted = {request.id: kept for request in batch if (kept := remote_values_in(request.payload))}
    if not wanted:
        return list(batch), []
    found = await fetch([one for kept in wanted.values() for one in kept])
    ready: list[Request] = []
    lost: list[Failed] = []
    for request in batch:
        if not all(one in found for one in wanted.get(request.id, ())):
            lost.append(Failed(request.id, ValueLost("a value that it reads is lost.")))
        else:
            ready.append(
                replace(request, payload=with_values(request.payload, found)) if request.id in wanted else request
            )
    return ready, lost


async def fetch(kept: Iterable[RayValue]) -> dict[RayValue, Any]:
    """The values; lost ones are left out."""
    asked = list(kept)
    refs = list({one.held.ref for one in asked})
    found = dict(zip(refs, await asyncio.gather(*map(_read, refs)), strict=True))
    return {one: values[one.at] for one in asked if (values := found[one.held.ref]) is not None}


async def _read(ref: Any) -> list[Any] | None:
    from ray.exceptions import RayError

    try:
        values: list[Any] = pickle.loads(await asyncio.wait_for(asyncio.wrap_future(ref.future()), PATIENCE))
    except (RayError, TimeoutError) as error:
        log.warning("values that an instance kept are lost (%s): they are made again", type(error).__name__)
        return None
    return values


async def fetch_or_remake(kept: Sequence[RayValue]) -> dict[RayValue, Any]:
    """The values at the client; lost ones are made again. Raises what their engine raises."""
    found = await fetch(kept)
    lost = [one for one in kept if one not in found]
    return found | dict(zip(lost, await asyncio.gather(*map(_remake, lost)), strict=True))


async def _remake(kept: RayValue) -> Any:
    if kept.remake is None:
        raise EngineUnavailable("a value of the shared pool is lost.", retryable=True, hint="ask again")
    return await kept.remake()
