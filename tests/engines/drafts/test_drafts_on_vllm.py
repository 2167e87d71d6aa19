"""Real vLLM, float32: with drafts every request is answered token for token as without.

Stop strings, schemas, tools, lengths, batches of 1 to 16 that requests join and leave, sampled ones among them,
prefixes that are cached, preemption (a small cache), cancelling, drafts of every kind. The long version runs 1,300
cases, of which a thousand can be compared, on the bundled model, and says of what they were (`pytest -s`).
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest
from engines.drafts.draft_cases import DraftCase, batches, cases, drafts_of_case

from teola_plugin.engines import model_cache
from teola_plugin.engines.drafts.draft_lengths import SHARES, longest_drafts, step_durations
from teola_plugin.engines.vllm import VllmEngine
from teola_plugin.engines.vllm.drafts.worker import SET_LONGEST_DRAFTS, SET_STEP_DURATIONS
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Done, Failed, Piece, Request

if TYPE_CHECKING:
    from tests.conftest import SessionLlm

SMALL_CACHE = {"kv_cache_memory_bytes": 7 << 20, "max_model_len": 704, "block_size": 32}
"""28 blocks of the bundled model: half a dozen of these requests do not fit, and some are preempted."""
NAMED = {
    *("greedy", "sampled", "sampled with a seed", "stop strings", "a schema", "tools", "beyond the end token"),
    *("ended by its length", "wrong drafts", "cancelled", "a prefix that was cached", "preempted"),
    *("alone", "beside others", "beside a sampled one"),
    *(f"its answer as a draft, {how}" for how in ("right", "cut", "longer", "changed", "special", "gaps")),
}
"""What the long version has to come across."""


@dataclass
class Comparison:
    """`differ`: cases that came out otherwise, both answers. `kinds`: how many cases were of what."""

    differ: dict[int, tuple[Any, Any]] = field(default_factory=dict)
    kinds: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    drafted: int = 0
    accepted: int = 0


async def answer(
    engine: VllmEngine, name: str, case: DraftCase, drafts: tuple[str, ...] = (), found: Comparison | None = None
) -> Any:
    request = Request(name, PrimitiveKind.PREFILLING, case.payload, tenant="t", app="a", stream=True, drafts=drafts)
    async with aclosing(engine.execute([request])) as results:
        async for result in results:
            if isinstance(result, Failed):
                return repr(result.error)
            if isinstance(result, Done):
                if found is not None:
                    count(found, result)
                return result.value.text, result.value.finish_reason, result.value.completion_tokens
            assert isinstance(result, Piece)
    raise AssertionError(name)


def count(found: Comparison, result: Done) -> None:
    value: Any = result.value
    found.drafted += value.drafted
    found.accepted += value.accepted
    found.kinds["a prefix that was cached"] += value.cached_tokens > 0
    found.kinds["preempted"] += result.stats["preempted"] > 0
    found.kinds["ended by its length"] += value.finish_reason == "length"


async def run_one_by_one(engine: VllmEngine, given: Sequence[DraftCase]) -> list[Any]:
    return [await answer(engine, f"alone-{i}", case) for i, case in enumerate(given)]


async def run_in_batches(engine: VllmEngine, given: Sequence[DraftCase], plain: Sequence[Any], seed: int) -> Comparison:
    """Run batch after batch. Requests arrive one after the other, and some are cancelled."""
    rng, found = random.Random(seed), Comparison()

    async def one(i: int, late: float) -> None:
        await asyncio.sleep(late)
        case, text = given[i], plain[i][0] if isinstance(plain[i], tuple) else ""
        call = answer(engine, f"{seed}-{i}", case, drafts_of_case(case, text), found)
        try:
            got = await asyncio.wait_for(call, case.cancelled_after or None)
        except TimeoutError:
            assert case.cancelled_after
            found.kinds["cancelled"] += 1
            return
        if case.payload.sampling.greedy or case.payload.sampling.seed is not None:
            found.compared += 1
            if got != plain[i]:
                found.differ[i] = plain[i], got

    for batch in batches(range(len(given)), seed):
        spread = rng.choice((0.0, 0.05, 0.3))
        await asyncio.gather(*(one(i, rng.random() * spread) for i in batch))
        count_batch(found, [given[i] for i in batch])
        if rng.random() < 0.2:
            await engine.reset()
    return found


def count_batch(found: Comparison, batch: Sequence[DraftCase]) -> None:
    found.kinds.update(kind for case in batch for kind in case.kinds)
    found.kinds["alone" if len(batch) == 1 else "beside others"] += len(batch)
    greedy = [case.payload.sampling.greedy for case in batch]
    found.kinds["beside a sampled one"] += 0 if all(greedy) else sum(greedy)


WEIGHED = [(16, 0.6, [(0, 1.0), (1, 1.02), (64, 1.4), (256, 4.0)])]
"""A machine on which drafts of several are worth their while, some cut and some whole: see `draft_lengths`."""


async def weigh(engine: VllmEngine) -> None:
    await engine.call_proposer(SET_LONGEST_DRAFTS, [(16, (16,) * SHARES)])
    await engine.call_proposer(SET_STEP_DURATIONS, WEIGHED)


async def compared(count: int, seed: int, model: str, *, weighed: bool = False) -> Comparison:
    """Run cases one by one on an engine without drafts, and in batches on one with them."""
    given = list(cases(seed, count))
    plainly = VllmEngine("plain", model, cores="0", drafts="off", engine_args=SMALL_CACHE)
    await plainly.start()
    try:
        plain = await run_one_by_one(plainly, given)
    finally:
        await plainly.stop()
    options = {"tokens": 16} if weighed else {"tokens": 16, "budget": 64}
    drafted = VllmEngine("drafted", model, cores="0", drafts=options, engine_args=SMALL_CACHE)
    await drafted.start()
    try:
        if weighed:
            await weigh(drafted)
        return await run_in_batches(drafted, given, plain, seed)
    finally:
        await drafted.stop()


@pytest.mark.vllm
def test_first_cases_are_answered_alike_with_and_without_drafts(session_llm: SessionLlm) -> None:
    """If no draft pays, none is made. The reference answers are made in this way."""
    engine, given = session_llm.engine, list(cases(11, 32))

    async def run() -> tuple[Comparison, Comparison]:
        await engine.call_proposer(SET_LONGEST_DRAFTS, [(1, (0,) * SHARES)])
        plain = await run_one_by_one(engine, given)
        await engine.call_proposer(SET_LONGEST_DRAFTS, [(16, (4,) * SHARES)])
        found = await run_in_batches(engine, given, plain, 11)
        await weigh(engine)
        return found, await run_in_batches(engine, given, plain, 12)

    try:
        found, weighed = session_llm.run(run())
    finally:
        session_llm.run(engine.call_proposer(SET_LONGEST_DRAFTS, longest_drafts(engine.profile, engine.profile.drafts)))
        session_llm.run(engine.call_proposer(SET_STEP_DURATIONS, step_durations(engine.profile)))
    assert not found.differ and not weighed.differ
    assert found.compared > 20 and found.accepted > 100
    assert weighed.compared > 20 and weighed.accepted > 100


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("weighed", [False, True], ids=["a budget", "weighed against each other"])
async def test_drafts_change_no_token_of_any_answer(weighed: bool) -> None:
    found = await compared(1300, int(weighed), str(model_cache.llm_folder()), weighed=weighed)
    print(f"\n{found.compared} compared, {found.drafted} tokens drafted, {found.accepted} of them accepted")
    for kind, number in sorted(found.kinds.items()):
        print(f"{number:5} {kind}")
    assert not found.differ
    assert found.compared >= 1000 and found.accepted > 2000
    assert {kind for kind, number in found.kinds.items() if number >= 10} >= NAMED
