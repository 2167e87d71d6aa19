"""Reading what an engine gave: every result of a batch, the one end of each request, whether two values agree."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from teola_plugin.engines.base import Engine
from teola_plugin.requests.payloads import Generation, Warmed
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Done, Failed, Result

SECONDS = 60.0
"""That a batch may take."""


async def collect(engine: Engine, batch: Sequence[Request]) -> list[Result]:
    """Return all results of a batch. Raise TimeoutError if the engine does not end it in time."""
    async with asyncio.timeout(SECONDS):
        return [result async for result in engine.execute(batch)]


def ends(found: Sequence[Result], batch: Sequence[Request]) -> dict[str, Done | Failed]:
    """The end of each request of the batch, in its order; asserts that each has exactly one, with nothing after it."""
    last: dict[str, Done | Failed] = {}
    for result in found:
        assert result.request_id not in last, f"{result.request_id} went on after its end"
        if isinstance(result, Done | Failed):
            last[result.request_id] = result
    assert last.keys() == {request.id for request in batch}, "not every request ended, or others did"
    return {request.id: last[request.id] for request in batch}


def survives(result: Result, copy: Any) -> None:
    assert [type(copy), copy.request_id] == [type(result), result.request_id]
    if isinstance(result, Failed):
        before, after = result.error, copy.error
        assert [type(after), str(after), after.retryable] == [type(before), str(before), before.retryable]
    elif isinstance(result, Done):
        assert same(copy.value, result.value)


def same(one: Any, other: Any) -> bool:
    """Return True if two values are equal; the number of cached prompt tokens does not count."""
    if isinstance(one, Generation) and isinstance(other, Generation):
        return (one.text, one.finish_reason) == (other.text, other.finish_reason)
    if isinstance(one, Warmed) and isinstance(other, Warmed):
        return True
    equal = one == other
    return bool(equal.all()) if hasattr(equal, "all") else bool(equal)


def children() -> set[int]:
    """Living child processes of this one; empty where there is no /proc."""
    found = set()
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state not in "ZX":
            found.add(int(entry.name))
    return found
