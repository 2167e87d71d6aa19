"""Records one call with everything observable, and compares two of them."""

from __future__ import annotations

import asyncio
import copy
import re
from collections import Counter
from dataclasses import dataclass
from typing import Any

from differential.cookbook.bench import Bench
from differential.recording import _ID, WAYS, Outcome, Way, observe, plain
from langchain_core.runnables import Runnable
from support.request_counts import rows

from teola_plugin.pool import EnginePool

Chain = Runnable[Any, Any]


async def _events(chain: Chain, given: Any, config: dict[str, Any]) -> list[str]:
    seen = [e async for e in chain.astream_events(given, config, version="v2")]
    return sorted(f"{e['event']} {e['name']} {e['tags']} {len(e['parent_ids'])} {plain(e['data'])}" for e in seen)


EVENTS: Way = lambda chain, given, config: asyncio.run(_events(chain, given, config))  # noqa: E731
EVERY: dict[str, Way] = {**WAYS, "astream_events": EVENTS}


@dataclass(frozen=True)
class Seen:
    outcome: Outcome
    prompts: Counter[str]
    """That reached the models."""
    texts: Counter[str]
    """That reached the embedder."""
    tools: tuple[str, ...]
    wasted: int = 0
    """Early work that nobody asked for, as the traces of the call count it."""
    written: frozenset[str] = frozenset()
    deleted: frozenset[str] = frozenset()
    """What the pool's store holds afterwards and did not before, and the other way about."""


def see(bench: Bench, chain: Chain, way: str, given: Any) -> Seen:
    """Make the call with cleared records. Return everything observable about it."""
    bench.kit.fresh()
    bench.ledger.clear()
    pool = bench.kit.pool
    there = _stored_rows(pool)
    known = {trace.query_id for trace in pool.traces} if pool is not None else set()
    outcome = observe(chain, way, copy.deepcopy(given), EVERY[way])  # some steps change their input
    last = chain.last_trace() if hasattr(chain, "last_trace") else None
    others = [trace for trace in pool.traces if trace.query_id not in known] if pool is not None else []
    wasted = sum(trace.wasted()[0] for trace in (others or [last]) if trace is not None)  # a batch is several queries
    prompts, texts = bench.ledger.reached
    return Seen(
        outcome,
        prompts,
        texts,
        tuple(bench.ledger.tools),
        wasted,
        _stored_rows(pool) - there,
        there - _stored_rows(pool),
    )


def _stored_rows(pool: EnginePool | None) -> frozenset[str]:
    """Return the rows of the pool's store, without ids that are new for every row."""
    return frozenset(_ID.sub("#", row) for row in rows(pool.engine("store"))) if pool is not None else frozenset()


def differences(before: Seen, after: Seen, way: str = "invoke", *, merged: bool = False) -> list[str]:
    """Return the differences of two calls, or an empty list.

    With `merged`, equal texts may be embedded once, and prefetches may be wasted if they are counted. After an error
    only the error is compared, since it depends on timing how far parallel parts get, in the original as well.
    """
    found = []
    if anonymous(before.outcome.result) != anonymous(after.outcome.result):
        found.append(f"result: {before.outcome.result}\n   then: {after.outcome.result}")
    for what in ("written", "deleted"):
        if (one := getattr(before, what)) != (other := getattr(after, what)):
            found.append(f"{what}: missing {sorted(one - other)}, more {sorted(other - one)}")
    if before.outcome.failed:
        return found
    old_events, new_events = _anonymous(before.outcome.events), _anonymous(after.outcome.events)
    if old_events != new_events:
        found.append(f"events: missing {dict(old_events - new_events)}, more {dict(new_events - old_events)}")
    in_order = sorted if "batch" in way else list  # the queries of a batch race
    if in_order(before.tools) != in_order(after.tools):
        found.append(f"tools: {before.tools} then {after.tools}")
    for what, old, new in (("prompts", before.prompts, after.prompts), ("texts", before.texts, after.texts)):
        fewer, more = old - new, new - old
        if merged:
            fewer = fewer - Counter({k: n for k, n in fewer.items() if what == "texts" and new[k]})
            more = more if sum(more.values()) > after.wasted else Counter()
        if fewer or more:
            found.append(f"{what}: missing {dict(fewer)}, more {dict(more)}")
    return found


def anonymous(text: str) -> str:
    """Return a text without the numbers of requests."""
    return re.sub(r"(request|query|primitive) [\w#./\[\]-]+", r"\1 #", text)


def _anonymous(events: Counter[Any]) -> Counter[str]:
    found: Counter[str] = Counter()
    for event, n in events.items():
        found[anonymous(str(event))] += n
    return found
