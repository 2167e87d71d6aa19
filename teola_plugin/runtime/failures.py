"""Errors of queries and of requests to engines: what failed, where, and what to do next."""

from __future__ import annotations

import copy

from teola_plugin.errors import (
    EngineError,
    EngineOverloaded,
    EngineUnavailable,
    QueryCancelled,
    QueryError,
    QueryTimeout,
    RequestTooLarge,
    TeolaError,
)
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import advice
from teola_plugin.runtime.engine_requests import EngineRequest
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.scheduling.events import End


def outcome_error(run: QueryRun, order: End) -> QueryError | BaseException | None:
    """Return the error that the caller of a query gets when it ended this way; None when it ended well."""
    if order.outcome == "timeout":
        return QueryTimeout(
            f"query {run.id} did not end before its deadline.",
            query_id=run.id,
            hint="allow more time, or see fast.explain()",
        )
    if order.outcome == "cancelled":
        return QueryCancelled(f"query {run.id} was cancelled.", query_id=run.id, hint="call it again")
    if order.outcome != "failed":
        return None
    cause = run.errors.get(order.primitive)
    if cause is not None and not (order.primitive and isinstance(cause, EngineError)):
        return cause  # the user's own exception passes through unchanged, and what befell the pool as a whole
    error = QueryError(
        f"query {run.id} failed at primitive {order.primitive!r}: {cause}",
        query_id=run.id,
        primitive=order.primitive,
        hint="see the cause",
    )
    error.__cause__ = cause
    return error


def too_large_error(kind: PrimitiveKind, size: float, limit: int, engine: str, replica: str = "") -> RequestTooLarge:
    """Return the error of a request that takes `size` slots of an engine that can take `limit`."""
    return RequestTooLarge(
        f"a {kind.value} request takes {size} slots of engine {engine!r}, which can take {limit} at most.",
        engine=engine,
        replica=replica,
        hint="shorten the prompt, or give the engine a larger limit (for vLLM: engine_args max_model_len)",
    )


def copied_error(error: BaseException) -> BaseException:
    """Return a copy of an error of ours: a batch fails for many queries, and each gets an error object of its own."""
    if not isinstance(error, TeolaError):
        return error
    copied = copy.copy(error)
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied.with_traceback(error.__traceback__)


def with_location(error: BaseException, entry: EngineRequest) -> BaseException:
    """Return an engine's error that says which query and primitive it hit: a copy, if it does not say so already."""
    if not isinstance(error, EngineError) or "primitive" in error.__dict__:
        return error
    copied = copied_error(error)
    assert isinstance(copied, EngineError)
    copied.message += f" (query {entry.request.query}, primitive {entry.primitive})"
    copied.args = (copied.message,)
    copied.__dict__["primitive"] = entry.primitive
    copied.__dict__["query_id"] = entry.request.query
    return copied


def unqueueable_error(error: Exception, kind: PrimitiveKind, engine: str) -> EngineError:
    """Return the error of a request that could not be queued, because its payload is not what the engine takes."""
    wrapper = EngineError(
        f"a {kind.value} request cannot be queued at engine {engine!r}: {type(error).__name__}: {error}.",
        engine=engine,
        hint=advice(error),
    )
    wrapper.__cause__ = error
    return wrapper


def engine_down_error(engine: str, cause: str) -> EngineUnavailable:
    """Return the error of requests to an engine that has no replica left and gets none."""
    return EngineUnavailable(
        f"engine {engine!r} is down and could not be restarted: {cause}",
        engine=engine,
        hint="look at the cause; it is tried again now and then, or start a new pool",
    )


def overload_error(engine: str, queued: int, limit: int) -> EngineOverloaded:
    """Return the error of a request to an engine whose queue is full."""
    return EngineOverloaded(
        f"engine {engine!r} has {queued} requests queued, its limit is {limit}.",
        engine=engine,
        retryable=True,
        hint="send fewer queries at once, or add replicas",
    )


def replica_lost_error(engine: str, replica: str, reason: str) -> EngineUnavailable:
    """Return the error of requests that ran at a replica which died or hangs."""
    return EngineUnavailable(
        f"replica {replica} of engine {engine!r} was lost: {reason}.",
        engine=engine,
        replica=replica,
        retryable=True,
        hint="it is started again by itself",
    )


def cancelled_error(engine: str) -> EngineError:
    """Return the error of a request that was cancelled."""
    return EngineError(f"the request was cancelled at engine {engine!r}.", engine=engine, hint="ask again")


def missing_result_error(engine: str) -> EngineError:
    """Return the error of a request without a result in a batch that has ended."""
    return EngineError(
        f"engine {engine!r} ended a batch without a result for each of its requests.",
        engine=engine,
        hint="run the engine through engines.conformance.EngineConformance",
    )


def broken_engine_error(engine: str, error: Exception) -> EngineError:
    """Return what an engine's `execute` raised as an `EngineError`; one of that type stays as it is."""
    if isinstance(error, EngineError):
        return error
    wrapper = EngineError(f"engine {engine!r} broke: {error!r}.", engine=engine, hint="see the cause")
    wrapper.__cause__ = error
    return wrapper
