"""Real vLLM, float32: with drafts every request is answered token for token as without.

Stop strings, schemas, tools, lengths, batches of 1 to 16 that requests join and leave, sampled ones among them,
prefixes that are cached, preemption (a small cache), cancelling, drafts of every kind.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from typing import Any

import pytest
from engines.drafts.draft_cases import DraftCase, batches, cases, drafts_of_case

from teola_plugin.engines.bundled import files
from teola_plugin.engines.vllm import VllmEngine
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Done, Failed, Piece

SMALL_CACHE = {"kv_cache_memory_bytes": 24 << 20, "max_model_len": 1024}
"""A dozen of these requests do not fit: some are preempted."""


drafted_tokens: list[float] = []
"""Of each answer."""


async def answer(engine: VllmEngine, name: str, case: DraftCase, drafts: tuple[str, ...] = ()) -> Any:
    request = Request(name, PrimitiveKind.PREFILLING, case.asked, tenant="t", app="a", stream=True, drafts=drafts)
    async with aclosing(engine.execute([request])) as results:
        async for result in results:
            if isinstance(result, Failed):
                return repr(result.error)
            if isinstance(result, Done):
                drafted_tokens.append(result.stats["drafted"])
                return result.value.text, result.value.finish_reason, result.value.completion_tokens
            assert isinstance(result, Piece)
    raise AssertionError(name)


async def alone(engine: VllmEngine, given: Sequence[DraftCase]) -> list[Any]:
    return [await answer(engine, f"alone-{i}", case) for i, case in enumerate(given)]


async def together(engine: VllmEngine, given: Sequence[DraftCase], plain: Sequence[Any], seed: int) -> dict[int, Any]:
    """Batch after batch; requests come one after the other, and some leave."""
    rng, found = random.Random(seed), dict[int, Any]()

    async def one(i: int) -> None:
        await asyncio.sleep(rng.random() * 0.05)
        case, text = given[i], plain[i][0] if isinstance(plain[i], tuple) else ""
        asked = answer(engine, f"{seed}-{i}", case, drafts_of_case(case, text))
        try:
            found[i] = await asyncio.wait_for(asked, case.cancelled_after or None)
        except TimeoutError:
            assert case.cancelled_after

    for batch in batches(range(len(given)), seed):
        await asyncio.gather(*map(one, batch))
        if rng.random() < 0.2:
            await engine.reset()
    return found


async def compared(count: int, seed: int, model: str) -> tuple[dict[int, tuple[Any, Any]], int, int]:
    """Cases that came out otherwise; how many were compared; how many tokens were drafted."""
    given = list(cases(seed, count))
    seeded = [case.asked.sampling.greedy or case.asked.sampling.seed is not None for case in given]
    plainly = VllmEngine("plain", model, cores="0", drafts="off", engine_args=SMALL_CACHE)
    await plainly.start()
    plain = await alone(plainly, given)
    await plainly.stop()
    drafted = VllmEngine("drafted", model, cores="0", drafts={"tokens": 16, "budget": 64}, engine_args=SMALL_CACHE)
    await drafted.start()
    try:
        found = await together(drafted, given, plain, seed)
    finally:
        await drafted.stop()
    differ = {i: (plain[i], got) for i, got in found.items() if seeded[i] and got != plain[i]}
    return differ, sum(seeded[i] for i in found), int(sum(drafted_tokens))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(5))
async def test_token_for_token_as_without_drafts(seed: int) -> None:
    differ, count, tokens = await compared(200, seed, str(files.llm_folder()))
    assert not differ
    assert count > 150 and tokens > 1000
