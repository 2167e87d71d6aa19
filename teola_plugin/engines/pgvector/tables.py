"""What one engine knows of where its collections lie, and their versions; a collection that it meets is counted."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from teola_plugin.engines.pgvector import sql, versions
from teola_plugin.requests.payloads import Version


class Tables:
    """Found once, then remembered, until a statement shows that others have changed them."""

    def __init__(self) -> None:
        self._known: dict[str, sql.Table] = {}

    def clear(self) -> None:
        self._known.clear()

    def forget(self, collection: str) -> None:
        self._known.pop(collection, None)

    async def meet(self, conn: sql.Connection, collection: str, dimensions: Set[int]) -> sql.Table | Version:
        """Return the table for vectors of these dimensions; the collection's version if there is no table."""
        known = self._known.get(collection)
        if known is not None and dimensions <= {known.dimension}:
            return known
        found = await sql.look(conn, collection)  # with another dimension it may have been made anew
        if isinstance(found, Version):
            self.forget(collection)
            return found
        if found.counted:
            found = replace(found, counted=await versions.watch(conn, collection, found.place) is not None)
        self._known[collection] = found
        return found

    async def version(self, conn: sql.Connection, collection: str) -> Version | None:
        """Return the version of a collection; None if not all writes to its table are counted."""
        for _ in range(2):
            table = await self.meet(conn, collection, frozenset())
            if isinstance(table, Version):
                return table
            found = await versions.read(conn, table.place) if table.counted else None
            if found is not None or not table.counted:
                return found
            self.forget(collection)  # made anew, or its triggers are gone
        return None
