"""Another connection to the store's database, which writes plain SQL as another program does.

It can also run as a process. `python -m generated.another DSN` carries out the lines that it reads, and confirms each.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import psycopg
from generated.worlds import COLLECTIONS
from support.request_counts import row

from teola_plugin.engines.fake import embed_words
from teola_plugin.requests.payloads import Chunk


class Another:
    """A connection of its own, as another program has it: plain SQL."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def _run(self, statement: str, collection: str, *values: Any) -> list[Any] | None:
        """Run a statement, with the collection's table for `%t`.

        Do nothing and return None if there is no such table.
        """
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            found = connection.execute("SELECT place FROM teola.collections WHERE name = %s", (collection,)).fetchone()
            if found is None or found[0] is None:
                return None
            made: Any = statement.replace("%t", f"teola.{found[0]}")
            cursor = connection.execute(made, values)
            return cursor.fetchall() if cursor.description else []

    def put_now(self, collection: str, id: str, text: str) -> bool:
        """Write a row. Return True if the collection exists."""
        vector = str(list(embed_words(text, "document")))
        statement = """INSERT INTO %t (id, body, metadata, embedding) VALUES (%s, %s, '{"by": "another"}', %s)
            ON CONFLICT (id) DO UPDATE SET body = excluded.body, metadata = excluded.metadata,
            embedding = excluded.embedding"""
        return self._run(statement, collection, id, text, vector) is not None

    def delete_now(self, collection: str, ids: list[str]) -> None:
        self._run("DELETE FROM %t WHERE id = ANY(%s)", collection, ids)

    async def put(self, collection: str, id: str, text: str) -> None:
        await asyncio.to_thread(self.put_now, collection, id, text)

    async def delete(self, collection: str, ids: list[str]) -> None:
        await asyncio.to_thread(self.delete_now, collection, ids)

    def rows(self) -> list[str]:
        """Return the rows of all collections, by id."""
        statement = "SELECT id, body, metadata FROM %t ORDER BY id"
        return [f"{name} {row(Chunk(*each))}" for name in COLLECTIONS for each in self._run(statement, name) or ()]


class OtherProcess:
    """A second process, stepped by this one over its pipes."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def do(self, *step: Any) -> Any:
        """Carry out `("put", collection, id, text)` or `("delete", collection, ids)`. Return when it is done."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(step) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())


@contextmanager
def other_process(dsn: str) -> Iterator[OtherProcess]:
    command = [sys.executable, "-m", "generated.another", dsn]
    path = {"PYTHONPATH": ":".join(filter(None, sys.path))}
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **path}
    )
    try:
        yield OtherProcess(process)
    finally:
        process.communicate(timeout=10)  # closes its input: it ends


def _main(dsn: str) -> None:
    another = Another(dsn)
    for line in sys.stdin:
        do, *given = json.loads(line)
        done = another.put_now(*given) if do == "put" else another.delete_now(*given)
        print(json.dumps(done), flush=True)


if __name__ == "__main__":
    _main(sys.argv[1])
