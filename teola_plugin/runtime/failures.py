"""Errors that say which query and which primitive failed, and what to do next."""

from __future__ import annotations

import copy

from teola_plugin.errors import EngineError, QueryCancelled, QueryError, QueryTimeout, RequestTooLarge, TeolaError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.runtime.engine_requests.engine_request import EngineRequest
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.scheduling.graph_events import End


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


def too_large(kind: PrimitiveKind, size: float, limit: int, engine: str, instance: str = "") -> RequestTooLarge:
    """Return the error of a request that takes `size` slots of an engine that can take `limit`."""
    return RequestTooLarge(
        f"a {kind.value} request takes {size} slots of engine {engine!r}, which can take {limit} at most.",
        engine=engine,
        instance=instance,
        hint="shorten the prompt, or give the engine a larger limit (for vLLM: engine_args max_model_len)",
    )


def own(error: BaseException) -> BaseException:
    """Return a copy of an error of ours: a batch fails for many queries, and each gets an error object of its own."""
    if not isinstance(error, TeolaError):
        return error
    copied = copy.copy(error)
    copied.__cause__, copied.__context__ = error.__cause__, error.__context__
    copied.__suppress_context__ = error.__suppress_context__
    return copied.with_traceback(error.__traceback__)


def located(error: BaseException, entry: EngineRequest) -> BaseException:
    """Return an engine's error that says which query and primitive it hit: a copy, if it does not say so already."""
    if not isinstance(error, EngineError) or "primitive" in error.__dict__:
        return error
    copied = own(error)
    assert isinstance(copied, EngineError)
    copied.message += f" (query {entry.request.query}, primitive {entry.primitive})"
    copied.args = (copied.message,)
    copied.__dict__["primitive"] = entry.primitive
    copied.__dict__["query_id"] = entry.request.query
    return copied
