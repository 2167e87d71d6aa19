"""Tests of the local runtime on fake engines: graphs, claims, failures, cancellation, deadlines."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from support.apps import advanced_rag
from support.recording import record

from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, Faults, fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.errors import (
    EngineError,
    EngineUnavailable,
    QueryCancelled,
    QueryError,
    QueryTimeout,
    RequestTooLarge,
)
from teola_plugin.graph import (
    Component,
    Curve,
    EngineProfile,
    Graph,
    Primitive,
    PrimitiveKind,
    PromptPart,
    Query,
    Ref,
    Role,
    WorkflowTemplate,
    named,
)
from teola_plugin.passes import DEFAULT_PASSES
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import UNKNOWN, EmbedText, Generate, Message, Prompt, Sampling

K = PrimitiveKind
EMBED = Graph([Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("$input")))], Ref("e"))


def slow(seconds: float) -> EngineProfile:
    return EngineProfile({K.EMBEDDING: Curve(((1, seconds), (2, seconds)))})


def in_flight(pool: EnginePool) -> int:
    async def load() -> int:
        return pool.engine("embedder").load().requests

    return int(pool.runtime.loop.run(load()).result(10))


def wait_for(condition: Callable[[], bool]) -> None:
    for _ in range(500):
        if condition():
            return
        time.sleep(0.01)
    pytest.fail("it did not happen within 5 s")


def test_graph_output_is_equal_with_and_without_passes(pool: EnginePool) -> None:
    template, calls, inputs = advanced_rag()
    results = []
    for passes in ((), DEFAULT_PASSES):
        plan = pool.plan(template, {"index": 12}, passes=passes)
        run = pool.runtime.submit(Query({"input": inputs}), plan.graph, calls)
        results.append(run.output.result(20))
        trace = run.trace.result(5)
        assert trace is not None and trace.outcome == "done"
        pool.admin("store", "delete_collection", "docs").result(5)
    assert results[0] == results[1]
    assert results[0]


def test_original_claims_the_prefetched_request(pool: EnginePool) -> None:
    seen = record(pool.engine("embedder"))
    run = pool.runtime.submit(Query({"input": "what?"}), EMBED, {}, has_original=True)
    first = run.call(K.EMBEDDING, "embedder", [EmbedText("what?")]).result(5)
    again = run.call(K.EMBEDDING, "embedder", [EmbedText("what?"), EmbedText("what?", "document")]).result(5)
    run.close()
    assert first[0] == again[0]
    assert [r.payload for r in seen] == [EmbedText("what?"), EmbedText("what?", "document")]


def test_calls_outside_of_a_query_are_not_merged(pool: EnginePool) -> None:
    seen = record(pool.engine("embedder"))
    for _ in range(2):
        pool.call(K.EMBEDDING, "embedder", [EmbedText("x")]).result(5)
    assert len(seen) == 2


def test_two_generations_of_one_query_stay_two(pool: EnginePool) -> None:
    seen = record(pool.engine("llm"))
    run = pool.runtime.submit(Query({"input": "x"}), EMBED, {}, has_original=True)
    ask = Generate(Prompt((Message("user", "hello"),)), Sampling(max_tokens=5))
    answers = [run.call(K.PREFILLING, "llm", [ask]).result(5)[0].text for _ in range(2)]
    run.close()
    assert answers[0] == answers[1]
    assert len(seen) == 2


def test_template_reused_with_new_inputs_never_sees_old_ones(pool: EnginePool) -> None:
    outputs = []
    for text in ("one", "two", "one"):
        outputs.append(pool.runtime.submit(Query({"input": text}), EMBED, {}).output.result(5))
    assert outputs[0] == outputs[2] != outputs[1]
    with pytest.raises(Exception, match="does not bind"):
        pool.runtime.submit(Query({}), EMBED, {})


async def test_call_is_streamed_to_async_and_sync_readers(pool: EnginePool) -> None:
    ask = Generate(Prompt((Message("user", "hello there"),)), Sampling(max_tokens=8))
    handle = pool.call(K.PREFILLING, "llm", [ask], stream=True)
    text = "".join([piece.text async for piece in handle.pieces])
    assert text == (await handle)[0].text
    sync = pool.call(K.PREFILLING, "llm", [ask], stream=True)
    assert "".join(p.text for p in await asyncio.to_thread(lambda: list(sync.pieces))) == text


def test_engine_streams_only_if_a_reader_is_possible(pool: EnginePool) -> None:
    seen, payloads = record(pool.engine("llm")), [Generate(Prompt(text="what of it?"))]
    pool.call(K.PREFILLING, "llm", payloads).result(5)
    pool.call(K.PREFILLING, "llm", payloads, stream=True).result(5)
    with pool.watching() as watched:
        watched.call(K.PREFILLING, "llm", payloads).result(5)
    live = pool.runtime.submit(Query({"input": "x"}), EMBED, {}, has_original=True)
    live.call(K.PREFILLING, "llm", payloads).result(5)
    live.close()
    assert [(request.stream, request.late) for request in seen] == [
        *[(False, False), (True, False), (False, False)],
        (False, True),  # of a graph that the plain object may come to
    ]


def test_repeated_event_loops_use_one_pool(pool: EnginePool) -> None:
    async def once() -> Any:
        return (await pool.call(K.EMBEDDING, "embedder", [EmbedText("x")]))[0]

    assert asyncio.run(once()) == asyncio.run(once())


def test_wrong_kind_of_value_fails_the_query_not_the_pool(pool: EnginePool) -> None:
    run = pool.runtime.submit(Query({"input": 7}), EMBED, {})
    with pytest.raises(TypeError, match="embeds text"):
        run.output.result(5)
    assert pool.runtime.submit(Query({"input": "x"}), EMBED, {}).output.result(5)


def test_an_error_names_query_primitive_and_next_step() -> None:
    faults = {"embedder": Faults(fail_on=lambda r: r.payload.text == "bad")}
    with EnginePool.local(fake_engines(**faults)) as pool:
        run = pool.runtime.submit(Query({"input": "bad"}), EMBED, {})
        with pytest.raises(QueryError) as caught:
            run.output.result(5)
        assert caught.value.query_id == run.id and caught.value.primitive == "e" and caught.value.hint
        with pytest.raises(EngineError, match="primitive embedder"):
            pool.call(K.EMBEDDING, "embedder", [EmbedText("bad")]).result(5)
        assert pool.runtime.submit(Query({"input": "good"}), EMBED, {}).output.result(5)


def test_engine_that_dies_mid_batch_is_restarted_without_loss() -> None:
    with EnginePool.local(fake_engines(embedder=Faults(die_after=1))) as pool:
        runs = [pool.runtime.submit(Query({"input": f"t{i}"}), EMBED, {}) for i in range(20)]
        with EnginePool.local(fake_engines()) as healthy:
            expected = [
                healthy.runtime.submit(Query({"input": f"t{i}"}), EMBED, {}).output.result(5) for i in range(20)
            ]
        assert [run.output.result(10) for run in runs] == expected


def test_an_engine_that_stays_dead_gives_a_clear_error() -> None:
    class Hopeless(FakeEmbedder):
        async def restart(self) -> None:
            raise RuntimeError("no device")

    with EnginePool.local([Hopeless(faults=Faults(die_after=0))]) as pool:
        run = pool.runtime.submit(Query({"input": "x"}), EMBED, {})
        with pytest.raises(QueryError, match="no device"):
            run.output.result(20)
        with pytest.raises(EngineUnavailable):
            pool.call(K.EMBEDDING, "embedder", [EmbedText("y")]).result(5)


def test_a_request_larger_than_the_engine_fails_at_once() -> None:
    profile = EngineProfile(max_request_size=16, prefix_caching=True)
    with EnginePool.local([FakeLLM("llm", profile)]) as pool:
        ask = Generate(Prompt((Message("user", "word " * 500),)))
        with pytest.raises(RequestTooLarge, match="16"):
            pool.call(K.PREFILLING, "llm", [ask]).result(5)


@pytest.mark.parametrize("running", [True, False])
def test_cancelled_query_ends_while_queued_or_running(running: bool) -> None:
    """The cancelled query would never end by itself."""
    hangs = Faults(hang_on=lambda request: request.payload.text == ("a" if running else "b"))
    with EnginePool.local([FakeEmbedder("embedder", slow(0.3), faults=hangs)]) as pool:
        first = pool.runtime.submit(Query({"input": "a"}), EMBED, {})
        wait_for(lambda: in_flight(pool) == 1)
        second = pool.runtime.submit(Query({"input": "b"}), EMBED, {})
        victim, other = (first, second) if running else (second, first)
        victim.cancel()
        with pytest.raises(QueryCancelled):
            victim.output.result(5)
        assert other.output.result(5)
        trace = victim.trace.result(5)
        assert trace is not None and trace.outcome == "cancelled"


def test_passed_deadline_raises_query_timeout() -> None:
    with EnginePool.local([FakeEmbedder("embedder", slow(5.0))]) as pool:
        run = pool.runtime.submit(Query({"input": "a"}, deadline=pool.runtime.time() + 0.05), EMBED, {})
        with pytest.raises(QueryTimeout, match=run.id):
            run.output.result(5)


def test_timed_out_handle_cancels_its_request() -> None:
    with EnginePool.local([FakeEmbedder("embedder", slow(30.0))]) as pool:
        handle = pool.call(K.EMBEDDING, "embedder", [EmbedText("x")])
        with pytest.raises(TimeoutError):
            handle.result(0.05)
        assert pool.call(K.EMBEDDING, "embedder", []).result(10) == []
        wait_for(lambda: in_flight(pool) == 0)


def test_blocking_on_the_pools_own_thread_is_refused(pool: EnginePool) -> None:
    async def wrong() -> None:
        pool.call(K.EMBEDDING, "embedder", [EmbedText("x")]).result()

    with pytest.raises(Exception, match="own thread"):
        pool.runtime.loop.run(wrong()).result(5)


def test_closed_pool_closes_again_and_refuses_calls(pool: EnginePool) -> None:
    pool.close()
    pool.close()
    with pytest.raises(EngineUnavailable, match="pool is closed"):
        pool.call(K.EMBEDDING, "embedder", [EmbedText("x")])


@pytest.mark.parametrize("details", [True, False])
def test_traces_contain_prompts_only_with_details_on(details: bool) -> None:
    with EnginePool.local(fake_engines(), details=details) as pool:
        run = pool.runtime.submit(Query({"input": "a secret"}), EMBED, {})
        run.output.result(5)
        assert ("a secret" in repr(run.trace.result(5))) is details


def test_fold_prefills_the_next_prompt_during_the_previous_decoding() -> None:
    prompt = (
        PromptPart.literal("Improve the answer with the passage. " * 8),
        PromptPart.var("text"),
        PromptPart.var("before"),
    )
    ask = Component("ask", Role.GENERATION, named(text=Ref("$item"), before=Ref("$carry")), "llm", prompt=prompt)
    body = WorkflowTemplate((ask, Component("said", Role.CALL, named(made=Ref("ask")))), Ref("said"))
    inputs = named(items=Ref("$input", ("passages",)), init=Ref("$input", ("first",)))
    template = WorkflowTemplate((Component("refine", Role.FOLD, inputs, body=body),), Ref("refine"))

    def payload(given: Any) -> Generate:
        parts = "".join(str(given.get(name, UNKNOWN)) for name in ("text", "before"))
        return Generate(
            Prompt((Message("user", "Improve the answer with the passage. " * 8 + parts),)), Sampling(max_tokens=6)
        )

    calls = {"ask": payload, "said": lambda made: made.text}
    given = {"passages": ["one " * 40, "two " * 40, "three " * 40], "first": "nothing yet"}
    answers, kinds = [], []
    with EnginePool.local(fake_engines(rtx3090())) as pool:
        for passes in ((), DEFAULT_PASSES):
            pool.reset()  # a warm-up of what is in the cache already is of no use
            run = pool.runtime.submit(Query({"input": given}), pool.plan(template, passes=passes).graph, calls)
            answers.append(run.output.result(20))
            trace = run.trace.result(5)
            assert trace is not None
            kinds.append([s.kind for s in trace.spans if s.kind == "PARTIAL_PREFILLING" and s.outcome == "done"])
    assert answers[0] == answers[1]
    assert not kinds[0] and len(kinds[1]) >= 2


def test_forget_reaches_engines_that_learn_from_tenants() -> None:
    learning, forgotten_tenants = FakeLLM("llm"), list[str]()

    async def forget(tenant: str) -> None:
        forgotten_tenants.append(tenant)

    learning.forget = forget  # type: ignore[attr-defined]
    with EnginePool.local({"llm": learning, "other": FakeEmbedder("other")}) as pool:
        pool.forget("t")
    assert forgotten_tenants == ["t"]
