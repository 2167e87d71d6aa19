"""The statements of full-text search. One table holds the documents of all engines; `corpus` tells them apart.

A question is searched by any of its words (`plainto_tsquery` with "or" between them): few documents have all words of
a question. Titles weigh more than texts; the rank is divided by 1 + log(length), so that long texts do not win alone.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from teola_plugin.requests.payloads import Chunk, Hit, SearchText

if TYPE_CHECKING:
    from psycopg import AsyncConnection

    Connection = AsyncConnection[Any]

_SCHEMA = """
CREATE SCHEMA IF NOT EXISTS teola;
CREATE TABLE IF NOT EXISTS teola.texts (
  corpus text NOT NULL, id text NOT NULL, seq int NOT NULL, body text NOT NULL, metadata json NOT NULL,
  words tsvector NOT NULL, PRIMARY KEY (corpus, id));
CREATE INDEX IF NOT EXISTS texts_words ON teola.texts USING gin (words);
"""
_INSERT = """
INSERT INTO teola.texts (corpus, id, seq, body, metadata, words)
VALUES (%s, %s, %s, %s, %s, setweight(to_tsvector(%s, %s), 'A') || setweight(to_tsvector(%s, %s), 'B'))
ON CONFLICT DO NOTHING
"""
_SEARCH = """
SELECT q.n, h.id, h.body, h.metadata, h.rank
FROM (SELECT n, replace(plainto_tsquery(%s::regconfig, asked)::text, ' & ', ' | ')::tsquery AS words
      FROM unnest(%s::text[]) WITH ORDINALITY AS given (asked, n)) AS q
CROSS JOIN LATERAL (
  SELECT t.id, t.body, t.metadata, t.seq, ts_rank(t.words, q.words, 1)::float8 AS rank
  FROM teola.texts AS t WHERE t.corpus = %s AND t.words @@ q.words ORDER BY rank DESC, t.seq LIMIT %s) AS h
ORDER BY q.n, h.rank DESC, h.seq
"""


async def prepare(conn: Connection, corpus: str, chunks: Sequence[Chunk], language: str) -> str:
    """Write the documents unless they are there; the server's version."""
    async with conn.transaction():
        await conn.execute("SET LOCAL client_min_messages = warning")
        await conn.execute("SELECT pg_advisory_xact_lock(hashtext('teola.texts'))")
        found = await (await conn.execute("SELECT to_regclass('teola.texts')")).fetchone()
        if found is None or found[0] is None:  # who may use what is there need not be allowed to create it
            await conn.execute(_SCHEMA)
        there = await (await conn.execute("SELECT count(*) FROM teola.texts WHERE corpus = %s", (corpus,))).fetchone()
        if there is None or there[0] != len(chunks):
            async with conn.cursor() as cursor:
                await cursor.executemany(_INSERT, [_row(corpus, n, chunk, language) for n, chunk in enumerate(chunks)])
    version = await (await conn.execute("SELECT current_setting('server_version')")).fetchone()
    return "" if version is None else str(version[0]).split()[0]


def _row(corpus: str, number: int, chunk: Chunk, language: str) -> tuple[Any, ...]:
    metadata = json.dumps(dict(chunk.metadata))
    title = str(chunk.metadata.get("title", ""))
    return corpus, chunk.id, number, chunk.text, metadata, language, title, language, chunk.text


async def search(conn: Connection, corpus: str, language: str, asked: Sequence[SearchText]) -> list[tuple[Hit, ...]]:
    """The hits of each search, best first, in one round trip."""
    most = max(one.k for one in asked)
    cursor = await conn.execute(_SEARCH, (language, [one.query for one in asked], corpus, most))
    found: list[list[Hit]] = [[] for _ in asked]
    async for n, address, body, metadata, rank in cursor:
        found[n - 1].append(Hit(address, body, metadata, rank))
    return [tuple(hits[: one.k]) for one, hits in zip(asked, found, strict=True)]
