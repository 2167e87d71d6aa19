"""What must hold of an LLM engine on any hardware: splitting changes no answer, faults are named, the engine returns.

Used by `benchmarks.gpu_check`. Every function takes a started `VllmEngine` and returns a dict for its report.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import random
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from teola_plugin.engines.vllm import VllmEngine
from teola_plugin.errors import EngineError, EngineUnavailable, RequestTooLarge
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import (
    UNKNOWN,
    Done,
    Failed,
    Generate,
    Generation,
    Message,
    Piece,
    Prompt,
    Request,
    Sampling,
    Warmup,
)

Report = dict[str, Any]
_numbers = itertools.count(1)
_TOGETHER = 8
WORDS = (
    *("the", "map", "of", "Paris,", "naïve", "façades;", "12", "trees", "don't", "grow", "3.14", "times", "faster"),
    *("than", "東京", "or", "🙂", "houses:", "a_b(c)"),
)


@dataclass(frozen=True, slots=True)
class Seen:
    """A request's value and its times in seconds: to the first piece, to the end, the longest pause between pieces."""

    value: Any
    first: float
    seconds: float
    gap: float


def tenant() -> str:
    """A fresh one: nothing is cached for it."""
    return f"check-{next(_numbers)}"


def chat(text: str) -> Prompt:
    return Prompt((Message("system", "Answer from the context."), Message("user", text)))


def request(payload: Generate | Warmup, whose: str = "", *, stream: bool = False) -> Request:
    warms = isinstance(payload, Warmup)
    kind = PrimitiveKind.PARTIAL_PREFILLING if warms else PrimitiveKind.PREFILLING
    return Request(f"check-{next(_numbers)}", kind, payload, tenant=whose, stream=stream, background=warms)


async def ask(engine: VllmEngine, asked: Request, on_piece: Callable[[int], object] | None = None) -> Seen:
    """Raises the request's `EngineError`. `on_piece` is called with the number of the piece."""
    began = last = time.perf_counter()
    first = gap = 0.0
    pieces = 0
    async for result in engine.execute([asked]):
        now = time.perf_counter()
        if isinstance(result, Failed):
            raise result.error
        if isinstance(result, Done):
            return Seen(result.value, first, now - began, gap)
        pieces += 1
        first, gap, last = first or now - began, max(gap, now - last) if pieces > 1 else 0.0, now
        if on_piece is not None:
            on_piece(pieces)
    raise AssertionError("execute ended without a result")


# Splitting


@dataclass(frozen=True, slots=True)
class Case:
    """A random prompt, and the same cut at a random place."""

    whole: Prompt
    prefix: Prompt

    @classmethod
    def make(cls, number: int) -> Case:
        source = random.Random(number)
        text = " ".join(source.choice(WORDS) for _ in range(source.randint(20, 160)))
        cut = source.randint(0, len(text))
        build = chat if number % 2 else lambda t: Prompt(text=t)
        return cls(build(text), build(text[:cut] + UNKNOWN))

    async def plain(self, engine: VllmEngine) -> Generation:
        seen = await ask(engine, request(Generate(self.whole, Sampling(max_tokens=16)), tenant()))
        return seen.value  # type: ignore[no-any-return]

    async def split(self, engine: VllmEngine) -> Generation:
        whose = tenant()
        warmed = await ask(engine, request(Warmup(self.prefix), whose))
        found = (await ask(engine, request(Generate(self.whole, Sampling(max_tokens=16)), whose))).value
        if found.cached_tokens != warmed.value.tokens:
            raise AssertionError(f"{warmed.value.tokens} tokens were warmed up, {found.cached_tokens} found cached")
        return found  # type: ignore[no-any-return]


async def parity(engine: VllmEngine, count: int, *, exact: bool) -> Report:
    """How many of `count` greedy answers equal those of the whole prompt alone on the engine.

    `plain_again` and `plain_together` are controls without any splitting: a split is no worse than what batching does
    anyway if its figures are theirs. With `exact` all must be equal.
    """
    cases = [Case.make(number) for number in range(count)]
    alone = await _in_turns(1, [lambda c=c: c.plain(engine) for c in cases])  # type: ignore[misc]
    ways: dict[str, tuple[int, list[Callable[[], Awaitable[Generation]]]]] = {
        "plain_again": (1, [lambda c=c: c.plain(engine) for c in cases]),  # type: ignore[misc]
        "split_alone": (1, [lambda c=c: c.split(engine) for c in cases]),  # type: ignore[misc]
        "plain_together": (_TOGETHER, [lambda c=c: c.plain(engine) for c in cases]),  # type: ignore[misc]
        "split_together": (_TOGETHER, [lambda c=c: c.split(engine) for c in cases]),  # type: ignore[misc]
    }
    equal: dict[str, int] = {}
    used = 0
    for name, (width, asked) in ways.items():
        found = await _in_turns(width, asked)
        equal[name] = sum(_answer(a) == _answer(b) for a, b in zip(alone, found, strict=True))
        used = max(used, sum(answer.cached_tokens > 0 for answer in found))
    report: Report = {"prompts": count, "prompts_with_cached_prefix": used, "equal_to_plain_alone": equal}
    return report | ({"passed": set(equal.values()) == {count} and used > count // 2} if exact else {})


async def _in_turns(width: int, asked: list[Callable[[], Awaitable[Generation]]]) -> list[Generation]:
    found: list[Generation] = []
    for start in range(0, len(asked), width):
        found += await asyncio.gather(*(make() for make in asked[start : start + width]))
    return found


def _answer(generation: Generation) -> tuple[str, str]:
    return generation.text, generation.finish_reason


# Structure and faults


async def json_schema(engine: VllmEngine) -> Report:
    schema = json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3})
    sampling = Sampling(max_tokens=400, json_schema=schema)
    found = await asyncio.gather(
        *(ask(engine, request(Generate(chat(f"List {n} things."), sampling))) for n in range(6))
    )
    lists = [json.loads(seen.value.text, strict=False) for seen in found]
    return {"lists": len(lists), "passed": all(len(items) == 3 and all(map(_is_text, items)) for items in lists)}


def _is_text(item: object) -> bool:
    return isinstance(item, str)


async def cancelling(engine: VllmEngine) -> Report:
    """A running request ends at once, and vLLM drops it too: the cache can be emptied, which needs an idle vLLM."""
    running = request(_endless("run", 2000), stream=True)
    began = 0.0
    error: EngineError | None = None
    pieces = 0
    async for result in engine.execute([running]):
        if isinstance(result, Failed):
            error = result.error
        elif isinstance(result, Piece):
            pieces += 1
            if pieces == 3:
                began = time.perf_counter()
                await engine.cancel(running.id)
    took = time.perf_counter() - began
    await asyncio.wait_for(engine.reset(), 2.0)
    return {
        "seconds": round(took, 4),
        "passed": error is not None and not error.retryable and not engine.load().requests,
    }


async def resetting(engine: VllmEngine) -> Report:
    payload = Generate(chat(" the" * 200), Sampling(max_tokens=4))
    cached = []
    for empty_first in (True, False, True):
        if empty_first:
            await engine.reset()
        cached.append((await ask(engine, request(payload))).value.cached_tokens)
    return {"cached_tokens": cached, "passed": cached[0] == cached[2] == 0 < cached[1]}


async def too_large(engine: VllmEngine) -> Report:
    limit = engine.profile.max_request_size or 0
    huge = Prompt(text=" the" * (limit + 1))
    refused = 0
    for payload in (Generate(huge), Warmup(Prompt(text=huge.text + UNKNOWN))):
        try:
            await ask(engine, request(payload))
        except RequestTooLarge as error:
            refused += str(limit) in str(error) and not error.retryable
    cut = await ask(engine, request(_endless(" the" * (limit - 40), limit, plain=True)))
    total = cut.value.prompt_tokens + cut.value.completion_tokens
    return {"limit": limit, "ends_at": total, "passed": refused == 2 and total == limit}


async def kv_load(engine: VllmEngine, tries: int = 5) -> Report:
    """The load shows the cache in use. Again if it does not: a caller without a processor hears only of the end."""
    most = 0.0

    def look(_: int) -> None:
        nonlocal most
        most = max(most, engine.load().kv_used)

    turns = 0
    while not most and turns < tries:
        await ask(engine, request(_endless(" the" * 1000, 64, plain=True), tenant(), stream=True), look)
        turns += 1
    return {"most": round(most, 5), "turns": turns, "passed": 0.0 < most <= 1.0}


async def killing(engine: VllmEngine) -> Report:
    """SIGKILL to vLLM's core while it decodes: named at once, gone until `restart`, then as new."""
    import psutil  # type: ignore[import-untyped]

    assert engine._host is not None
    children = psutil.Process(engine._host.process.pid).children()
    (core,) = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
    running = asyncio.create_task(ask(engine, request(_endless("run", 3000), stream=True)))
    await asyncio.sleep(0.3)
    os.kill(core.pid, signal.SIGKILL)
    began = time.perf_counter()
    named = await _is_unavailable(asyncio.wait_for(running, 30))
    noticed = time.perf_counter() - began
    named &= await _is_unavailable(ask(engine, request(_endless("again", 4)))) and not await engine.healthy()
    began = time.perf_counter()
    await engine.restart()
    took = time.perf_counter() - began
    back = await ask(engine, request(_endless("back", 4)))
    passed = named and back.value.completion_tokens == 4
    return {"noticed_s": round(noticed, 4), "restart_s": round(took, 2), "passed": passed}


async def _is_unavailable(work: Awaitable[object]) -> bool:
    try:
        await work
    except EngineUnavailable as error:
        return error.retryable
    return False


def _endless(text: str, tokens: int, *, plain: bool = False) -> Generate:
    """Decodes `tokens` tokens whatever they are."""
    return Generate(Prompt(text=text) if plain else chat(text), Sampling(max_tokens=tokens, ignore_eos=True))


FAULTS: dict[str, Callable[[VllmEngine], Awaitable[Report]]] = {
    "json_schema": json_schema,
    "cancel": cancelling,
    "reset": resetting,
    "too_large": too_large,
    "kv_load": kv_load,
    "kill_and_restart": killing,
}
