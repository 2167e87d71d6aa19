"""Queries and another process, run one step at a time. Prefetches run meanwhile and must change nothing."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from typing import Any

from generated.model_cases import COLLECTION, IDS, K_ALL, WORDS, Case, Op, a_case, payloads, rows, vector
from generated.model_store import State, alike, nearest, stored

from teola_plugin.engines.fake import embed_words
from teola_plugin.graph import Query
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Chunk
from teola_plugin.runtime.query_run import QueryRun

Outside = Callable[..., Any]
"""`("put", collection, id, text)` or `("delete", collection, ids)`, done by another process."""


class Steps:
    """A controller: whose turn it is comes from the seed, and what the store holds after each step is known."""

    def __init__(self, pool: EnginePool, outside: Outside, seed: int) -> None:
        self._pool, self._outside, self._draw = pool, outside, random.Random(seed)
        self._state: State = {}
        self.wrong: list[str] = []
        self.story: list[str] = []

    def run(self, seed: int) -> list[str]:
        """Run the steps. Return what is wrong, or nothing. Each seed has a new collection of the same name."""
        self._pool.admin("store", "forget", COLLECTION).result(10)
        cases = [a_case(self._draw, faults=False, longest=0.004) for _ in range(self._draw.choice((1, 2, 3)))]
        runs = [(self._submit(f"{seed}-{n}", case), list(case.ops)) for n, case in enumerate(cases)]
        while waiting := [(run, ops) for run, ops in runs if ops]:
            if self._draw.random() < 0.25:
                self._other()
                continue
            run, ops = self._draw.choice(waiting)
            op = ops.pop(0)
            time.sleep(op.pause)
            self.story.append(f"{run.id} {op.do} {op.text} {op.ids}")
            self._step(run, op)
        for run, _ in runs:
            run.close()
        return self.wrong

    @property
    def state(self) -> State:
        return self._state

    def _submit(self, name: str, case: Case) -> QueryRun:
        self.story.append(f"{name} runs ahead:\n{case.graph}")
        return self._pool.runtime.submit(
            Query({"input": case.inputs}, id=name), case.graph, case.calls, has_original=True
        )

    def _other(self) -> None:
        id, text = self._draw.choice(IDS), f"{self._draw.choice(WORDS)} outside {self._draw.randrange(9)}"
        if self._draw.random() < 0.7:
            self.story.append(f"another process puts {id}: {text}")
            if self._outside("put", COLLECTION, id, text):
                self._state = {**self._state, id: stored(Chunk(id, text, {"by": "another"}), vector(text))}
        else:
            self.story.append(f"another process deletes {id}")
            self._outside("delete", COLLECTION, [id])
            self._state = {key: row for key, row in self._state.items() if key != id}

    def _step(self, run: QueryRun, op: Op) -> None:
        if op.do == "observe":
            run.observe(op.text, op.text)
        elif op.do == "delete":
            self._pool.admin("store", "delete", COLLECTION, list(op.ids)).result(10)
            self._state = {key: row for key, row in self._state.items() if key not in op.ids}
        elif op.do == "clear":
            self._pool.admin("store", "delete_collection", COLLECTION).result(10)
            self._state = {}
        else:
            kind, engine, requests = payloads(op)
            self._check(op, run.call(kind, engine, requests).result(15))

    def _check(self, op: Op, values: list[Any]) -> None:
        if op.do == "put":
            self._state = {**self._state, **{row.chunk.id: stored(row.chunk, row.vector) for row in rows(op)}}
        elif op.do == "search" and not alike(values[0], wanted := nearest(self._state, vector(op.text), K_ALL)):
            found = [f"{hit.id}: {hit.text}" for hit in values[0]]
            self.wrong.append(f"{self.story[-1]} found {found}, not {[f'{hit.id}: {hit.text}' for hit in wanted]}")
        elif op.do == "embed" and tuple(values[0]) != tuple(embed_words(op.text, "query")):
            self.wrong.append(f"{self.story[-1]} gave another vector")
