"""How failures are told: which query, which primitive, what next."""

from __future__ import annotations

import copy

from teola_plugin.errors import EngineError, QueryCancelled, QueryError, QueryTimeout, RequestTooLarge, TeolaError
from teola_plugin.graph import PrimitiveKind
from teola_plugin.runtime.engine_requests.engine_request import EngineRequest
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.scheduling.graph_events import End


def outcome_error(run: QueryRun, order: End) -> QueryError | BaseException | None:
    """What the caller of a query that ended this way gets to see; None when it ended well."""
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
    """A request takes `size` slots of an engine that can take `limit`."""
    return RequestTooLarge(
        f"a {kind.value} request takes {size} slots of engine {engine!r}, which can take {limit} at most.",
        engine=engine,
        instance=instance,
        hint="shorten the prompt, or give the engine a larger limit (for vLLM: engine_args max_model_len)",
    )


def own(error: BaseException) -> BaseException:
    """An error object of one's own: what befalls a batch befalls many queries, and each is told of itself."""
    if not isinstance(error, TeolaError):
        return error
    made = copy.copy(error)
    made.__cause__, made.__context__ = error.__cause__, error.__context__
    made.__suppress_context__ = error.__suppress_context__
    return made.with_traceback(error.__traceback__)


def located(error: BaseException, entry: EngineRequest) -> BaseException:
    """An engine's error, saying which query and primitive it hit: a copy, if it does not say so already."""
    if not isinstance(error, EngineError) or "primitive" in error.__dict__:
        return error
    found = own(error)
    assert isinstance(found, EngineError)
    found.message += f" (query {entry.request.query}, primitive {entry.primitive})"
    found.args = (found.message,)
    found.__dict__["primitive"] = entry.primitive
    found.__dict__["query_id"] = entry.request.query
    return found
