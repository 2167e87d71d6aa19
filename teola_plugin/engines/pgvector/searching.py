"""Searches of one collection, whatever others do to it meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from teola_plugin.engines.pgvector import sql, versions
from teola_plugin.engines.pgvector.rows import QueryVector
from teola_plugin.engines.pgvector.tables import Tables
from teola_plugin.engines.postgres.faults import is_missing
from teola_plugin.requests.payloads import Hit, Version

_TRIES = 3
"""Times that a search is tried while others make its collection anew."""


@dataclass(frozen=True, slots=True)
class Found:
    hits: Mapping[str, tuple[Hit, ...]]
    """By request id."""
    version: Version | None


async def search(
    conn: sql.Connection,
    tables: Tables,
    collection: str,
    asked: dict[str, QueryVector],
    fitting: Callable[[dict[str, QueryVector], sql.Table], dict[str, QueryVector]],
    tries: int = _TRIES,
) -> Found:
    """The hits by request id, and the version that they are true for.

    `fitting` gives those whose vector the table can hold, and fails the others. Raises what psycopg raises.
    """
    table = await tables.meet(conn, collection, {len(query.vector) for query in asked.values()})
    if isinstance(table, Version):
        return Found(dict.fromkeys(asked, ()), table)
    asked = fitting(asked, table)
    if not asked:
        return Found({}, None)
    try:
        found = await sql.search(conn, table, list(asked.values()))
    except Exception as error:
        if not is_missing(error) or tries == 1:
            raise
        tables.forget(collection)  # deleted meanwhile, perhaps by another process
        return await search(conn, tables, collection, asked, fitting, tries - 1)
    if table.counted and found.version is None:
        tables.forget(collection)
    if found.parts > versions.MANY_CHANGES:
        await versions.tidy(conn, table.oid)
    return Found(dict(zip(asked, found.hits, strict=True)), found.version)
