"""Translates Ray's failures into this package's errors."""

from __future__ import annotations

from teola_plugin.errors import EngineUnavailable, TeolaError


def actor_gone(error: BaseException) -> bool:
    """Return True if the actor, its node or the whole cluster cannot be reached."""
    from ray import exceptions

    return isinstance(error, exceptions.RayActorError | exceptions.RaySystemError | exceptions.NodeDiedError)


def translated(error: BaseException, engine: str, replica: str = "") -> BaseException:
    """Return the error that a caller of this package gets.

    Our own errors stay as they were raised; a dead actor becomes `EngineUnavailable`.
    """
    from ray import exceptions

    if isinstance(error, exceptions.RayTaskError):
        cause = error.cause
        if isinstance(cause, TeolaError):
            return cause
        return EngineUnavailable(
            f"engine {engine!r} replica {replica or '?'} raised {type(cause).__name__}: {cause}",
            engine=engine,
            replica=replica,
            retryable=True,
            hint="see the pool's log",
        )
    if actor_gone(error) or isinstance(error, exceptions.RayError):
        return EngineUnavailable(
            f"engine {engine!r} replica {replica or '?'} died: {type(error).__name__}.",
            engine=engine,
            replica=replica,
            retryable=True,
            hint="it is started again by itself; `teola status` shows how it is",
        )
    return error
