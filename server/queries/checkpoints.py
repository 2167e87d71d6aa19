"""Checkpoints of graphs that leave them to the server, in its store, so that they outlive the process."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from teola_plugin.adapters.app_frameworks import checkpoint_saver
from teola_plugin.errors import EngineUnavailable, RegistrationError
from teola_plugin.server.models.apps import App
from teola_plugin.server.models.graphs import has_checkpoints
from teola_plugin.server.queries.records import Record
from teola_plugin.server.queries.store import Store

if TYPE_CHECKING:
    from psycopg_pool import AsyncConnectionPool

_MAX_INTERVAL_S = 60.0
"""Longest time between two searches for expired threads."""
_SELECT_EXPIRED = """
SELECT thread_id FROM checkpoints GROUP BY thread_id
HAVING max((checkpoint ->> 'ts')::timestamptz) <= to_timestamp(%s)
"""
_SELECT_BY_PREFIX = "SELECT DISTINCT thread_id FROM checkpoints WHERE starts_with(thread_id, %s)"


class Checkpoints:
    """The checkpoints of the server's `apps`. `keep`: seconds after its last step for which a thread is stored."""

    def __init__(self, store: Store, apps: Iterable[App], keep: float) -> None:
        """Prepare the checkpoints. Raise `RegistrationError` for an app that cannot have them."""
        self._store, self._keep = store, keep
        self._graphs = [app for app in apps if hasattr(app.fast, "checkpointer")]
        self._apps = [app for app in apps if app.settings.checkpoints]
        for app in self._apps:
            _check_app(app)
        self._pool: AsyncConnectionPool[Any] | None = None
        self._saver: Any = None
        self._last_search = time.time()

    async def open(self) -> None:
        """Give the graphs their checkpoints. The store has to be open. Raise `EngineUnavailable`."""
        if not self._apps:
            return
        if self._store.dsn:
            self._pool = await _pool(self._store.dsn, self._store.pool)
            self._saver = checkpoint_saver(self._pool)
            await self._saver.setup()
        else:
            self._saver = checkpoint_saver()
        for app in self._apps:
            app.fast.checkpointer = self._saver

    async def close(self) -> None:
        """Close the connections to the server's database, if there are any. Idempotent.

        Called when the server stops, after its queries; a graph that still ran could store no further step.
        """
        if self._pool is not None:
            await self._pool.close()
            self._pool = None

    # ------------------------------------------------------------ forgetting

    async def forget(self, app: App, record: Record) -> None:
        """Delete the thread of a submitted query, unless the query joined a named thread.

        A named thread belongs to the conversation, which other requests may continue; `forget_all` deletes it with its
        tenant.
        """
        if has_checkpoints(app.fast) and not app.names_thread(record):
            await _forget(app.fast.checkpointer, [app.thread_of(record)])

    async def forget_all(self, tenant: str) -> None:
        """Delete all threads of a tenant, in the checkpoints of all apps."""
        prefix = App.threads_of(tenant)
        savers = {id(app.fast.checkpointer): app.fast.checkpointer for app in self._graphs if has_checkpoints(app.fast)}
        for saver in savers.values():
            if saver is self._saver and self._pool is not None:
                await _forget(saver, await self._threads(_SELECT_BY_PREFIX, prefix))
            else:
                threads = {str(one.config["configurable"]["thread_id"]) async for one in saver.alist(None)}
                await _forget(saver, [thread for thread in threads if thread.startswith(prefix)])

    async def expire(self, now: float) -> None:
        """Delete threads in the server's store that have made no step for `keep` seconds. Search now and then.

        `now`: Unix time in seconds. The server calls this often; the database is searched at most once in
        `_MAX_INTERVAL_S` seconds, or in half of `keep` if that is less. Checkpoints in memory are not deleted.
        """
        if self._pool is None or now - self._last_search < min(_MAX_INTERVAL_S, self._keep / 2):
            return
        self._last_search = now
        await _forget(self._saver, await self._threads(_SELECT_EXPIRED, now - self._keep))

    async def _threads(self, text: str, value: Any) -> list[str]:
        """Return the names of the threads that a statement selects in the server's database."""
        assert self._pool is not None
        async with self._pool.connection() as connection:
            rows = await (await connection.execute(text.encode(), (value,))).fetchall()
        return [str(row[0]) for row in rows]


async def _forget(saver: Any, threads: Iterable[str]) -> None:
    for thread in threads:
        await saver.adelete_thread(thread)


def _check_app(app: App) -> None:
    """Raise `RegistrationError` for an app whose checkpoints the server cannot store: no graph, or one with its own."""
    if not hasattr(app.fast, "checkpointer"):
        message = f"app {app.name!r}: {app.settings.object} is no graph: only graphs have checkpoints."
        raise RegistrationError(message, hint="leave its checkpoints out")
    if app.fast.checkpointer:
        message = f"app {app.name!r}: {app.settings.object} has checkpoints of its own."
        raise RegistrationError(message, hint="leave checkpoints out, or compile the graph without a checkpointer")


async def _pool(dsn: str, name: str) -> AsyncConnectionPool[Any]:
    """Return connections to tables that are this pool's alone. Raise `EngineUnavailable`."""
    import psycopg
    from psycopg_pool import AsyncConnectionPool, PoolTimeout

    schema = f"teola_checkpoints_{hashlib.sha256(name.encode()).hexdigest()[:16]}"

    async def configure(connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute(f'SET search_path TO "{schema}"'.encode())

    options = {"autocommit": True, "prepare_threshold": 0}
    pool = AsyncConnectionPool(dsn, min_size=1, max_size=4, open=False, kwargs=options, configure=configure)
    try:
        await pool.open(wait=True, timeout=15)
        async with pool.connection() as connection:
            await connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"'.encode())
    except (psycopg.Error, PoolTimeout) as error:
        await pool.close()
        message = f"checkpoints cannot be kept in the server's store: {type(error).__name__}."
        raise EngineUnavailable(
            message, hint="its user has to be allowed to create a schema; see server.store"
        ) from error
    return pool
