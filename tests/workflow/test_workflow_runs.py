"""Tests of deployed workflows on fake engines: results, streams, request contexts, failures, many queries."""

from __future__ import annotations

import asyncio
import json
import pickle
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from support.sample_workflows import GIVEN, advanced_rag, engines

from teola_plugin.engines.fake import FakeLLM, FakeStore, FakeWebSearch, Faults
from teola_plugin.engines.fake.engines import embed_words
from teola_plugin.engines.profiles import rtx3090, scaled
from teola_plugin.engines.tools import ToolEngine
from teola_plugin.errors import QueryCancelled, QueryError, QueryTimeout, RegistrationError
from teola_plugin.graph import Graph, GraphEdit, PrimitiveKind
from teola_plugin.passes import DEFAULT_PASSES, PassContext
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Chunk, Hit, IngestRow, Request
from teola_plugin.runtime.virtual_time import run_virtual
from teola_plugin.workflow import (
    PER_QUERY,
    Branch,
    Condition,
    Function,
    Generation,
    Indexing,
    Loop,
    Map,
    QueryExpansion,
    Searching,
    Tool,
    WebSearch,
    Workflow,
)


@pytest.fixture(scope="module")
def pool() -> Iterator[EnginePool]:
    with EnginePool.local(engines()) as made:
        yield made


def test_result_has_outputs_sources_and_trace(pool: EnginePool) -> None:
    result = advanced_rag().deploy(pool).run(GIVEN)
    assert list(result.outputs) == ["index", "queries", "found", "best", "answer"]
    assert result.answer == result.outputs["answer"] == str(result) and len(result.outputs["queries"]) <= 3
    assert result.sources == result.outputs["best"] and all(isinstance(one, Hit) for one in result.sources)
    assert result.trace is not None and result.trace.outcome == "done" and result.query_id == result.trace.query_id
    assert {one.id for one in result.sources} <= set(result.outputs["index"])


def test_result_converts_to_json(pool: EnginePool) -> None:
    made = advanced_rag("as_json").deploy(pool).run(GIVEN, {"best.k": 2}).to_dict()
    assert json.loads(json.dumps(made)) == made and made["config"] == {"best": {"k": 2}}
    assert set(made["sources"][0]) == {"id", "text", "metadata", "score"}


def test_a_workflow_survives_pickling(pool: EnginePool) -> None:
    again = pickle.loads(pickle.dumps(advanced_rag("pickled")))
    assert again == advanced_rag("pickled") and again.input_schema() == advanced_rag("pickled").input_schema()
    assert again.deploy(pool).run(GIVEN).answer == advanced_rag("pickled").deploy(pool).run(GIVEN).answer


def test_custom_pass_runs_after_the_default_passes(pool: EnginePool) -> None:
    @dataclass(frozen=True)
    class Rename:
        name: ClassVar[str] = "mark"

        def run(self, graph: Graph, context: PassContext) -> Graph:
            edit = GraphEdit(graph)
            for p in graph:
                if p.on_engine and not p.option("seen"):
                    edit.replace(p.with_(options=(("seen", True),)))
            return edit.freeze()

    app = advanced_rag("marked").deploy(pool, passes=(*DEFAULT_PASSES, Rename()))
    assert all(p.option("seen") for p in app.plan(GIVEN).graph if p.on_engine)
    assert app.run(GIVEN).outputs == advanced_rag("marked").deploy(pool).run(GIVEN).outputs


@pytest.mark.parametrize("mode", ["refine", "compact", "tree"])
def test_outputs_are_equal_with_and_without_passes(pool: EnginePool, mode: str) -> None:
    workflow = advanced_rag("by_mode")
    fast, plain = workflow.deploy(pool), workflow.deploy(pool, passes=())
    settings = {"mode": mode, "answer.context_tokens": 60, "answer.fanout": 2}
    assert fast.run(GIVEN, settings).outputs == plain.run(GIVEN, settings).outputs


def test_uploaded_documents_are_private_to_their_query(pool: EnginePool) -> None:
    app = advanced_rag("uploads").deploy(pool)
    [one, other] = [app.run({**GIVEN, "documents": f"Only {word} is written here."}) for word in ("hay", "oats")]
    assert [hit.text for hit in one.sources] == ["Only hay is written here."]
    assert [hit.text for hit in other.sources] == ["Only oats is written here."]
    for _ in range(1000):
        if not pool.admin("store", "collections").result(5):
            return
        time.sleep(0.01)
    pytest.fail("a query's own collection is left")


@pytest.mark.parametrize("fails", [False, True])
def test_closing_a_pool_waits_for_pending_deletions(fails: bool) -> None:
    made = engines(scaled(rtx3090(), 0.01))
    after = Function("after", lambda index: 1 / (not fails))
    with EnginePool.local(made) as pool:
        app = Workflow("closed", Indexing("index", collection=PER_QUERY) >> after).deploy(pool)
        with pytest.raises(ZeroDivisionError) if fails else nullcontext():
            app.run({"documents": "All of the hay."})
    [store] = [one for one in made if isinstance(one, FakeStore)]
    assert asyncio.run(store.collections()) == []


def test_a_template_never_runs_on_another_querys_values(pool: EnginePool) -> None:
    flow = Generation("first", "Say {x}", max_tokens=4) >> Function("both", lambda x, first: (x, first), pure=True)
    app = Workflow("many", flow).deploy(pool)
    alone = [app.run({"x": f"x{i}"}).answer for i in range(20)]
    assert [x for x, _ in alone] == [f"x{i}" for i in range(20)] and len({first for _, first in alone}) > 15
    with ThreadPoolExecutor(8) as threads:
        together = threads.map(lambda i: app.run({"x": f"x{i % 20}"}).answer, range(60))
        assert list(together) == alone * 3


def test_settings_of_one_query_do_not_affect_others(pool: EnginePool) -> None:
    app = advanced_rag("settings").deploy(pool, config={"best.k": 2, "n": 2})
    usual, other = app.run(GIVEN), app.run(GIVEN, {"best.k": 1})
    assert len(usual.sources) == 2 and len(other.sources) == 1
    assert other.config == app.workflow.config({"best.k": 1, "n": 2}) and usual.config == app.base
    assert len(app.run(GIVEN).sources) == 2


# ------------------------------------------------------------ in a loop, and streams


async def test_workflow_runs_on_an_event_loop(pool: EnginePool) -> None:
    app = advanced_rag("loop").deploy(pool)
    one, other = await asyncio.gather(app.arun(GIVEN), app.arun(GIVEN))
    assert one.answer == other.answer and one.trace is not None
    running = app.submit(GIVEN)
    assert (await running).answer == one.answer and running.done


@pytest.mark.parametrize("mode", ["refine", "compact", "tree"])
def test_stream_pieces_join_to_the_answer(pool: EnginePool, mode: str) -> None:
    app = advanced_rag("streams").deploy(pool)
    stream = app.stream(GIVEN, {"mode": mode})
    pieces = list(stream)
    assert len(pieces) > 3 and "".join(pieces) == stream.result().answer == app.run(GIVEN, {"mode": mode}).answer


def test_unrefined_answer_is_streamed_in_pieces(pool: EnginePool) -> None:
    app = advanced_rag("short").deploy(pool)
    stream = app.stream({**GIVEN, "documents": "One chunk only."})
    pieces = list(stream)
    assert len(pieces) > 3 and "".join(pieces) == stream.result().answer


async def test_async_stream_pieces_join_to_the_answer(pool: EnginePool) -> None:
    app = Workflow("say", Generation("say", "{x}")).deploy(pool)
    stream = app.astream({"x": "hello"})
    pieces = [piece async for piece in stream]
    assert len(pieces) > 3 and "".join(pieces) == (await stream).answer


def test_abandoned_stream_cancels_its_query() -> None:
    with EnginePool.local(engines(scaled(rtx3090(), 0.3))) as slow:
        app = Workflow("stopped", Generation("say", "{x}", max_tokens=200)).deploy(slow)
        for _ in app.stream({"x": "hello"}):
            break
        trace = app.last_trace()
    assert trace is not None and trace.outcome == "cancelled"


def test_answer_of_a_function_streams_as_one_piece(pool: EnginePool) -> None:
    app = Workflow("shout", Function("shout", lambda x: x.upper(), pure=True)).deploy(pool)
    assert list(app.stream({"x": "hello"})) == ["HELLO"]


def test_stream_raises_the_error_of_its_query(pool: EnginePool) -> None:
    app = Workflow("fail", Function("fail", lambda x: 1 / x)).deploy(pool)
    with pytest.raises(ZeroDivisionError):
        list(app.stream({"x": 0}))


# ------------------------------------------------------------ control


def test_branch_runs_the_arm_of_its_condition(pool: EnginePool) -> None:
    flow = Condition("long", value="x", test=lambda x: len(x) > 3) >> Branch(
        "way", condition="long", then=Generation("shorter", "Shorten {x}"), otherwise="x"
    )
    app = Workflow("branches", flow).deploy(pool)
    assert app.run({"x": "abc"}).answer == "abc"
    assert app.run({"x": "abcdef"}).answer == app.run({"x": "abcdef"}).answer != "abcdef"
    stream = app.stream({"x": "abcdef"})
    assert "".join(stream) == stream.result().answer
    nothing = Workflow("no", Branch("b", condition="c", then=Function("f", lambda: 1, pure=True))).deploy(pool)
    assert nothing.run({"c": False}).answer is None and nothing.run({"c": True}).answer == 1


@pytest.mark.parametrize(
    "value, holds", [("Yes, it is.", True), ("**YES**", True), ("no", False), ("", False), ([], False), ([0], True)]
)
def test_condition_parses_its_value_as_bool(pool: EnginePool, value: Any, holds: bool) -> None:
    assert Workflow("c", Condition("c", value="x")).deploy(pool).run({"x": value}).answer is holds


def test_map_applies_its_flow_to_each_item(pool: EnginePool) -> None:
    flow = Map("all", over="words", each="word", flow=Function("two", lambda word, x: f"{word}{x}", pure=True))
    app = Workflow("maps", flow).deploy(pool)
    assert app.run({"words": ["a", "b"], "x": 7}).answer == ["a7", "b7"]
    assert app.run({"words": [], "x": 7}).answer == []


def test_loop_repeats_until_its_condition_or_max_rounds(pool: EnginePool) -> None:
    more = Function("more", lambda draft, by: draft + by, pure=True)
    done = Function("done", lambda more: more >= 10, pure=True)
    app = Workflow("loops", Loop("sum", init="x", flow=more >> done, until="done", max_rounds=5)).deploy(pool)
    assert app.run({"x": 0, "by": 4}).answer == 12
    assert app.run({"x": 0, "by": 1}).answer == 5
    assert app.run({"x": 0, "by": 1}, {"max_rounds": 2}).answer == 2
    assert app.run({"x": 10, "by": 1}).answer == 11


def test_nested_maps_read_outer_values(pool: EnginePool) -> None:
    inner = Map(
        "inner", over="row", each="cell", flow=Function("cells", lambda cell, row, x: (cell, len(row), x), pure=True)
    )
    app = Workflow("nested", Map("outer", over="rows", each="row", flow=inner)).deploy(pool)
    assert app.run({"rows": [[1, 2], [3]], "x": "y"}).answer == [[(1, 2, "y"), (2, 2, "y")], [(3, 1, "y")]]


# ------------------------------------------------------------ functions and tools


VARIABLE: ContextVar[str] = ContextVar("variable", default="none")


def test_functions_run_once_in_order_with_caller_context(pool: EnginePool) -> None:
    seen: list[str] = []

    async def wait(a: str) -> str:
        await asyncio.sleep(0)
        seen.append(VARIABLE.get())
        return f"{a}!"

    flow = (
        Function("a", lambda x: seen.append("a") or x)
        >> Function("b", wait)
        >> Tool("c", lambda b: seen.append("c") or b)
    )
    token = VARIABLE.set("mine")
    try:
        assert Workflow("functions", flow).deploy(pool).run({"x": "x"}).answer == "x!"
    finally:
        VARIABLE.reset(token)
    assert seen == ["a", "mine", "c"]


@pytest.mark.parametrize("pure", [True, False])
def test_parallel_functions_run_at_once(pool: EnginePool, pure: bool) -> None:
    met = threading.Barrier(2)
    one, other = (Function(name, lambda x: met.wait(10), pure=pure) for name in ("one", "other"))
    flow = [one, other] >> Function("both", lambda one, other: sorted([one, other]), pure=True)
    assert Workflow("beside", flow).deploy(pool).run({"x": "x"}).answer == [0, 1]


def test_slow_function_does_not_delay_a_prompt(pool: EnginePool) -> None:
    prompt_done = threading.Event()

    def slow(x: str) -> bool:
        return prompt_done.wait(10)

    def seen(text: str) -> str:
        prompt_done.set()
        return text

    long = Generation("text", "{x}", max_tokens=4) >> Function("seen", seen, pure=True)
    flow = [Function("slow", slow, pure=True), long] >> Function("both", lambda slow, seen: slow, pure=True)
    assert Workflow("held", flow).deploy(pool).run({"x": "words " * 5000}).answer is True


def test_engine_tool_is_called_once_in_order_on_its_engine() -> None:
    seen: list[str] = []

    def order(drink: str) -> str:
        seen.append(threading.current_thread().name.partition("_")[0])
        return f"{drink} is ordered"

    flow = (
        Function("drink", lambda question: seen.append("chosen") or question)
        >> Tool("told", order, engine="tools")
        >> Generation("answer", "{told}")
    )
    with EnginePool.local([FakeLLM("llm"), ToolEngine("tools", [order])]) as pool:
        result = Workflow("orders", flow).deploy(pool).run({"question": "tea"})
        assert result.outputs["told"] == "tea is ordered" and seen == ["chosen", "teola-tools"]
        assert [span.engine for span in result.trace.spans if span.primitive == "told"] == ["tools"]
    with EnginePool.local([FakeLLM("llm")]) as pool, pytest.raises(RegistrationError, match="tools"):
        Workflow("orders", flow).deploy(pool)


def test_map_items_are_spread_over_all_replicas() -> None:
    """Their prompts share a beginning, but none is the others' home."""
    machine = scaled(rtx3090(), 0.1)["llm"]
    lines = Map("lines", over="documents", flow=Generation("line", "Be brief. " * 100 + "{item}", max_tokens=8))
    with EnginePool.local({"llm": [FakeLLM("llm", machine), FakeLLM("llm", machine)]}) as pool:
        result = Workflow("lines", lines).deploy(pool).run({"documents": [f"text {n} " * 120 for n in range(12)]})
    assert {span.replica for span in result.trace.spans if span.engine == "llm" and span.replica} == {"0", "1"}


def test_nothing_overtakes_a_function_that_may_write(pool: EnginePool) -> None:
    flow = Function("write", lambda: time.sleep(0.05)) >> Searching("found", query="x")
    plan = Workflow("writes", flow).deploy(pool).plan()
    assert "write" in plan.graph.ancestors["found.searching"]
    pure = Workflow("pure", Function("write", lambda: None, pure=True) >> Searching("found", query="x")).deploy(pool)
    assert "write" not in pure.plan().graph.ancestors["found.searching"]


def test_equal_searches_around_a_write_are_made_twice(pool: EnginePool) -> None:
    before, after = (Searching(name, query="x", collection=PER_QUERY) for name in ("before", "after"))
    app = Workflow("both_sides", before >> Indexing("index", collection=PER_QUERY) >> after).deploy(pool, passes=())
    outputs = app.run({"x": "hay", "documents": "All of the hay."}).outputs
    assert outputs["before"] == () and [hit.text for hit in outputs["after"]] == ["All of the hay."]


def test_equal_searches_around_user_code_are_made_twice(pool: EnginePool) -> None:
    row = IngestRow("by_code", Chunk("c1", "All of the hay."), embed_words("hay"))

    def write() -> None:
        store: Any = pool.engine("store")
        pool.runtime.loop.run(_written(store, row)).result(5)

    before, after = (Searching(name, query="x", collection="by_code") for name in ("before", "after"))
    app = Workflow("code", before >> Function("write", write) >> after).deploy(pool, passes=())
    outputs = app.run({"x": "hay"}).outputs
    assert outputs["before"] == () and [hit.text for hit in outputs["after"]] == ["All of the hay."]


async def _written(store: Any, row: IngestRow) -> None:
    """Write rows without the pool, as user code does."""
    async for _ in store.execute([Request("own", PrimitiveKind.INGESTION, row)]):
        pass


def test_function_error_reaches_the_caller_unchanged(pool: EnginePool) -> None:
    def fail(x: str) -> str:
        raise KeyError(x)

    app = Workflow("raises", Function("fail", fail) >> Generation("after", "{fail}")).deploy(pool)
    with pytest.raises(KeyError, match="here"):
        app.run({"x": "here"})


def test_web_searches_and_engine_tools_run_in_workflows() -> None:
    ordered: list[str] = []

    def order(text: str) -> str:
        ordered.append(text)
        return f"ordered {text}"

    web = FakeWebSearch(documents=["hay is sold here", "oats are sold there", "ivy is free"])
    flow = (
        QueryExpansion("queries", n=2)
        >> [WebSearch("of_all", query="queries", k=2), WebSearch("of_one", query="question", k=1)]
        >> Tool("order", engine="tools", reads={"text": "question"})
    )
    with EnginePool.local([*engines(), web, ToolEngine("tools", [order])]) as pool:
        app = Workflow("outside", flow, sources="of_one").deploy(pool)
        result = app.run({"question": "hay"})
        assert result.answer == "ordered hay" and ordered == ["hay"]
        assert [hit.text for hit in result.sources] == ["hay is sold here"]
        assert Workflow("plain", flow).deploy(pool, passes=()).run({"question": "hay"}).outputs == result.outputs
        with pytest.raises(RegistrationError, match="engine 'llm' does no searching"):
            Workflow("unfit", WebSearch("w", engine="llm")).deploy(pool)


# ------------------------------------------------------------ failures, deadlines, terms


def test_an_engines_error_names_the_component() -> None:
    broken = Faults(fail_on=lambda request: "bad" in request.payload.prompt.flat(), retryable=False)
    with EnginePool.local([FakeLLM(faults=broken)]) as pool:
        app = Workflow("asks", Generation("a", "{x}") >> Generation("b", "{a}")).deploy(pool)
        assert app.run({"x": "good"}).answer
        with pytest.raises(QueryError, match=r"failed at primitive 'a\.prefilling'") as error:
            app.run({"x": "bad"})
        assert error.value.primitive == "a.prefilling" and app.run({"x": "good"}).answer


def test_passed_deadline_raises_query_timeout(pool: EnginePool) -> None:
    app = Workflow("late", Function("sleep", lambda x: time.sleep(x))).deploy(pool)
    with pytest.raises(QueryTimeout):
        app.run({"x": 0.5}, deadline_s=0.05)


async def test_cancelled_caller_cancels_its_query(pool: EnginePool) -> None:
    app = Workflow("given_up", Function("sleep", lambda x: time.sleep(x)) >> Generation("a", "{sleep}")).deploy(pool)
    task = asyncio.create_task(app.arun({"x": 0.2}))
    await asyncio.sleep(0.05)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    trace = await asyncio.to_thread(app.last_trace)
    assert trace is not None and trace.outcome == "cancelled"
    running = app.submit({"x": 0.2})
    running.cancel()
    with pytest.raises(QueryCancelled):
        await running


def test_run_terms_are_applied_and_checked(pool: EnginePool) -> None:
    app = Workflow("terms", Generation("a", "{x}")).deploy(pool, name="named")
    assert pool.deployments["named"] is app
    assert app.run({"x": "x"}).trace.app == "named"  # type: ignore[union-attr]
    assert app.run({"x": "x"}, app="other", tenant="t", weight=2.0).trace.app == "other"  # type: ignore[union-attr]
    with pytest.raises(RegistrationError, match="unknown term 'tennant'"):
        app.run({"x": "x"}, tennant="t")
    with pytest.raises(RegistrationError, match="deadline_s"):
        app.run({"x": "x"}, deadline_s="soon")


def test_deploying_to_an_unsuitable_pool_raises(pool: EnginePool) -> None:
    with pytest.raises(RegistrationError, match="component 'a': unknown engine 'lm'; known: embedder, llm"):
        Workflow("unfit", Generation("a", "{x}", engine="lm")).deploy(pool)
    with pytest.raises(RegistrationError, match="component 'a': engine 'store' does no prefilling"):
        Workflow("unfit", Generation("a", "{x}", engine="store")).deploy(pool)
    with pytest.raises(RegistrationError, match="which is no engine pool"):
        Workflow("unfit", Generation("a", "{x}")).deploy("pool")  # type: ignore[arg-type]
    Workflow("twice", Generation("a", "{x}")).deploy(pool)
    again = Workflow("twice", Generation("a", "{y}")).deploy(pool)
    assert pool.deployments["twice"] is again


# ------------------------------------------------------------ seen


def test_explain_shows_parts_plan_and_diagram(pool: EnginePool) -> None:
    with EnginePool.local(engines(rtx3090())) as timed:
        app = advanced_rag("explained").deploy(timed)
        text = app.explain(GIVEN, details=True)
    assert "5 parts: 5 optimized" in text and "p-graph" in text and "PARTIAL_PREFILLING" in text
    assert app.mermaid(GIVEN).startswith("flowchart TD")
    assert "INGESTION@store" in str(app.plan(GIVEN).graph) and "QUERY" not in str(app.workflow)


def test_passes_make_a_workflow_faster_in_virtual_time() -> None:
    async def main() -> tuple[Any, Any]:
        async with EnginePool.on_this_loop(engines(rtx3090())) as pool:
            long = " ".join(f"Paragraph {i} says what paragraph {i - 1} does not say." for i in range(1500))
            workflow, given, short = advanced_rag("virtual"), {**GIVEN, "documents": long}, {"answer.max_tokens": 4}
            fast = await workflow.deploy(pool).arun(given, short)
            await pool.runtime.areset()
            plain = await workflow.deploy(pool, passes=()).arun(given, short)
            with pytest.raises(RegistrationError, match="runs on this very loop"):
                workflow.deploy(pool).run(GIVEN)
            return fast, plain

    fast, plain = run_virtual(main())
    assert fast.outputs == plain.outputs
    assert plain.trace.seconds / fast.trace.seconds > 1.1
