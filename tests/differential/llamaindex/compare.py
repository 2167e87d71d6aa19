"""Records one call with everything observable, and compares two of them."""

from __future__ import annotations

import asyncio
import re
import threading
from collections import Counter
from collections.abc import Callable, Coroutine
from contextvars import Context
from dataclasses import dataclass
from typing import Any

from differential.llamaindex.recording import Recorder, plain, recorded
from llama_index.core.base.response.schema import AsyncStreamingResponse, StreamingResponse
from llama_index.core.schema import NodeWithScore, QueryBundle, TextNode
from support.request_counts import rows

from benchmarks.llamaindex.kits import Kit


@dataclass(frozen=True)
class Seen:
    result: str
    failed: bool
    callbacks: Counter[str]
    events: Counter[str]
    spans: Counter[str]
    prompts: Counter[str]
    """That reached the model."""
    texts: Counter[str]
    """That reached the embedder."""
    wasted: int = 0
    """Early work that nobody asked for, as the trace of the call counts it."""
    rows: tuple[str, ...] = ()
    """What the pool's store holds afterwards."""


# ------------------------------------------------------------ ways to call

CUT = "|"
"""Where a stream was cut into chunks."""


def read(response: Any) -> str:
    """Read a response and its stream to the end."""
    if isinstance(response, StreamingResponse):
        return _streamed(response, list(response.response_gen))
    return plain(response)


def _streamed(response: Any, chunks: list[str]) -> str:
    shown = CUT.join(chunks)
    return f"{type(response).__name__} {shown} {plain(response.source_nodes)} {plain(response.metadata)}"


async def aread(response: Any) -> str:
    if isinstance(response, AsyncStreamingResponse):
        return _streamed(response, [chunk async for chunk in response.async_response_gen()])
    return read(response)


def some_nodes() -> list[NodeWithScore]:
    """Return nodes for `synthesize`."""
    texts = ("Oats are sown in spring. " * 6, "Ivy climbs the walls. " * 6, "Lambs eat oats and ivy. " * 6)
    return [
        NodeWithScore(node=TextNode(id_=f"given-{i}", text=text, metadata={"n": i}), score=1 / (i + 1))
        for i, text in enumerate(texts)
    ]


async def _aquery(engine: Any, given: str) -> str:
    return await aread(await engine.aquery(given))


async def _asynthesize(engine: Any, given: str) -> str:
    more = some_nodes()[:1]
    return await aread(await engine.asynthesize(QueryBundle(given), some_nodes(), additional_source_nodes=more))


def _chat(engine: Any, given: str) -> str:
    answers = [engine.chat(given), engine.chat("And then?")]
    return f"{plain(answers)} {plain(engine.chat_history)}"


async def _achat(engine: Any, given: str) -> str:
    answers = [await engine.achat(given), await engine.achat("And then?")]
    return f"{plain(answers)} {plain(engine.chat_history)}"


def _stream_chat(engine: Any, given: str) -> str:
    first = engine.stream_chat(given)
    chunks = CUT.join(first.response_gen)
    if first.write_response_to_history_thread is not None:
        first.write_response_to_history_thread.join(10)
    return f"{type(first).__name__} {chunks} {plain(first.source_nodes)} {plain(engine.chat_history)}"


async def _astream_chat(engine: Any, given: str) -> str:
    first = await engine.astream_chat(given)
    chunks = CUT.join([chunk async for chunk in first.async_response_gen()])
    if first.awrite_response_to_history_task is not None:
        await first.awrite_response_to_history_task
    return f"{type(first).__name__} {chunks} {plain(first.source_nodes)} {plain(engine.chat_history)}"


async def _run(engine: Any, given: str) -> str:
    return plain(await engine.run(user_msg=given))


def _loop(make: Callable[[Any, str], Coroutine[Any, Any, str]]) -> Callable[[Any, str], str]:
    return lambda engine, given: asyncio.run(make(engine, given))


WAYS: dict[str, Callable[[Any, str], str]] = {
    "query": lambda engine, given: read(engine.query(given)),
    "query_bundle": lambda engine, given: read(engine.query(QueryBundle(given, custom_embedding_strs=[given, "two"]))),
    "aquery": _loop(_aquery),
    "retrieve": lambda engine, given: plain(engine.retrieve(QueryBundle(given))),
    "aretrieve": _loop(lambda engine, given: _plainly(engine.aretrieve(QueryBundle(given)))),
    "synthesize": lambda engine, given: read(engine.synthesize(QueryBundle(given), some_nodes())),
    "asynthesize": _loop(_asynthesize),
    "chat": _chat,
    "achat": _loop(_achat),
    "stream_chat": _stream_chat,
    "astream_chat": _loop(_astream_chat),
    "run": _loop(_run),
}


async def _plainly(work: Coroutine[Any, Any, Any]) -> str:
    return plain(await work)


# ------------------------------------------------------------ comparing


def see(kit: Kit, recorder: Recorder, engine: Any, way: str, given: str) -> Seen:
    """Make the call with cleared records. Return everything observable; an exception is a result, too."""
    kit.fresh()
    recorder.clear()
    failed = False
    with recorded(recorder):
        try:
            result = Context().run(WAYS[way], engine, given)  # LlamaIndex leaves its stack of events in the context
        except Exception as error:
            result, failed = plain(error), True
    settled()
    trace = engine.last_trace() if hasattr(engine, "last_trace") else None
    wasted = trace.wasted()[0] if trace else 0
    counters = (Counter(some) for some in (recorder.callbacks, recorder.events, recorder.spans))
    held = tuple(rows(kit.pool.engine("store"))) if kit.pool is not None else ()
    return Seen(result, failed, *counters, *kit.ledger.reached, wasted, held)


def settled() -> None:
    """Wait for prefetched calls that were under way when the call failed."""
    for thread in threading.enumerate():
        if thread.name in ("teola-early", "teola-ahead"):
            thread.join(10)
            assert not thread.is_alive(), thread.name


def differences(before: Seen, after: Seen, *, merged: bool = False) -> list[str]:
    """Return the differences of two calls, or an empty list.

    With `merged`, equal texts may be embedded once, and prefetches may be wasted if they are counted. After an error
    only the error is compared, since it depends on timing how far parallel parts get, in the original as well.
    """
    found = []
    if anonymous(before.result) != anonymous(after.result):
        found.append(f"result: {before.result}\n  then: {after.result}")
    if before.rows != after.rows:
        gone, new = (sorted({*one} - {*other}) for one, other in ((before.rows, after.rows), (after.rows, before.rows)))
        found.append(f"stored: missing {gone}, more {new}")
    if before.failed:
        return found
    for what in ("callbacks", "events", "spans"):
        old, new = _anonymous(getattr(before, what)), _anonymous(getattr(after, what))
        if old != new:
            found.append(f"{what}: missing {_listed_counts(old - new)}, more {_listed_counts(new - old)}")
    return found + _reached(before, after, merged)


def _reached(before: Seen, after: Seen, merged: bool) -> list[str]:
    found = []
    for what in ("prompts", "texts"):
        old, new = (_anonymous(getattr(one, what)) for one in (before, after))
        fewer, more = old - new, new - old
        if merged:
            fewer = fewer - Counter({key: n for key, n in fewer.items() if what == "texts" and new[key]})
            more = more if sum(more.values()) > after.wasted else Counter()
        if fewer or more:
            found.append(f"{what}: missing {_listed_counts(fewer)}, more {_listed_counts(more)}")
    return found


def _listed_counts(some: Counter[str]) -> str:
    return "".join(f"\n    {n} x {key[:600]}" for key, n in sorted(some.items())) or "nothing"


def anonymous(text: str) -> str:
    """Return a text without names and numbers of requests, and without tokens of prompts that contain them."""
    found = re.sub(r"\(query \S+, primitive \S+\)", "(of a query)", re.sub(r"request \S*\d\S*", "request #", text))
    return found if found == text else re.sub(r"(prompt|total)_tokens': \d+", r"\1_tokens': #", found)


def _anonymous(some: Counter[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for key, n in some.items():
        found[anonymous(key)] += n
    return found
