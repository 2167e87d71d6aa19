"""Tests of fake LLMs that verify drafts: the same texts in fewer steps, with exact times."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest

from teola_plugin import EnginePool
from teola_plugin.engines import profiles
from teola_plugin.engines.drafts.draft_lengths import longest_drafts
from teola_plugin.engines.drafts.drafter import Drafter
from teola_plugin.engines.drafts.options import Drafts
from teola_plugin.engines.fake import FakeLLM, Faults, fake_engines, split_tokens
from teola_plugin.engines.machines import MACHINES
from teola_plugin.errors import TeolaError
from teola_plugin.graph import GAP, Curve, EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Done, Generate, Generation, Piece, Prompt, Request, Result, Sampling
from teola_plugin.runtime.virtual_time import run_virtual

PLAIN = profiles.rtx3090()["llm"]
DRAFTING = profiles.drafting(profiles.rtx3090())["llm"]
PREFILL, STEP, TOKEN = 0.00035, 0.0285, 0.00035

_RNG = random.Random(3)
WORDS = ["".join(_RNG.choice("bdfglmnprstk") for _ in range(4)) for _ in range(2000)]


def words(seed: object, count: int) -> str:
    return " ".join(random.Random(f"{seed}").sample(WORDS, k=count))


PASSAGE = words("passage", 120)
ANSWER = " ".join(PASSAGE.split()[20:60])
"""Forty tokens of the passage."""


def llm(profile: EngineProfile = DRAFTING, answer: str = ANSWER, **options: Any) -> FakeLLM:
    return FakeLLM("llm", profile, lambda prompt, _: answer, **options)


def make_request(name: str, prompt: str = PASSAGE, *, temperature: float = 0.0, **given: Any) -> Request:
    sampling = Sampling(temperature=temperature)
    return Request(name, PrimitiveKind.PREFILLING, Generate(Prompt(text=prompt), sampling), **given)


Timed = list[tuple[float, Result]]


async def run(engine: FakeLLM, *requests: Request, delay: float = 0.0) -> Timed:
    await asyncio.sleep(delay)
    loop = asyncio.get_running_loop()
    return [(loop.time(), result) async for result in engine.execute(requests)]


def run_requests(engine: FakeLLM, *requests: Request) -> Timed:
    return run_virtual(run(engine, *requests))


def done(found: Timed, name: str = "a") -> tuple[float, Generation, Any]:
    [(at, result)] = [(at, one) for at, one in found if isinstance(one, Done) and one.request_id == name]
    assert isinstance(result, Done)
    return at, result.value, result.stats


def steps_of(found: Timed) -> list[tuple[float, int]]:
    """Return the time of each piece, and its number of tokens."""
    return [(at, len(split_tokens(piece.text))) for at, piece in found if isinstance(piece, Piece)]


def proposed(prompt: str, answer: str, *texts: str) -> list[tuple[int, int]]:
    """Return the drafted and written tokens of each step, by the proposer's own code."""
    numbers = {token: i for i, token in enumerate(dict.fromkeys(split_tokens("".join((prompt, answer, *texts)))))}

    def ids(text: str) -> list[int]:
        return [numbers.setdefault(token, len(numbers)) for token in split_tokens(text)]

    drafter, wanted = Drafter(Drafts(), 16), ids(answer)
    drafter.set_longest_drafts(longest_drafts(DRAFTING, 16))
    row = drafter.begin("a", ("", ""), ids(prompt), len(ids(prompt)), [ids(text) for text in texts], greedy=True)
    assert row is not None
    found, at, draft = [], 0, list[int]()
    while at < len(wanted):
        agreed = next((i for i, token in enumerate(draft) if wanted[at + i : at + i + 1] != [token]), len(draft))
        new = wanted[at : at + agreed + 1]
        row.grow(new)
        found.append((len(draft), len(new)))
        at += len(new)
        draft = drafter.draft(row, 1, 1000)
    return found


def test_copied_answer_takes_the_steps_and_times_of_the_proposer() -> None:
    found = run_requests(llm(), make_request("a", stream=True))
    expected, now = [], 120 * PREFILL
    for drafted, written in proposed(PASSAGE, ANSWER):
        now += STEP + TOKEN * drafted
        expected.append((pytest.approx(now), written))
    assert steps_of(found) == expected and 4 <= len(expected) <= 8
    value = done(found)[1]
    assert value.text == ANSWER and value.completion_tokens == 40
    assert value.drafted == sum(drafted for drafted, _ in proposed(PASSAGE, ANSWER))
    assert value.accepted == 41 - len(expected), "the last step ends with what was drafted"


def test_request_without_reader_ends_at_the_same_time() -> None:
    assert done(run_requests(llm(), make_request("a")))[0] == pytest.approx(
        done(run_requests(llm(), make_request("a", stream=True)))[0]
    )


def test_engine_without_drafts_writes_one_token_a_step() -> None:
    for engine in (llm(PLAIN), llm(drafts="off"), llm(drafts=False)):
        found = run_requests(engine, make_request("a", stream=True))
        assert steps_of(found) == [(pytest.approx(120 * PREFILL + STEP * (i + 1)), 1) for i in range(40)]
        value, stats = done(found)[1:]
        assert (value.drafted, value.accepted) == (0, 0) and "drafted" not in stats
        assert engine.profile.drafts == 0
        assert engine.decoded.steps == engine.decoded.tokens == 40


def test_answer_without_matches_takes_one_step_a_token() -> None:
    new = " ".join([word for word in WORDS if word not in PASSAGE][:40])
    value = run_requests(llm(answer=new), make_request("a"))
    assert done(value)[0] == pytest.approx(120 * PREFILL + 40 * STEP)
    assert done(value)[1].drafted == 0


def test_text_of_request_is_followed_again_after_a_difference() -> None:
    before = words("before", 30)
    changed = before.split()
    changed[10] = "else"
    engine = llm(answer=" ".join(changed))
    found = run_requests(engine, make_request("a", words("prompt", 20), stream=True, drafts=(before,)))
    assert [count for _, count in steps_of(found)][:2] == [1, 10], "up to the difference, with it"
    assert [count for _, count in steps_of(found)] == [
        new for _, new in proposed(words("prompt", 20), " ".join(changed), before)
    ]
    assert done(found)[1].text == " ".join(changed)
    assert engine.decoded.steps <= 6


def test_sampled_requests_get_no_drafts() -> None:
    found = run_requests(llm(), make_request("a", temperature=0.7, drafts=(ANSWER,)))
    assert done(found)[0] == pytest.approx(120 * PREFILL + 40 * STEP)
    assert done(found)[1].drafted == 0


@pytest.mark.parametrize("drafts", ["auto", "off", {"tokens": 3}, {"lookup": False}, Drafts(tokens=64, recent=0)])
def test_output_is_the_same_with_any_draft_settings(drafts: Any) -> None:
    rng = random.Random(5)
    copied = " ".join(" ".join(PASSAGE.split()[at : at + 7]) + " " + words(at, 2) for at in rng.sample(range(110), 6))
    engine = llm(answer=copied, drafts=drafts)
    for i, wrong in enumerate(((), (copied,), (words("wrong", 80),), (copied + " and more", copied[:40]))):
        assert done(run_requests(engine, make_request(f"a{i}", drafts=wrong)), f"a{i}")[1].text == copied
    decoded = engine.decoded
    assert decoded.tokens == 4 * len(split_tokens(copied))
    assert decoded.tokens - decoded.accepted <= decoded.steps <= decoded.tokens


def test_concurrent_requests_draft_less_than_a_single_one() -> None:
    """Drafts that pay alone are too long for eight, where each of their tokens is verified eight times."""
    dear = replace(PLAIN, drafts=16, verifying={1: Curve.linear(STEP, 0.0), 8: Curve.linear(STEP, STEP)})
    single = done(run_requests(llm(dear), make_request("a")))[1]
    engine = llm(dear)
    found = run_requests(engine, *(make_request(f"r{i}") for i in range(8)))
    beside = [done(found, f"r{i}")[1] for i in range(8)]
    assert all(one.text == ANSWER for one in beside)
    assert single.drafted > 0 and min(one.drafted for one in beside) < single.drafted


def test_unmeasured_profile_verifies_at_the_cost_of_a_step() -> None:
    found = run_requests(llm(replace(DRAFTING, verifying={})), make_request("a"))
    assert 5 * STEP < done(found)[0] - 120 * PREFILL < 10 * STEP
    assert (done(found)[0] - 120 * PREFILL) / STEP == pytest.approx(round((done(found)[0] - 120 * PREFILL) / STEP))


def test_recent_outputs_of_a_tenant_are_drafted_until_forgotten() -> None:
    prompt = words("nothing", 20)

    async def main() -> list[int]:
        engine = llm(answer=words("answer", 40))
        found = []
        for i, tenant in enumerate(("t", "t", "u")):
            found.append(done(await run(engine, make_request(f"{i}", prompt, tenant=tenant)), f"{i}")[1].accepted)
        await engine.forget("t")
        found.append(done(await run(engine, make_request("3", prompt, tenant="t")), "3")[1].accepted)
        await engine.reset()
        found.append(done(await run(engine, make_request("4", prompt, tenant="t")), "4")[1].accepted)
        return found

    first, again, other, forgotten, reset = run_virtual(main())
    assert again > 30 and first == other == forgotten == reset == 0


def test_failed_and_cancelled_requests_leave_no_row() -> None:
    async def main() -> FakeLLM:
        engine = llm(faults=Faults(fail_on=lambda request: request.id == "b"))

        async def cancelled() -> None:
            await asyncio.sleep(0.15)
            await engine.cancel("c")

        await asyncio.gather(run(engine, make_request("a"), make_request("b"), make_request("c")), cancelled())
        return engine

    engine = run_virtual(main())
    assert engine._drafts is not None
    assert all(engine._drafts._drafter.running(name) is None for name in "abc")


def test_invalid_draft_options_raise() -> None:
    with pytest.raises(TeolaError) as raised:
        llm(drafts="sometimes")
    assert raised.value.hint
    with pytest.raises(ValueError, match="verifying"):
        profiles.drafting(profiles.noop())
    with pytest.raises(ValueError, match="1 to 64"):
        profiles.drafting(profiles.rtx3090(), 65)


def test_gpu_profile_matches_published_speedup_of_drafts() -> None:
    """Spec-Bench, RTX 3090: 1.74 tokens a step, 1.55 times as fast."""
    assert DRAFTING.step(10, 1) / DRAFTING.step(0, 1) == pytest.approx(1.74 / 1.55, abs=0.01)
    assert DRAFTING.step(0, 64) == pytest.approx(STEP)
    assert DRAFTING.step(4, 3) == pytest.approx(STEP + 12 * TOKEN)
    assert DRAFTING.scaled(0.5).step(10, 1) == pytest.approx(DRAFTING.step(10, 1) / 2)


@pytest.mark.parametrize("name", [name for name in MACHINES if name != "noop"])
def test_verification_times_of_each_machine_follow_its_profile(name: str) -> None:
    found = profiles.drafting(MACHINES[name]())["llm"]
    assert found.drafts == 16
    assert found.step(0, 1) == pytest.approx(found.seconds(PrimitiveKind.DECODING, 1))
    assert found.verify(3, 2) == pytest.approx(found.seconds(PrimitiveKind.PREFILLING, 6))


def test_form_of_an_answer_is_drafted_after_its_gaps() -> None:
    items = [words(i, 6) for i in range(3)]
    text = "".join(f"list item number {i} is as follows: {item}\n" for i, item in enumerate(items))
    form = "".join(f"list item number {i} is as follows: {GAP}\n" for i in range(3))
    engine, undrafted = llm(answer=text), llm(answer=text)
    value = done(run_requests(engine, make_request("a", "Write.", drafts=(form,))))[1]
    done(run_requests(undrafted, make_request("a", "Write.")))
    assert value.text == text
    assert engine.decoded.steps < undrafted.decoded.steps


def test_traces_count_drafted_and_accepted_tokens() -> None:
    from langchain_core.prompts import ChatPromptTemplate

    from teola_plugin import accelerate
    from teola_plugin.langchain import ChatTeola

    machine = profiles.scaled(profiles.drafting(profiles.rtx3090()), 0.05)
    engines = [FakeLLM("llm", machine["llm"], lambda prompt, _: ANSWER), *fake_engines(machine)[1:]]
    with EnginePool.local(engines=engines) as pool:
        chain = ChatPromptTemplate.from_template("{passage}") | ChatTeola(pool=pool, engine="llm")
        fast = accelerate(chain, pool=pool)
        assert fast.invoke({"passage": PASSAGE}).content == ANSWER
        summary = fast.last_trace().summary()
    steps = proposed(f"Human: {PASSAGE}", ANSWER)
    assert summary["drafted_tokens"] == sum(drafted for drafted, _ in steps) > 0
    assert summary["accepted_tokens"] == 41 - len(steps)
