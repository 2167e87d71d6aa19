"""What befalls requests at an engine, as errors: what was attempted, what is wrong, what to do next."""

from __future__ import annotations

from teola_plugin.errors import EngineError, EngineOverloaded, EngineUnavailable
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.bad_input import advice


def unfit(error: Exception, kind: PrimitiveKind, engine: str) -> EngineError:
    """A request that could not even be queued: its payload is not what the engine takes."""
    made = EngineError(
        f"a {kind.value} request cannot be queued at engine {engine!r}: {type(error).__name__}: {error}.",
        engine=engine,
        hint=advice(error),
    )
    made.__cause__ = error
    return made


def given_up(engine: str, cause: str) -> EngineUnavailable:
    return EngineUnavailable(
        f"engine {engine!r} is down and could not be restarted: {cause}",
        engine=engine,
        hint="look at the cause; it is tried again now and then, or start a new pool",
    )


def overloaded(engine: str, queued: int, limit: int) -> EngineOverloaded:
    return EngineOverloaded(
        f"engine {engine!r} has {queued} requests queued, its limit is {limit}.",
        engine=engine,
        retryable=True,
        hint="send fewer queries at once, or add instances",
    )


def lost(engine: str, instance: str, reason: str) -> EngineUnavailable:
    return EngineUnavailable(
        f"instance {instance} of engine {engine!r} was lost: {reason}.",
        engine=engine,
        instance=instance,
        retryable=True,
        hint="it is started again by itself",
    )


def cancelled(engine: str) -> EngineError:
    return EngineError(f"the request was cancelled at engine {engine!r}.", engine=engine, hint="ask again")


def silent(engine: str) -> EngineError:
    return EngineError(
        f"engine {engine!r} ended a batch without a result for each of its requests.",
        engine=engine,
        hint="run the engine through engines.conformance.EngineConformance",
    )


def broken(engine: str, error: Exception) -> EngineError:
    """What `execute` raised: an engine's own error stays as it is."""
    if isinstance(error, EngineError):
        return error
    made = EngineError(f"engine {engine!r} broke: {error!r}.", engine=engine, hint="see the cause")
    made.__cause__ = error
    return made
