"""Tests of fake engines in virtual time: exact latencies from the profile, values from payloads, caches and faults."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Coroutine, Sequence
from dataclasses import replace
from typing import Any

import pytest

from teola_plugin.engines import profiles
from teola_plugin.engines.base import Engine
from teola_plugin.engines.fake import (
    FakeEmbedder,
    FakeEngine,
    FakeLLM,
    FakeReranker,
    FakeStore,
    Faults,
    answer_words,
    embed_words,
    fake_engines,
    own_score,
    split_tokens,
)
from teola_plugin.errors import EngineUnavailable, RequestTooLarge
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import (
    UNKNOWN,
    Chunk,
    Done,
    EmbedText,
    Failed,
    Generate,
    Generation,
    IngestRow,
    Message,
    Piece,
    Prompt,
    Request,
    Result,
    Sampling,
    ScorePair,
    SearchVector,
    Warmed,
    Warmup,
)
from teola_plugin.runtime.virtual_time import run_virtual

K = PrimitiveKind
MACHINE = profiles.rtx3090()
PREFILL, DECODE, TOGETHER = 0.00035, 0.0285, 1.5

Timed = list[tuple[float, Result]]


def words(tokens: int, seed: str = "") -> str:
    return answer_words(f"prompt {seed}", tokens)


QUIET: dict[str, Any] = {"tells_first": False}
"""Most tests below look at ends alone."""


def llm(tokens: int = 10, **options: Any) -> FakeLLM:
    return FakeLLM("llm", MACHINE["llm"], lambda prompt, _: answer_words(prompt.flat(), tokens), **QUIET | options)


def generate(name: str, prompt: str, **options: Any) -> Request:
    return Request(name, K.PREFILLING, Generate(Prompt(text=prompt)), **options)


def embeds(*texts: str) -> list[Request]:
    return [Request(f"{i}:{text}", K.EMBEDDING, EmbedText(text)) for i, text in enumerate(texts)]


async def collect(engine: FakeEngine, batch: Sequence[Request], delay: float = 0.0) -> Timed:
    """Return results with the seconds since the loop's start."""
    await asyncio.sleep(delay)
    loop = asyncio.get_running_loop()
    return [(loop.time(), result) async for result in engine.execute(batch)]


def run_together(*work: Coroutine[Any, Any, Any]) -> list[Any]:
    async def gather() -> list[Any]:
        return await asyncio.gather(*work)

    return run_virtual(gather())


def ends(found: Timed) -> dict[str, tuple[float, Result]]:
    return {result.request_id: (at, result) for at, result in found if not isinstance(result, Piece)}


def value(found: Timed, name: str) -> Any:
    result = ends(found)[name][1]
    assert isinstance(result, Done), result
    return result.value


# ------------------------------------------------------------ LLM: latencies


def test_token_times_follow_the_profile() -> None:
    [found] = run_together(collect(llm(), [generate("a", words(100), stream=True)]))
    pieces = [(at, piece) for at, piece in found if isinstance(piece, Piece)]
    assert [at for at, _ in pieces] == pytest.approx([100 * PREFILL + DECODE * (i + 1) for i in range(10)])
    answer: Generation = value(found, "a")
    assert "".join(piece.text for _, piece in pieces) == answer.text
    assert (answer.prompt_tokens, answer.completion_tokens, answer.finish_reason) == (100, 10, "stop")
    assert ends(found)["a"][0] == pieces[-1][0]


def test_request_without_reader_sends_no_pieces_and_ends_on_time() -> None:
    [found] = run_together(collect(llm(), [generate("a", words(100))]))
    assert len(found) == 1
    assert found[0][0] == pytest.approx(100 * PREFILL + 10 * DECODE)


def test_first_token_is_reported_without_reader_by_default() -> None:
    telling = FakeLLM("llm", MACHINE["llm"], lambda p, _: answer_words(p.flat(), 10))
    [found] = run_together(collect(telling, [generate("a", words(100))]))
    assert [at for at, _ in found] == pytest.approx([100 * PREFILL + DECODE, 100 * PREFILL + 10 * DECODE])


def test_prefillings_are_serial_and_decodings_concurrent() -> None:
    calm = FakeLLM("llm", replace(MACHINE["llm"], interference=0.0), lambda p, _: answer_words(p.flat(), 10), **QUIET)
    [found] = run_together(collect(calm, [generate(n, words(200, n)) for n in "abc"]))
    expected = [200 * PREFILL * (i + 1) + 10 * DECODE for i in range(3)]
    assert [at for at, _ in found] == pytest.approx(expected)


def test_prefilling_and_decoding_slow_each_other() -> None:
    engine = llm()
    early, late = run_together(
        collect(engine, [generate("a", words(100))]), collect(engine, [generate("b", words(200, "b"))], delay=0.1)
    )
    # From 0.1 s on b prefills 0.07 s of work beside a's decoding: both take 1.5 times as long.
    assert late[0][0] == pytest.approx(0.1 + 200 * PREFILL * TOGETHER + 10 * DECODE)
    assert early[0][0] == pytest.approx(100 * PREFILL + 10 * DECODE + 200 * PREFILL * (TOGETHER - 1))


def test_requests_beyond_the_limit_wait_for_a_slot() -> None:
    narrow = FakeLLM("llm", replace(MACHINE["llm"], max_requests=1), lambda p, _: answer_words(p.flat(), 10), **QUIET)
    [found] = run_together(collect(narrow, [generate("a", words(100)), generate("b", words(100, "b"))]))
    assert [at for at, _ in found] == pytest.approx([0.035 + 0.285, 2 * (0.035 + 0.285)])


def test_background_prefilling_yields_between_chunks() -> None:
    warm = Request("w", K.PARTIAL_PREFILLING, Warmup(Prompt(text=words(1024, "w"))), background=True)
    engine = llm()
    slow, quick = run_together(collect(engine, [warm]), collect(engine, [generate("a", words(100))], delay=0.01))
    assert quick[0][0] == pytest.approx((256 + 100) * PREFILL + 10 * DECODE + 768 * PREFILL * (TOGETHER - 1))
    assert quick[0][1].request_id == "a"
    assert slow[0][0] == pytest.approx((256 + 100) * PREFILL + 768 * PREFILL * TOGETHER)


def test_real_time_latency_does_not_drift() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        start = loop.time()
        found = [r async for r in llm(30).execute([generate("a", words(100), stream=True)])]
        assert len(found) == 31
        return loop.time() - start

    expected = 100 * PREFILL + 30 * DECODE
    assert expected <= asyncio.run(main()) < 1.5 * expected


# ------------------------------------------------------------ LLM: prefix cache


def test_warmed_prefix_is_cached_in_whole_blocks() -> None:
    engine = llm()
    prompt = Prompt(text=words(300))
    known = Prompt(text=words(200) + UNKNOWN)

    async def main() -> tuple[Timed, Timed]:
        warm = await collect(engine, [Request("w", K.PARTIAL_PREFILLING, Warmup(known))])
        return warm, await collect(engine, [Request("a", K.FULL_PREFILLING, Generate(prompt))])

    warm, full = run_virtual(main())
    assert value(warm, "w") == Warmed(200)
    assert warm[0][0] == pytest.approx(200 * PREFILL)
    assert value(full, "a").cached_tokens == 192
    assert full[0][0] - warm[0][0] == pytest.approx((300 - 192) * PREFILL + 10 * DECODE)


def test_cache_is_per_tenant_and_reset_empties_it() -> None:
    engine = llm()

    async def cached(tenant: str) -> int:
        found = await collect(engine, [generate("a", words(160), tenant=tenant)])
        tokens: int = value(found, "a").cached_tokens
        return tokens

    async def main() -> list[int]:
        counts = [await cached("one"), await cached("two"), await cached("one")]
        await engine.reset()
        return [*counts, await cached("one")]

    # The last block is never taken from the cache: its end gives the first token.
    assert run_virtual(main()) == [0, 0, 144, 0]


def test_least_recently_used_blocks_are_evicted_first() -> None:
    engine = llm(cache_tokens=320)

    async def cached(seed: str) -> int:
        tokens: int = value(await collect(engine, [generate("a", words(161, seed))]), "a").cached_tokens
        return tokens

    async def main() -> list[int]:
        return [await cached(seed) for seed in ("x", "y", "x", "z", "x", "y")]

    assert run_virtual(main()) == [0, 0, 160, 0, 160, 0]


# ------------------------------------------------------------ LLM: values


def test_fake_tokens_join_to_the_text_and_prefixes_are_stable() -> None:
    text = "  A retrieval-augmented answer,\n\nwith  lists: 1) one 2) two.  "
    tokens = split_tokens(text)
    assert "".join(tokens) == text
    for cut in range(len(text)):
        assert split_tokens(text[:cut])[:-1] == tokens[: max(0, len(split_tokens(text[:cut])) - 1)]


def test_answers_depend_on_prompt_and_sampling_alone() -> None:
    async def answer(prompt: Prompt, sampling: Sampling) -> str:
        request = Request("a", K.PREFILLING, Generate(prompt, sampling))
        text: str = value(await collect(FakeLLM(), [request]), "a").text
        return text

    hello, other = Prompt((Message("user", "hello"),)), Prompt((Message("user", "goodbye"),))
    full = run_virtual(answer(hello, Sampling()))
    assert full == run_virtual(answer(hello, Sampling()))
    assert full != run_virtual(answer(other, Sampling()))
    assert full != run_virtual(answer(hello, Sampling(temperature=1.0, seed=1)))
    assert full.startswith(run_virtual(answer(hello, Sampling(max_tokens=5))))
    assert len(split_tokens(run_virtual(answer(hello, Sampling(max_tokens=200, ignore_eos=True))))) == 200
    assert run_virtual(answer(hello, Sampling(stop=(full[6:9],)))) == full.split(full[6:9])[0]


def test_json_answers_follow_the_schema() -> None:
    schema = {"type": "array", "items": {"type": "string"}, "minItems": 4, "maxItems": 4}
    request = Request("a", K.PREFILLING, Generate(Prompt(text="x"), Sampling(json_schema=json.dumps(schema))))
    items = json.loads(value(run_virtual(collect(FakeLLM(), [request])), "a").text)
    assert len(items) == len(set(items)) == 4
    assert all(isinstance(item, str) for item in items)


def test_bad_requests_fail_alone() -> None:
    batch = [
        generate("long", words(4096)),
        Request("foreign", K.EMBEDDING, EmbedText("x")),
        generate("good", "hello"),
    ]
    found = ends(run_virtual(collect(llm(), batch)))
    errors = {name: result.error for name, (_, result) in found.items() if isinstance(result, Failed)}
    assert set(errors) == {"long", "foreign"}
    assert isinstance(errors["long"], RequestTooLarge)
    assert "EMBEDDING" in str(errors["foreign"])


# ------------------------------------------------------------ batch engines


def test_static_batches_are_serial_and_last_by_their_size() -> None:
    engine = FakeEmbedder("e", MACHINE["embedder"])
    first, second = run_together(collect(engine, embeds(*map(str, range(128)))), collect(engine, embeds("x")))
    assert [at for at, _ in first] == pytest.approx([0.022 + 0.00115 * 128] * 128)
    assert second[0][0] == pytest.approx(0.022 + 0.00115 * 128 + 0.022 + 0.00115)
    assert MACHINE["embedder"].seconds(K.EMBEDDING, 666) == pytest.approx(1.1655)


def test_texts_with_common_words_are_near_and_roles_differ() -> None:
    def cosine(a: str, b: str) -> float:
        return sum(x * y for x, y in zip(embed_words(a, "query"), embed_words(b, "document"), strict=True))

    assert cosine("lambs eat oats", "where do lambs eat?") > cosine("lambs eat oats", "ivy climbs walls")
    assert embed_words("same", "query") != embed_words("same", "document")
    assert sum(x * x for x in embed_words("", "query")) == pytest.approx(1.0)


def test_reranking_prefers_shared_words() -> None:
    texts = ["the oats that lambs eat", "ivy on a wall", ""]
    batch = [Request(text, K.RERANKING, ScorePair("what do lambs eat", text)) for text in texts]
    found = run_virtual(collect(FakeReranker("r", MACHINE["reranker"]), batch))
    scores = [value(found, text) for text in texts]
    assert scores[0] > scores[1] >= scores[2] == 0.0
    assert found[0][0] == pytest.approx(0.03 + 0.0014 * 3)


def test_own_scores_of_fake_reranker_correlate_with_embedder() -> None:
    texts = [words(20, str(i)) for i in range(200)]
    own = {text: own_score("what do lambs eat", text) for text in texts}
    assert own == {text: own_score("what do lambs eat", text) for text in texts}, "a pure function"
    assert all(0.0 <= score <= 1.0 for score in own.values())
    query = embed_words("what do lambs eat")
    alike = {text: sum(a * b for a, b in zip(query, embed_words(text, "document"), strict=True)) for text in texts}
    [by_own, by_words] = [sorted(texts, key=scores.__getitem__, reverse=True) for scores in (own, alike)]
    both = set(by_own[:50]) & set(by_words[:50])
    assert by_own[:3] != by_words[:3] and len(both) > 1.5 * 50 * 50 / 200, "more than by chance"


def row(name: str, text: str, **metadata: Any) -> Request:
    vector = embed_words(text, "document")
    return Request(f"in {name}", K.INGESTION, IngestRow("docs", Chunk(name, text, metadata), vector))


def search(text: str, **options: Any) -> Request:
    return Request(f"search {text}", K.SEARCHING, SearchVector("docs", embed_words(text), **options))


async def test_fake_store_searches_versions_and_deletes_rows() -> None:
    store = FakeStore()
    rows = [
        row("1", "lambs eat oats", kind="farm"),
        row("2", "ivy on a wall", kind="house"),
        row("3", "oats", kind="farm"),
    ]
    await collect(store, rows)
    assert (await store.count("docs"), await store.collections()) == (3, ["docs"])
    written = await store.version("docs")
    await collect(store, rows[:1])
    assert await store.version("docs") == written, "the same row again is no change"
    hits = value(await collect(store, [search("ivy wall", k=2)]), "search ivy wall")
    assert len(hits) == 2 and hits[0].id == "2"
    assert hits[0].score > hits[1].score
    only = value(await collect(store, [search("ivy", filter=(("kind", "farm"),))]), "search ivy")
    assert {hit.id for hit in only} == {"1", "3"}
    assert [chunk.id for chunk in await store.get("docs", ["3", "nobody", "1"])] == ["3", "1"]
    assert await store.delete("docs", ["1", "1", "nobody"]) == 1
    await store.delete_collection("docs")
    assert (await store.count("docs"), await store.collections()) == (0, [])
    assert await store.version("docs") != written
    assert value(await collect(store, [search("ivy")]), "search ivy") == ()


def test_row_is_searchable_only_after_its_ingestion() -> None:
    store = FakeStore("s", MACHINE["store"])
    late = replace(search("oats"), id="late")
    _, early, after = run_together(
        collect(store, [row("1", "oats")]), collect(store, [search("oats")]), collect(store, [late], delay=0.03)
    )
    assert value(early, "search oats") == ()
    assert [hit.id for hit in value(after, "late")] == ["1"]


# ------------------------------------------------------------ faults and cancelling

ENGINES = ("llm", "embedder")


def make(name: str, faults: Faults) -> tuple[FakeEngine, list[Request]]:
    if name == "llm":
        return llm(faults=faults), [generate("bad", "hello"), generate("good", "goodbye")]
    batch = [Request(n, K.EMBEDDING, EmbedText(n)) for n in ("bad", "good")]
    return FakeEmbedder("embedder", MACHINE["embedder"], faults=faults), batch


def bad(request: Request) -> bool:
    return request.id == "bad"


@pytest.mark.parametrize("name", ENGINES)
def test_failing_request_fails_alone(name: str) -> None:
    engine, batch = make(name, Faults(fail_on=bad))
    found = ends(run_virtual(collect(engine, batch)))
    assert isinstance(found["bad"][1], Failed) and found["bad"][1].error.retryable
    assert isinstance(found["good"][1], Done)
    assert 0 < found["bad"][0] < found["good"][0], "it fails half-way"


@pytest.mark.parametrize("name", ENGINES)
def test_raising_batch_leaves_no_requests_behind(name: str) -> None:
    engine, batch = make(name, Faults(raise_on=bad))

    async def main() -> None:
        with pytest.raises(RuntimeError, match="bad"):
            await collect(engine, batch)
        assert engine.load().requests == 0
        assert isinstance((await collect(engine, batch[1:]))[-1][1], Done)

    run_virtual(main())


@pytest.mark.parametrize("name", ENGINES)
def test_dead_engine_stays_dead_until_it_is_restarted(name: str) -> None:
    engine, batch = make(name, Faults(die_after=1))

    async def main() -> None:
        assert {type(r) for _, r in await collect(engine, batch)} == {Done}
        for _ in range(2):
            found = await collect(engine, batch)
            assert [type(r.error) for _, r in found if isinstance(r, Failed)] == [EngineUnavailable] * 2
        await engine.start()
        assert isinstance((await collect(engine, batch))[0][1], Failed), "only restart() revives a dead engine"
        await engine.restart()
        assert {type(r) for _, r in await collect(engine, batch)} == {Done}

    run_virtual(main())


@pytest.mark.parametrize("name", ENGINES)
def test_hanging_request_ends_when_it_is_cancelled(name: str) -> None:
    engine, batch = make(name, Faults(hang_on=bad))

    async def cancel() -> None:
        await asyncio.sleep(10)
        for _ in range(2):
            await engine.cancel("bad")
        await engine.cancel("nobody")

    found, _ = run_together(collect(engine, batch), cancel())
    assert ends(found)["good"][0] < 1
    at, result = ends(found)["bad"]
    assert at == pytest.approx(10)
    assert isinstance(result, Failed) and not result.error.retryable


def test_slow_fault_multiplies_all_latencies() -> None:
    [found] = run_together(collect(llm(faults=Faults(slow=3)), [generate("a", words(100))]))
    assert found[0][0] == pytest.approx(3 * (100 * PREFILL + 10 * DECODE))
    [found] = run_together(collect(FakeEmbedder("e", MACHINE["embedder"], faults=Faults(slow=2)), embeds("x")))
    assert found[0][0] == pytest.approx(2 * 0.02315)


def test_cancelling_frees_the_engine_at_once() -> None:
    engine, batch = make("embedder", Faults())
    other = embeds("x")

    async def cancel() -> None:
        await asyncio.sleep(0.01)
        await engine.cancel("bad")
        await engine.cancel("good")

    found, after, _ = run_together(collect(engine, batch), collect(engine, other), cancel())
    assert [at for at, _ in found] == pytest.approx([0.01, 0.01])
    assert after[0][0] == pytest.approx(0.01 + 0.02315)


def test_closing_a_stream_frees_its_slot() -> None:
    engine = llm()

    async def main() -> None:
        results = engine.execute([generate("a", words(100), stream=True)])
        await anext(results)
        assert engine.load().requests == 1
        await results.aclose()
        assert engine.load().requests == 0

    run_virtual(main())


@pytest.mark.parametrize("engine", fake_engines(), ids=lambda e: e.name)
async def test_fake_engines_start_and_stop_repeatedly(engine: FakeEngine) -> None:
    assert isinstance(engine, Engine)
    for step in (engine.start, engine.start, engine.stop, engine.stop, engine.start):
        await step()
    assert engine.load().requests == 0
    assert engine.profile is profiles.noop()[engine.name] or engine.profile == profiles.noop()[engine.name]


def test_fake_embedder_and_reranker_use_the_answer_function() -> None:
    embedder = FakeEmbedder(dimension=2, answer=lambda text, role: [len(text), role == "document"])
    payloads = [EmbedText("abc"), EmbedText("abc", "document")]
    found = run_virtual(collect(embedder, [Request(str(i), K.EMBEDDING, one) for i, one in enumerate(payloads)]))
    assert [value(found, "0"), value(found, "1")] == [(3.0, 0.0), (3.0, 1.0)]
    judge, pairs = FakeReranker(answer=lambda query, text: query == text), [ScorePair("a", "a"), ScorePair("a", "b")]
    found = run_virtual(collect(judge, [Request(str(i), K.RERANKING, one) for i, one in enumerate(pairs)]))
    assert repr([value(found, "0"), value(found, "1")]) == "[1.0, 0.0]"


def test_invalid_answer_fails_only_its_request() -> None:
    def answer(text: str, role: str) -> Sequence[float]:
        if text == "raises":
            raise LookupError("nothing is known of it")
        return (1.0,) * (3 if text == "long" else 2)

    found = run_virtual(collect(FakeEmbedder(dimension=2, answer=answer), embeds("good", "raises", "long")))
    assert value(found, "0:good") == (1.0, 1.0)
    for name, says in (("1:raises", "LookupError"), ("2:long", "dimension is 2")):
        end = ends(found)[name][1]
        assert isinstance(end, Failed) and says in str(end.error)


def test_scaled_profile_divides_all_times_and_keeps_limits() -> None:
    machine = profiles.rtx3090()
    for name, profile in profiles.scaled(machine, 0.25).items():
        assert profile == machine[name].scaled(0.25)
        for kind in machine[name].curves:
            for size in (1, 7, 200):
                assert profile.seconds(kind, size) == pytest.approx(machine[name].seconds(kind, size) / 4)
        assert profile.step(7, 3) == pytest.approx(machine[name].step(7, 3) / 4)
        timed = {"curves": machine[name].curves, "verifying": machine[name].verifying}
        assert replace(profile, **timed) == machine[name], "limits stay"
    assert machine["llm"].scaled(0).seconds(K.PREFILLING, 1000) == 0
    for factor in (-1, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="scaled by"):
            machine["llm"].scaled(factor)
