"""The engines on which workflows run, with a model that follows its prompt, and a record of everything observable."""

from __future__ import annotations

import asyncio
import json
import re
import threading
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import Context as CodeContext
from dataclasses import dataclass, field, replace
from typing import Any

from differential.llamaindex.recording import Recorder, plain, recorded
from llama_index.core.workflow.events import StopEvent
from support.llamaindex_engines import Library, library, reply, settings

from teola_plugin.adapters.llamaindex import TeolaLLM
from teola_plugin.engines import profiles
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore
from teola_plugin.engines.fake.base import Faults
from teola_plugin.observe.spans import QueryTrace
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import EmbedText, Generate, Prompt, Request

_SCRIPT = re.compile(r"DO (.*?) DONE", re.DOTALL)


def do(*rounds: Any) -> str:
    """Return a message that makes the model give these answers in turn: texts, or lists of tool calls."""
    return f"DO {json.dumps(rounds)} DONE"


def call(name: str, **arguments: Any) -> dict[str, Any]:
    return {"name": name, "arguments": arguments}


def said(prompt: Prompt) -> str:
    """Return the answer that the last script in the prompt has for this turn, or one made from the prompt."""
    spoken = 0
    for message in reversed(prompt.messages):
        found = _SCRIPT.search(message.content)
        if message.role == "assistant":
            spoken += 1
        elif found is not None:
            rounds = json.loads(found[1])
            return _written(rounds[spoken]) if spoken < len(rounds) else f"after {spoken}: {_tail(prompt)}"
    return reply(Generate(prompt))


def _written(turn: Any) -> str:
    if isinstance(turn, str):
        return turn
    return "I ask.\n" + "".join(f"<tool_call>{json.dumps(one)}</tool_call>" for one in turn)


def _tail(prompt: Prompt) -> str:
    return " ".join(m.content for m in prompt.messages[-3:])[-80:]


# ------------------------------------------------------------ engines


@dataclass
class Reached:
    """The prompts and texts that reached the engines."""

    prompts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    broken: str = ""
    """The model fails on prompts with this text."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def clear(self) -> None:
        self.prompts, self.texts = [], []

    def asked(self, prompt: Prompt) -> None:
        with self.lock:
            self.prompts.append(prompt.flat())


class _Embedder(FakeEmbedder):
    reached: Reached

    def _value(self, request: Request) -> tuple[float, ...]:
        payload: EmbedText = request.payload
        with self.reached.lock:
            self.reached.texts.append(payload.text)
        return super()._value(request)


@dataclass(frozen=True)
class Stage:
    """The parts from which workflows are built."""

    pool: EnginePool
    llm: TeolaLLM
    library: Library
    reached: Reached
    recorder: Recorder


@contextmanager
def stage() -> Iterator[Stage]:
    reached, recorder = Reached(), Recorder()

    def answer(prompt: Prompt, _: Any) -> str:
        reached.asked(prompt)
        return said(prompt)

    def breaks(request: Request) -> bool:
        asked = request.payload
        return bool(reached.broken) and isinstance(asked, Generate) and reached.broken in asked.prompt.flat()

    keeps = replace(profiles.noop()["llm"], prefix_caching=True)
    model = FakeLLM("llm", keeps, answer, faults=Faults(fail_on=breaks, retryable=False))
    embedder = _Embedder("embedder")
    embedder.reached = reached
    with EnginePool.local([model, embedder, FakeReranker(), FakeStore()]) as pool:
        llm = TeolaLLM(pool=pool, is_function_calling_model=True, max_tokens=200)
        made = library(pool, "workflows")
        with settings(llm):
            yield Stage(pool, llm, made, reached, recorder)


# ------------------------------------------------------------ what is seen


@dataclass(frozen=True)
class Seen:
    result: str
    failed: bool
    events: tuple[str, ...]
    """Of the stream, in their order."""
    context: str
    prompts: Counter[str]
    texts: frozenset[str]
    spans: Counter[str]
    instrumented: Counter[str]
    trace: QueryTrace | None = field(default=None, compare=False)


Play = Callable[[Any, "Told"], Awaitable[Any]]
"""Runs a workflow, and tells what is heard of it."""


class Told:
    """Records the events and contexts of a run."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.contexts: list[Any] = []

    async def listen(self, handler: Any, heard: Callable[[Any, Any], Any] = lambda handler, event: None) -> Any:
        """Record all events, then return the result. `heard` may answer an event."""
        async for event in handler.stream_events(expose_internal=True):
            self.events.append(anonymous(f"{type(event).__name__} {plain(event)} {plain(dict(event))}"))
            heard(handler, event)
            if isinstance(event, StopEvent):
                break
        try:
            return await handler
        finally:
            self.keep(handler.ctx)

    def keep(self, ctx: Any) -> None:
        """Record the context as it would be saved now."""
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Skipping serialization of known unserializable key")  # memories
            self.contexts.append(ctx.to_dict())


def see(stage: Stage, workflow: Any, play: Play) -> Seen:
    """Run a workflow with cleared records. Return everything observable; an exception is a result, too."""
    stage.reached.clear()
    stage.recorder.clear()
    stage.pool.reset()
    told, failed = Told(), False
    with recorded(stage.recorder):
        try:
            result = plain(CodeContext().run(asyncio.run, play(workflow, told)))  # type: ignore[arg-type]
        except Exception as error:
            result, failed = plain(error), True
    trace = workflow.last_trace() if hasattr(workflow, "last_trace") else None
    saved = json.dumps(told.contexts, sort_keys=True, default=plain)
    return Seen(
        anonymous(result),
        failed,
        tuple(told.events),
        anonymous(saved),
        Counter(map(anonymous, stage.reached.prompts)),
        frozenset(stage.reached.texts),
        _counted(stage.recorder.spans),
        _counted(stage.recorder.events),
        trace,
    )


def _counted(some: Counter[str]) -> Counter[str]:
    found: Counter[str] = Counter()
    for key, n in some.items():
        found[anonymous(key)] += n
    return found


_RANDOM = (
    (re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"), "#"),
    (re.compile(r"call_[0-9a-f]{24}"), "call#"),
    (re.compile(r"\b1[78]\d{8}\.\d+"), "now"),
    (re.compile(r"\(query \S+, primitive \S+\)|request \S*\d\S*|call#?\d+"), "(a request)"),
    (re.compile(r"""cached_tokens(\\*["'])?: \d+"""), "cached"),
    (re.compile(r"""elapsed_alive(\\*["'])?: [\d.e-]+"""), "alive"),
    (re.compile(r"""elapsed_seconds(\\*["'])?[:=] ?[\d.e-]+"""), "elapsed"),
    (re.compile(r"""failed_at(\\*["'])?[:=] ?(datetime\S+|[\d.e-]+)"""), "failed_at"),
    (re.compile(r"""run_id(\\*["'])?[:=] ?(\\*["'])?[\w-]{10}"""), "run_id"),
)
"""Made anew in each run: names of requests, runs and calls; times; how much of a prompt was found in a cache."""


def anonymous(text: str) -> str:
    for pattern, name in _RANDOM:
        text = pattern.sub(name, text)
    return text


def differences(before: Seen, after: Seen, *, raced: bool) -> list[str]:
    """Return the differences of two runs, or an empty list.

    With `raced`, some steps run in parallel. Their order, and how often a step that collects events runs, depend on
    timing, so contexts, and events that name workers, are not compared.
    """
    found = []
    if before.result != after.result:
        found.append(f"result: {before.result}\n  then: {after.result}")
    told, then = (_by_chance(one.events) if raced else one.events for one in (before, after))
    for i, (one, other) in enumerate(zip(told, then, strict=False)):
        if one != other:
            found.append(f"event {i}: {one}\n  then: {other}")
            break
    if len(told) != len(then):
        found.append(f"events: {len(told)}, then {len(then)}")
    if before.context != after.context and not raced:
        found.append(f"context: {before.context}\n  then: {after.context}")
    for what in ("prompts", "spans", "instrumented"):
        old, new = getattr(before, what), getattr(after, what)
        if (set(old) != set(new)) if raced and what != "prompts" else (old != new):
            found.append(f"{what}: missing {old - new}, more {new - old}")
    if before.texts != after.texts:
        found.append(f"texts: {before.texts ^ after.texts}")
    return found


def _by_chance(events: Iterable[str]) -> list[str]:
    return sorted(event for event in events if not event.startswith("StepStateChanged"))
