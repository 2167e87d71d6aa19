"""Checkpoints of graphs that leave them to the server: in its store, so that they outlive it."""

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

_MOST = 60.0
"""Seconds between two looks for threads that have expired."""
_OLD = """
SELECT thread_id FROM checkpoints GROUP BY thread_id
HAVING max((checkpoint ->> 'ts')::timestamptz) <= to_timestamp(%s)
"""
_OF = "SELECT DISTINCT thread_id FROM checkpoints WHERE starts_with(thread_id, %s)"


class Checkpoints:
    """`apps`: those of the server. `keep`: seconds after its last step for which a thread is kept."""

    def __init__(self, store: Store, apps: Iterable[App], keep: float) -> None:
        """Raises `RegistrationError` for an app that cannot have them."""
        self._store, self._keep = store, keep
        self._graphs = [one for one in apps if hasattr(one.fast, "checkpointer")]
        self._ours = [one for one in apps if one.settings.checkpoints]
        for one in self._ours:
            _check(one)
        self._pool: AsyncConnectionPool[Any] | None = None
        self._saver: Any = None
        self._looked = time.time()

    async def open(self) -> None:
        """The graphs have them from here on. The store is open. Raises `EngineUnavailable`."""
        if not self._ours:
            return
        self._saver = await self._made()
        for one in self._ours:
            one.fast.checkpointer = self._saver

    async def _made(self) -> Any:
        if not self._store.dsn:
            return checkpoint_saver()
        self._pool = await _pool(self._store.dsn, self._store.pool)
        saver = checkpoint_saver(self._pool)
        await saver.setup()
        return saver

    async def close(self) -> None:
        if self._pool is not None:
            await self._pool.close()
            self._pool = None

    # ------------------------------------------------------------ forgetting

    async def forget(self, app: App, record: Record) -> None:
        """The thread of a submitted query, unless it has joined one that was named."""
        if has_checkpoints(app.fast) and not app.names_thread(record):
            await _forget(app.fast.checkpointer, [app.thread_of(record)])

    async def forget_all(self, tenant: str) -> None:
        """All threads of a tenant, in the checkpoints of all apps."""
        begin = App.threads_of(tenant)
        savers = {id(app.fast.checkpointer): app.fast.checkpointer for app in self._graphs if has_checkpoints(app.fast)}
        for saver in savers.values():
            if saver is self._saver and self._pool is not None:
                await _forget(saver, await self._threads(_OF, begin))
            else:
                found = {str(one.config["configurable"]["thread_id"]) async for one in saver.alist(None)}
                await _forget(saver, [thread for thread in found if thread.startswith(begin)])

    async def expire(self, now: float) -> None:
        """Threads in the server's store that have taken no step for so long. Looks now and then."""
        if self._pool is None or now - self._looked < min(_MOST, self._keep / 2):
            return
        self._looked = now
        await _forget(self._saver, await self._threads(_OLD, now - self._keep))

    async def _threads(self, text: str, value: Any) -> list[str]:
        assert self._pool is not None
        async with self._pool.connection() as connection:
            rows = await (await connection.execute(text.encode(), (value,))).fetchall()
        return [str(row[0]) for row in rows]


async def _forget(saver: Any, threads: Iterable[str]) -> None:
    for thread in threads:
        await saver.adelete_thread(thread)


def _check(app: App) -> None:
    if not hasattr(app.fast, "checkpointer"):
        what = f"app {app.name!r}: {app.settings.object} is no graph, and has no checkpoints."
        raise RegistrationError(what, hint="leave its checkpoints out")
    if app.fast.checkpointer:
        what = f"app {app.name!r}: {app.settings.object} has checkpoints of its own."
        raise RegistrationError(what, hint="leave checkpoints out, or compile the graph without a checkpointer")


async def _pool(dsn: str, name: str) -> AsyncConnectionPool[Any]:
    """Connections to tables that are this pool's alone. Raises `EngineUnavailable`."""
    import psycopg
    from psycopg_pool import AsyncConnectionPool, PoolTimeout

    schema = f"teola_checkpoints_{hashlib.sha256(name.encode()).hexdigest()[:16]}"

    async def configure(connection: psycopg.AsyncConnection[Any]) -> None:
        await connection.execute(f'SET search_path TO "{schema}"'.encode())

    given = {"autocommit": True, "prepare_threshold": 0}
    made = AsyncConnectionPool(dsn, min_size=1, max_size=4, open=False, kwargs=given, configure=configure)
    try:
        await made.open(wait=True, timeout=15)
        async with made.connection() as connection:
            await connection.execute(f'CREATE SCHEMA IF NOT EXISTS "{schema}"'.encode())
    except (psycopg.Error, PoolTimeout) as error:
        await made.close()
        what = f"checkpoints cannot be kept in the server's store: {type(error).__name__}."
        raise EngineUnavailable(what, hint="its user has to be allowed to create a schema; see server.store") from error
    return made
