"""Records everything observable about one call of a Runnable: result, types, events, prompts, errors."""

from __future__ import annotations

import asyncio
import gc
import re
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.messages import BaseMessage, BaseMessageChunk
from langchain_core.runnables import Runnable
from support import garbage


class Recorder(BaseCallbackHandler):
    """Events as (event, name, tags, names of the parents up to the root, inputs or outputs); any thread."""

    run_inline = True

    def __init__(self) -> None:
        self.events: Counter[Any] = Counter()
        self.prompts: Counter[str] = Counter()
        self._names: dict[UUID, tuple[str, ...]] = {}
        self._lock = threading.Lock()

    def _begin(self, event: str, run_id: UUID, parent: UUID | None, name: Any, tags: Any, given: Any) -> None:
        with self._lock:
            above = self._names.get(parent, ("?",)) if parent is not None else ()
            self._names[run_id] = (*above, str(name))
            self.events[event, self._names[run_id], tuple(tags or ()), plain(given)] += 1

    def _finish(self, event: str, run_id: UUID, value: Any) -> None:
        with self._lock:
            self.events[event, self._names.get(run_id, ("?",)), (), plain(value)] += 1

    def on_chain_start(self, serialized, inputs, *, run_id, parent_run_id=None, tags=None, name=None, **_):  # type: ignore[no-untyped-def]
        self._begin("chain_start", run_id, parent_run_id, name, tags, inputs)

    def on_chat_model_start(self, serialized, messages, *, run_id, parent_run_id=None, tags=None, name=None, **_):  # type: ignore[no-untyped-def]
        self.prompts[str([plain(m) for m in messages[0]])] += 1
        self._begin("chat_model_start", run_id, parent_run_id, name, tags, messages)

    def on_retriever_start(self, serialized, query, *, run_id, parent_run_id=None, tags=None, name=None, **_):  # type: ignore[no-untyped-def]
        self._begin("retriever_start", run_id, parent_run_id, name, tags, query)

    def on_llm_start(self, serialized, prompts, *, run_id, parent_run_id=None, tags=None, name=None, **_):  # type: ignore[no-untyped-def]
        self.prompts[str(prompts)] += 1
        self._begin("llm_start", run_id, parent_run_id, name, tags, prompts)

    def on_tool_start(self, serialized, given, *, run_id, parent_run_id=None, tags=None, name=None, **_):  # type: ignore[no-untyped-def]
        self._begin("tool_start", run_id, parent_run_id, name or (serialized or {}).get("name"), tags, given)

    def on_tool_end(self, output, *, run_id, **_):  # type: ignore[no-untyped-def]
        self._finish("tool_end", run_id, output)

    def on_tool_error(self, error, *, run_id, **_):  # type: ignore[no-untyped-def]
        self._finish("tool_error", run_id, repr(error))

    def on_chain_end(self, outputs, *, run_id, **_):  # type: ignore[no-untyped-def]
        self._finish("chain_end", run_id, outputs)

    def on_llm_end(self, response, *, run_id, **_):  # type: ignore[no-untyped-def]
        self._finish("llm_end", run_id, [[plain(g.text) for g in gs] for gs in response.generations])

    def on_retriever_end(self, documents, *, run_id, **_):  # type: ignore[no-untyped-def]
        self._finish("retriever_end", run_id, documents)

    def on_chain_error(self, error, *, run_id, **_):  # type: ignore[no-untyped-def]
        self._finish("chain_error", run_id, repr(error))

    def on_llm_error(self, error, *, run_id, **_):  # type: ignore[no-untyped-def]
        self._finish("llm_error", run_id, type(error).__name__)

    def on_retriever_error(self, error, *, run_id, **_):  # type: ignore[no-untyped-def]
        self._finish("retriever_error", run_id, repr(error))


def plain(value: Any) -> str:
    """Return a value as text, without what differs from run to run (message ids, cached-token counts)."""
    if isinstance(value, BaseMessage):
        kind = type(value).__name__
        usage = getattr(value, "usage_metadata", None) or {}
        counts = {k: v for k, v in usage.items() if k != "input_token_details"}
        chunk = getattr(value, "chunk_position", None) if isinstance(value, BaseMessageChunk) else None
        calls = getattr(value, "tool_calls", None) or getattr(value, "tool_call_id", "")
        return f"{kind}({value.content!r}, {calls or ''}, {counts}, {value.response_metadata}, {chunk})"
    if isinstance(value, dict):
        # The branches of a parallel stream in the order of a race, in the plain object too.
        return "{" + ", ".join(f"{k!r}: {plain(v)}" for k, v in sorted(value.items())) + "}"
    if isinstance(value, list | tuple):
        return f"{type(value).__name__}[" + ", ".join(map(plain, value)) + "]"
    if hasattr(value, "to_messages"):
        return f"{type(value).__name__}({plain(value.to_messages())})"
    return f"{type(value).__name__}:{_ID.sub('#', repr(value))}"


_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""Made anew for every message, and for every document that is stored without one."""


@dataclass(frozen=True)
class Outcome:
    result: str
    events: Counter[Any]
    prompts: Counter[str]
    failed: bool = False


Way = Callable[[Runnable[Any, Any], Any, dict[str, Any]], Any]


def _stream(chain: Runnable[Any, Any], given: Any, config: dict[str, Any]) -> Any:
    return list(chain.stream(given, config))


async def _astream(chain: Runnable[Any, Any], given: Any, config: dict[str, Any]) -> Any:
    return [chunk async for chunk in chain.astream(given, config)]


def _loop(make: Callable[..., Any]) -> Way:
    return lambda chain, given, config: asyncio.run(make(chain, given, config))


WAYS: dict[str, Way] = {
    "invoke": lambda c, x, config: c.invoke(x, config),
    "ainvoke": _loop(lambda c, x, config: c.ainvoke(x, config)),
    "batch": lambda c, x, config: c.batch([x, x, x], config),
    "abatch": _loop(lambda c, x, config: c.abatch([x, x, x], config)),
    "stream": _stream,
    "astream": _loop(_astream),
}


def observe(chain: Runnable[Any, Any], way: str, given: Any, call: Way | None = None, **config: Any) -> Outcome:
    """Return the outcome of a call, made by `call` or one of `WAYS`. An exception is a result, too."""
    recorder = Recorder()
    full = {"callbacks": [recorder], "tags": ["mine"], "metadata": {"user": 7}, **config}
    failed = False
    garbage.freeze_objects()  # the collection below need not look through what was there before
    try:
        value = (call or WAYS[way])(chain, given, full)
        raced = "stream" in way and any(isinstance(chunk, dict) for chunk in value)
        result = str(sorted(map(plain, value))) if raced else plain(value)
    except Exception as error:
        result, failed = f"{type(error).__name__}: {error}", True
    gc.collect()  # generators that were not read to their end are closed, and say so
    return Outcome(result, recorder.events, recorder.prompts, failed)
