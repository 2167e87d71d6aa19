"""What PostgreSQL's errors mean to the scheduler: the engine is gone, trying again may help, or the request is bad."""

from __future__ import annotations

from teola_plugin.engines.postgres.install import EXTRA
from teola_plugin.errors import EngineError, EngineUnavailable

_GONE = ("08", "57P")
"""Classes of SQLSTATE: connection failures, and a server that shuts down."""
_AGAIN = ("40", "53", "55P03", "57014")
"""Deadlocks, too little memory or too many connections, locks, statements stopped from outside."""


class Faults:
    """The errors of one engine, by its name."""

    def __init__(self, engine: str) -> None:
        self._engine = engine

    def bad(self, what: str) -> EngineError:
        return EngineError(f"{self._engine}: {what}.", engine=self._engine)

    def misfit(self, request_id: str, length: int, wanted: int) -> EngineError:
        return EngineError(
            f"{self._engine}: request {request_id!r} has a vector of {length} numbers, its collection takes {wanted}.",
            engine=self._engine,
            hint="use the embedding model that the collection was made with, or another collection",
        )

    def unavailable(self, what: str, hint: str = "restart it") -> EngineUnavailable:
        return EngineUnavailable(f"{self._engine}: {what}", engine=self._engine, retryable=True, hint=hint)

    def of(self, error: Exception) -> EngineError:
        """Return the error to raise for a request or an administrative call."""
        if isinstance(error, EngineError):
            return error
        if is_loss(error):
            return self.unavailable(f"the connection is lost: {_words(error)}")
        retryable = _state(error).startswith(_AGAIN)
        what = f"{self._engine}: {type(error).__name__}: {_words(error)}"
        return EngineError(what, engine=self._engine, retryable=retryable)

    def of_start(self, error: Exception) -> EngineError:
        """Return the error to raise if the engine cannot start."""
        if isinstance(error, EngineError):
            return error
        if isinstance(error, ImportError):
            return EngineUnavailable(f"{self._engine}: {error}.", engine=self._engine, hint=EXTRA)
        return self.unavailable(
            f"no connection: {_words(error)}", "check the dsn, that the server runs, and that it has pgvector"
        )

    def may_be_one_row(self, error: Exception) -> bool:
        """Return True if the same rows without one of them might be accepted."""
        return not is_loss(error) and not _state(error).startswith(_AGAIN)


def is_loss(error: Exception) -> bool:
    """Return True if the server or the connection is lost, or no connection could be made in time."""
    import psycopg

    if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return isinstance(error, OSError)
    return not _state(error) or _state(error).startswith(_GONE)


def is_missing(error: Exception) -> bool:
    """Return True if a table or a function does not exist."""
    return _state(error) in ("42P01", "42883")


def _state(error: Exception) -> str:
    return getattr(error, "sqlstate", None) or ""


def _words(error: Exception) -> str:
    return " ".join(str(error).split())
