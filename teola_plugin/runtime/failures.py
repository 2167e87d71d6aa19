"""How failures are told: which query, which primitive, what next."""

from __future__ import annotations

from teola_plugin.errors import EngineError, QueryCancelled, QueryError, QueryTimeout, RequestTooLarge
from teola_plugin.graph import PrimitiveKind
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.runtime.request_table import RequestEntry
from teola_plugin.scheduling.events import End


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
    if cause is not None and not isinstance(cause, EngineError):
        return cause  # the user's own exception passes through unchanged
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


def located(error: BaseException, entry: RequestEntry) -> BaseException:
    """An engine's error, saying which query and primitive it hit."""
    if isinstance(error, EngineError) and "primitive" not in error.__dict__:
        error.message += f" (query {entry.request.query}, primitive {entry.primitive})"
        error.args = (error.message,)
        error.__dict__["primitive"] = entry.primitive
        error.__dict__["query_id"] = entry.request.query
    return error
