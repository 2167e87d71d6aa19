"""Tests of the LLM engine on real vLLM: splitting changes no answer, errors have names, nothing is left behind."""

from __future__ import annotations

import asyncio
import itertools
import json
import random
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from teola_plugin.engines.vllm.process import group_members
from teola_plugin.errors import EngineError, EngineUnavailable, RequestTooLarge
from teola_plugin.graph import PrimitiveKind as K
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
    Result,
    Sampling,
    Warmed,
    Warmup,
)

if TYPE_CHECKING:
    from tests.conftest import SessionLlm

pytestmark = pytest.mark.vllm

_numbers = itertools.count(1)
WORDS = (
    *("the", "map", "of", "Paris,", "naïve", "façades;", "12", "trees", "don't", "grow", "3.14", "times", "", ""),
    *("faster\n\nthan", "東京", "or", "🙂", "houses:", "a_b(c)"),
)


def chat(text: str) -> Prompt:
    return Prompt((Message("system", "Answer from the context."), Message("user", text)))


def generate(prompt: Prompt, tenant: str = "", stream: bool = False, **sampling: object) -> Request:
    payload = Generate(prompt, Sampling(**{"max_tokens": 8} | sampling))  # type: ignore[arg-type]
    return Request(f"r{next(_numbers)}", K.PREFILLING, payload, tenant=tenant, stream=stream)


def warm_up(prompt: Prompt, tenant: str = "") -> Request:
    return Request(f"w{next(_numbers)}", K.PARTIAL_PREFILLING, Warmup(prompt), tenant=tenant, background=True)


async def results(llm: SessionLlm, *requests: Request) -> list[Result]:
    return [result async for result in llm.engine.execute(requests)]


async def value(llm: SessionLlm, request: Request) -> Generation | Warmed:
    last = (await results(llm, request))[-1]
    if isinstance(last, Failed):
        raise last.error
    assert isinstance(last, Done)
    return last.value  # type: ignore[no-any-return]


def answer(llm: SessionLlm, request: Request) -> Generation:
    found = llm.run(value(llm, request))
    assert isinstance(found, Generation)
    return found


def random_text(source: random.Random, words: int) -> str:
    return " ".join(source.choice(WORDS) for _ in range(words))


@pytest.mark.parametrize("count", [40, pytest.param(200, marks=pytest.mark.long)])
def test_split_prompt_gives_the_unsplit_answer(session_llm: SessionLlm, count: int) -> None:
    """Random prompts and cuts; each variant has a tenant of its own, so that nothing else is cached for it."""

    async def both(number: int) -> None:
        source = random.Random(number)
        text = random_text(source, source.randint(20, 160))
        cut = source.randint(0, len(text))
        whole = chat if number % 2 else lambda t: Prompt(text=t)
        run = next(_numbers)
        plain = await value(session_llm, generate(whole(text), f"plain{run}"))
        warmed = await value(session_llm, warm_up(whole(text[:cut] + UNKNOWN), f"split{run}"))
        split = await value(session_llm, generate(whole(text), f"split{run}"))
        assert isinstance(plain, Generation) and isinstance(split, Generation) and isinstance(warmed, Warmed)
        assert (split.text, split.finish_reason) == (plain.text, plain.finish_reason), f"prompt {number} cut at {cut}"
        assert plain.cached_tokens == 0
        assert split.cached_tokens == warmed.tokens  # the cut is stable: not even a block is lost
        used.append(split.cached_tokens)

    async def everything() -> None:
        for start in range(0, count, 8):
            await asyncio.gather(*(both(number) for number in range(start, min(start + 8, count))))

    used: list[int] = []
    session_llm.run(everything(), timeout=280)
    assert len(used) == count
    assert sum(tokens > 0 for tokens in used) > count / 2


def test_warm_up_during_decoding_changes_no_answer(session_llm: SessionLlm) -> None:
    text = random_text(random.Random(7), 400)
    plain = answer(session_llm, generate(chat(text), "chunk-plain"))

    async def together() -> tuple[Warmed, list[Result]]:
        beside = asyncio.create_task(results(session_llm, generate(chat("go on"), max_tokens=150, ignore_eos=True)))
        await asyncio.sleep(0.05)
        warmed = await value(session_llm, warm_up(chat(text + UNKNOWN), "chunk"))
        assert isinstance(warmed, Warmed)
        return warmed, await beside

    warmed, beside = session_llm.run(together())
    split = answer(session_llm, generate(chat(text), "chunk"))
    assert split.text == plain.text
    assert split.cached_tokens == warmed.tokens > 4 * 256
    assert isinstance(beside[-1], Done) and beside[-1].value.completion_tokens == 150


def test_short_prefixes_are_not_warmed(session_llm: SessionLlm) -> None:
    assert session_llm.run(value(session_llm, warm_up(chat("Hi " + UNKNOWN)))) == Warmed(0)


def test_one_warmed_prefix_serves_several_branches(session_llm: SessionLlm) -> None:
    context = random_text(random.Random(3), 120)

    async def fork() -> list[Generation | Warmed]:
        warmed = await value(session_llm, warm_up(chat(context + UNKNOWN), "fork"))
        rest = [value(session_llm, generate(chat(f"{context} Question {n}?"), "fork")) for n in range(3)]
        return [warmed, *await asyncio.gather(*rest)]

    warmed, *branches = session_llm.run(fork())
    assert isinstance(warmed, Warmed) and warmed.tokens > 0
    assert all(isinstance(b, Generation) and b.cached_tokens >= warmed.tokens for b in branches)


def test_tenants_share_no_cached_prefix(session_llm: SessionLlm) -> None:
    prompt = chat(random_text(random.Random(4), 80))
    assert answer(session_llm, generate(prompt, "one")).cached_tokens == 0
    assert answer(session_llm, generate(prompt, "one")).cached_tokens > 0
    assert answer(session_llm, generate(prompt, "two")).cached_tokens == 0


def test_reset_empties_the_prefix_cache_during_requests(session_llm: SessionLlm) -> None:
    prompt = chat(random_text(random.Random(5), 80))
    answer(session_llm, generate(prompt))
    assert answer(session_llm, generate(prompt)).cached_tokens > 0

    async def reset_beside() -> None:
        beside = asyncio.create_task(results(session_llm, generate(chat("x"), max_tokens=30, ignore_eos=True)))
        await asyncio.sleep(0.02)
        await session_llm.engine.reset()
        assert isinstance((await beside)[-1], Done)

    session_llm.run(reset_beside())
    assert answer(session_llm, generate(prompt)).cached_tokens == 0


def test_streamed_pieces_add_up(session_llm: SessionLlm) -> None:
    request = generate(chat("Grüße, 東京 🙂"), stream=True, max_tokens=24)
    *pieces, last = session_llm.run(results(session_llm, request))
    assert isinstance(last, Done)
    assert "".join(p.text for p in pieces if isinstance(p, Piece)) == last.value.text
    assert sum(p.tokens for p in pieces if isinstance(p, Piece)) == last.value.completion_tokens == 24
    assert last.value.finish_reason == "length"


def test_vllm_answer_equals_transformers_answer(session_llm: SessionLlm) -> None:
    """An independent oracle for template, tokens, weights and greedy decoding."""
    transformers = pytest.importorskip("transformers")
    import torch

    folder = session_llm.engine.versions()["model"]
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    messages = [{"role": "system", "content": "Answer from the context."}, {"role": "user", "content": "Où est l'été?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, return_tensors="pt")
    made = model.generate(**ids, max_new_tokens=16, do_sample=False)[0, ids.input_ids.shape[1] :]
    found = answer(session_llm, generate(chat("Où est l'été?"), max_tokens=16))
    assert found.prompt_tokens == ids.input_ids.shape[1]
    assert found.text == tokenizer.decode(made, skip_special_tokens=True)


def test_sampling_parameters_reach_vllm(session_llm: SessionLlm) -> None:
    prompt = chat("Sample.")
    seeded = [
        answer(session_llm, generate(prompt, temperature=1.0, seed=seed, max_tokens=16)).text for seed in (1, 1, 2)
    ]
    assert seeded[0] == seeded[1] != seeded[2]
    free = answer(session_llm, generate(prompt, max_tokens=16)).text
    stop = free.split()[2]
    stopped = answer(session_llm, generate(prompt, max_tokens=16, stop=(stop, "zzz")))
    assert stopped.text == free[: free.index(stop)]
    assert stopped.stop_sequence == stop


def test_answers_follow_the_json_schema(session_llm: SessionLlm) -> None:
    schema = json.dumps({"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3})
    requests = [generate(chat(f"List {n} things."), json_schema=schema, max_tokens=400) for n in range(6)]
    ended = [r for r in session_llm.run(results(session_llm, *requests)) if isinstance(r, Done)]
    assert len(ended) == len(requests)
    for done in ended:
        items = json.loads(done.value.text, strict=False)
        assert len(items) == 3 and all(isinstance(item, str) for item in items)
        assert done.value.finish_reason == "stop"


def failure(found: Iterable[Result]) -> EngineError:
    (failed,) = [r for r in found if isinstance(r, Failed)]
    return failed.error


def test_too_large_requests_fail_alone_with_token_counts(session_llm: SessionLlm) -> None:
    huge = random_text(random.Random(6), 6000)
    fine = generate(chat("Small."))
    found = session_llm.run(results(session_llm, generate(chat(huge)), fine, warm_up(chat(huge + UNKNOWN))))
    errors = [r.error for r in found if isinstance(r, Failed)]
    assert [type(e) for e in errors] == [RequestTooLarge, RequestTooLarge]
    assert all("4096" in str(e) and "tokens" in str(e) and not e.retryable for e in errors)
    assert [r.request_id for r in found if isinstance(r, Done)] == [fine.id]


def test_output_is_cut_at_the_model_length(session_llm: SessionLlm) -> None:
    """As in vLLM itself, the request runs, and its finish reason says that it was cut."""
    found = answer(session_llm, generate(Prompt(text=" the" * 4050), max_tokens=4096, ignore_eos=True))
    assert found.finish_reason == "length"
    assert found.prompt_tokens + found.completion_tokens == 4096


def test_bad_requests_fail_alone(session_llm: SessionLlm) -> None:
    bad = [
        generate(chat("x"), json_schema="{ not a schema"),
        generate(chat("x"), temperature=-1.0),
        Request("odd", K.PREFILLING, "text"),
    ]
    for request in bad:
        error = failure(session_llm.run(results(session_llm, request)))
        assert not error.retryable and not isinstance(error, EngineUnavailable)
    assert session_llm.run(session_llm.engine.healthy())


def test_prompt_may_contain_the_placeholder_character(session_llm: SessionLlm) -> None:
    found = answer(session_llm, generate(chat(f"before {UNKNOWN} after"), max_tokens=4))
    assert found.prompt_tokens > answer(session_llm, generate(chat("before after"), max_tokens=4)).prompt_tokens


def test_cancelling_ends_queued_and_running_requests(session_llm: SessionLlm) -> None:
    async def story() -> tuple[list[Result], list[Result]]:
        engine = session_llm.engine
        running = generate(chat("run"), stream=True, max_tokens=2000, ignore_eos=True)
        seen: list[Result] = []
        async for result in engine.execute([running]):
            seen.append(result)
            if len(seen) == 3:
                await engine.cancel(running.id)
        queued = generate(chat("queue"), max_tokens=2000, ignore_eos=True)
        task = asyncio.create_task(results(session_llm, queued))
        await asyncio.sleep(0)
        await engine.cancel(queued.id)
        await engine.cancel(queued.id)
        await engine.cancel("never heard of")
        return seen, await task

    streamed, queued = session_llm.run(story())
    assert isinstance(streamed[0], Piece) and not failure(streamed).retryable and not failure(queued).retryable
    # Both are gone below as well: the cache can be emptied at once, which needs an idle vLLM.
    session_llm.run(asyncio.wait_for(session_llm.engine.reset(), 2.0))
    assert session_llm.engine.load().requests == 0


def test_closing_the_stream_aborts_the_request(session_llm: SessionLlm) -> None:
    async def leave() -> None:
        stream = session_llm.engine.execute([generate(chat("run"), stream=True, max_tokens=2000, ignore_eos=True)])
        await anext(stream)
        await stream.aclose()  # type: ignore[attr-defined]

    session_llm.run(leave())
    session_llm.run(asyncio.wait_for(session_llm.engine.reset(), 2.0))
    assert session_llm.engine.load().requests == 0


def test_load_shows_the_cache_in_use(session_llm: SessionLlm) -> None:
    async def busiest() -> float:
        most = 0.0
        prompt = Prompt(text=random_text(random.Random(8), 600))
        async for _ in session_llm.engine.execute([generate(prompt, stream=True, max_tokens=64, ignore_eos=True)]):
            most = max(most, session_llm.engine.load().kv_used)
        return most

    # A caller that got no processor meanwhile hears only of the end, when the cache is free again.
    seen = [session_llm.run(busiest()) for _ in range(5)]
    assert 0.0 < max(seen) <= 1.0


def test_load_reports_cache_tokens_by_app(session_llm: SessionLlm) -> None:
    prompt, engine = Prompt(text=random_text(random.Random(9), 300)), session_llm.engine

    async def held() -> dict[str, int]:
        """The most that each app was seen to hold at once."""
        async with asyncio.timeout(5):  # what an earlier test has asked may still be told
            while engine.load().kv_tokens:
                await asyncio.sleep(0.05)
        request = generate(prompt, max_tokens=400, ignore_eos=True)
        both = [replace(request, id=f"{request.id}-{app}", app=app) for app in ("farm", "desk")]
        most, task = dict[str, int](), asyncio.create_task(results(session_llm, *both))
        while not task.done():
            most = {app: max(tokens, most.get(app, 0)) for app, tokens in {**most, **engine.load().kv_tokens}.items()}
            await asyncio.sleep(0.02)
        async with asyncio.timeout(5):
            while engine.load().kv_tokens:
                await asyncio.sleep(0.05)
        return most

    most = session_llm.run(held())
    prompt_tokens = answer(session_llm, generate(prompt, max_tokens=1)).prompt_tokens
    assert set(most) == {"farm", "desk"}
    assert all(prompt_tokens < tokens <= prompt_tokens + 400 for tokens in most.values())


def test_measuring_gives_rising_curves(session_llm: SessionLlm) -> None:
    profile = session_llm.run(session_llm.engine.measure())
    assert 0 < profile.seconds(K.PREFILLING, 256) < profile.seconds(K.FULL_PREFILLING, 4096)
    assert 0 < profile.seconds(K.DECODING, 10) < profile.seconds(K.PARTIAL_DECODING, 100)
    assert profile.max_request_size == 4096 and profile.prefix_caching
    assert session_llm.engine.profile == profile


def test_size_learns_the_ratio_of_characters_to_tokens(session_llm: SessionLlm) -> None:
    request = generate(chat(random_text(random.Random(9), 200)))
    for _ in range(12):
        tokens = answer(session_llm, request).prompt_tokens
    assert session_llm.engine.size(request) == pytest.approx(tokens, rel=0.25)


@pytest.mark.chaos
def test_killed_vllm_is_unavailable_at_once_and_restarts(session_llm: SessionLlm) -> None:
    import os
    import signal

    import psutil

    engine = session_llm.engine
    assert engine._host is not None
    group = engine._host.process.pid
    (core,) = [p for p in psutil.Process(group).children(recursive=True) if "EngineCore" in " ".join(p.cmdline())]

    async def killed() -> list[Result]:
        found: list[Result] = []
        request = generate(chat("run"), stream=True, max_tokens=3000, ignore_eos=True)
        async for result in engine.execute([request]):
            if not found:  # at the first piece, not after some time: a starved caller may come too late
                os.kill(core.pid, signal.SIGKILL)
            found.append(result)
        return found

    error = failure(session_llm.run(killed()))
    assert isinstance(error, EngineUnavailable) and error.retryable and str(engine.log) in str(error)
    assert isinstance(failure(session_llm.run(results(session_llm, generate(chat("x"))))), EngineUnavailable)
    assert not session_llm.run(engine.healthy())
    with pytest.raises(EngineUnavailable):
        session_llm.run(engine.reset())
    session_llm.run(engine.restart(), timeout=280)
    assert group_members(group) == []
    assert answer(session_llm, generate(chat("back"))).cached_tokens == 0
