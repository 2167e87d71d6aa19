"""Tests of failures: a clear error or the original's own, and a pool that serves the next query."""

from __future__ import annotations

import asyncio
import json
import logging
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, ClassVar

import pytest
from differential.chains import QUESTION, TEXTS, independent_assigns, parts
from differential.recording import observe
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough

from teola_plugin import EngineError, QueryTimeout, RequestTooLarge, accelerate
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore, Faults
from teola_plugin.graph import Curve, EngineProfile, Graph, GraphEdit, PrimitiveKind
from teola_plugin.passes import DEFAULT_PASSES, PassContext
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Prompt, Request, Sampling

K = PrimitiveKind


@contextmanager
def pool_of(answer: Any = None, llm: EngineProfile | None = None, **faults: Faults) -> Iterator[EnginePool]:
    """Create a pool of fakes. `faulty` are the LLM's faults, the other keywords name an engine."""
    none = Faults()
    engines = [
        FakeLLM("llm", llm, answer, faults=faults.get("faulty", none)),
        FakeEmbedder("embedder", faults=faults.get("embedder", none)),
        FakeReranker("reranker", faults=faults.get("reranker", none)),
        FakeStore("store", faults=faults.get("store", none)),
    ]
    with EnginePool.local(engines) as pool:
        yield pool
        settled(pool)


def settled(pool: EnginePool) -> None:
    """Wait until there is no live query and no running request."""

    async def left() -> list[str]:
        busy = [name for name in pool.engine_names if pool.engine(name).load().requests]
        return busy + list(pool.runtime._driver.runs)

    for _ in range(300):
        if not (found := pool.runtime.loop.run(left()).result(5)):
            return
        time.sleep(0.01)
    pytest.fail(f"still there: {found}")


def scripted(*lists: str) -> Callable[[Prompt, Sampling], str]:
    """Return an LLM that answers expansions with these texts in turn, and other prompts with words of its own."""

    def answer(prompt: Prompt, sampling: Sampling) -> str:
        text = prompt.flat()
        return lists[0] if "Expand" in text else f"about {len(text)}"

    return answer


def mapped(pool: EnginePool, shape: Callable[[Any], Any] | None = None, n: int = 2) -> Runnable[Any, Any]:
    p = parts(pool)
    p.store.add_texts(TEXTS)
    schema = {"type": "array", "items": {"type": "string"}, "minItems": n, "maxItems": n}
    queries = (
        ChatPromptTemplate.from_template("Expand {question}") | p.llm.bind(json_schema=schema) | JsonOutputParser()
    )
    made = RunnablePassthrough.assign(queries=queries | RunnableLambda(shape) if shape else queries)
    found = itemgetter("queries") | p.store.as_retriever(search_kwargs={"k": 1}).map()
    answer = ChatPromptTemplate.from_template("{question} by {found}") | p.llm | StrOutputParser()
    return made | RunnablePassthrough.assign(found=found) | RunnablePassthrough.assign(answer=answer)


@pytest.mark.parametrize("engine", ["llm", "embedder", "store"])
def test_failing_engine_raises_engine_error_with_context(engine: str) -> None:
    def struck(request: Request) -> bool:
        return request.kind in (K.PREFILLING, K.SEARCHING) or getattr(request.payload, "role", "") == "query"

    with pool_of(**{"faulty" if engine == "llm" else engine: Faults(raise_on=struck)}) as pool:
        chain = mapped(pool)
        plain, accelerated = observe(chain, "ainvoke", QUESTION), observe(accelerate(chain), "ainvoke", QUESTION)
        assert plain.failed and accelerated.failed
        assert plain.result.split(":")[0] == accelerated.result.split(":")[0] == "EngineError"
        for named in (f"'{engine}'", "query", "primitive", "Next:"):
            assert named in accelerated.result


def test_engine_that_dies_mid_batch_answers_after_restart() -> None:
    with pool_of() as pool:
        expected = observe(mapped(pool), "ainvoke", QUESTION).result
    with pool_of(embedder=Faults(die_after=2)) as pool:
        assert observe(accelerate(mapped(pool)), "ainvoke", QUESTION).result == expected


def test_request_beyond_the_engine_limit_fails_immediately() -> None:
    with pool_of(llm=EngineProfile(max_request_size=64, prefix_caching=True)) as pool:
        fast = accelerate(independent_assigns(parts(pool)))
        with pytest.raises(RequestTooLarge, match="64"):
            fast.invoke({"question": "word " * 200})
        assert fast.invoke({"question": "w"})["a"]


SLOW = EngineProfile({K.PREFILLING: Curve(((0, 0.05), (9, 0.05))), K.DECODING: Curve.linear(0.0, 0.2)}, max_requests=2)


@pytest.mark.parametrize("after", [0.0, 0.02, 0.3], ids=["queued", "running", "streaming"])
@pytest.mark.parametrize("entry", ["ainvoke", "astream"])
async def test_cancellation_reaches_the_engines(entry: str, after: float) -> None:
    with pool_of(llm=SLOW) as pool:
        fast = accelerate(independent_assigns(parts(pool)))

        async def read() -> Any:
            if entry == "ainvoke":
                return await fast.ainvoke(QUESTION)
            return [chunk async for chunk in fast.astream(QUESTION)]

        task = asyncio.create_task(read())
        await asyncio.sleep(after)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.to_thread(settled, pool)


@pytest.mark.filterwarnings(  # the original, too: LangChain closes a stream that one of its threads still reads
    "ignore:Exception ignored in. <generator object RunnableSequence._transform:pytest.PytestUnraisableExceptionWarning"
)
def test_closing_a_stream_early_does_not_raise() -> None:
    some = replace(SLOW, curves={**SLOW.curves, K.DECODING: Curve.linear(0.0, 0.02)})  # what is left is waited for
    with pool_of(llm=some) as pool:
        stream = accelerate(independent_assigns(parts(pool))).stream(QUESTION)
        next(stream)
        stream.close()


def test_query_past_its_deadline_raises_query_timeout() -> None:
    with pool_of(llm=SLOW) as pool:
        fast = accelerate(independent_assigns(parts(pool)))
        with pytest.raises(QueryTimeout, match="deadline"):
            fast.invoke(QUESTION, {"configurable": {"teola_deadline_s": 0.1}})


def test_hanging_engine_ends_at_the_deadline() -> None:
    with pool_of(embedder=Faults(hang_on=lambda r: r.payload.role == "query")) as pool:
        with pytest.raises(QueryTimeout):
            accelerate(mapped(pool)).invoke(QUESTION, {"configurable": {"teola_deadline_s": 0.2}})
        settled(pool)


@pytest.mark.parametrize(
    "text",
    [
        "[]",
        json.dumps(["lambda"]),
        json.dumps(["lambda", "class", "with", "raise"]),
        "this is not JSON",
        '["lambda", "cla',
        '["naïve café 日本語", "\\u00e9\\n\\"quoted\\""]',
        json.dumps(["word " * 3000, ""]),
        '{"queries": ["lambda", "class"]}',
        "[1, null]",
    ],
    ids=["empty", "fewer", "more", "no JSON", "cut off", "Unicode", "long", "an object", "no strings"],
)
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream"])
def test_any_expansion_text_gives_the_originals_result(text: str, way: str) -> None:
    with pool_of(scripted(text)) as pool:
        chain = mapped(pool)
        plain, accelerated = observe(chain, way, QUESTION), observe(accelerate(chain), way, QUESTION)
        assert without_ids(accelerated.result) == without_ids(plain.result)
        if not plain.failed:
            assert accelerated.prompts == plain.prompts
            assert accelerated.events == plain.events


def without_ids(result: str) -> str:
    """Return an error's text without the numbers of request, query and primitive."""
    return re.sub(r"(call|q)\d+(-\d+)?|#\d+", "", result)


def test_wrong_prediction_is_counted_and_changes_no_result() -> None:
    with pool_of(scripted(json.dumps(["lambda", "class"]))) as pool:
        chain = mapped(pool, shape=lambda items: [item.upper() + "!" for item in items])
        plain, fast = observe(chain, "ainvoke", QUESTION), accelerate(chain)
        accelerated = observe(fast, "ainvoke", QUESTION)
        assert (accelerated.result, accelerated.events) == (plain.result, plain.events)
        trace = fast.last_trace()
        assert trace is not None
        assert trace.wasted()[0] >= 2, "two guesses were embedded for nothing"


def test_failing_speculative_call_does_not_surface() -> None:
    faults = Faults(fail_on=lambda r: getattr(r.payload, "text", "") == "lambda")
    with pool_of(scripted(json.dumps(["lambda", "class"])), embedder=faults) as pool:
        chain = mapped(pool, shape=lambda items: [item + " function" for item in items])
        assert observe(accelerate(chain), "ainvoke", QUESTION).result == observe(chain, "ainvoke", QUESTION).result


def test_failing_query_does_not_fail_others() -> None:
    with pool_of(faulty=Faults(fail_on=lambda r: "seven" in str(r.payload))) as pool:
        chain = independent_assigns(parts(pool))
        fast = accelerate(chain)
        given = [{"question": f"question {word}"} for word in ("one", "seven", "three", "four")]

        async def all_of() -> list[Any]:
            return list(await asyncio.gather(*(fast.ainvoke(x) for x in given), return_exceptions=True))

        results = asyncio.run(all_of())
        assert isinstance(results[1], EngineError)
        assert [r for i, r in enumerate(results) if i != 1] == [chain.invoke(x) for i, x in enumerate(given) if i != 1]


@dataclass(frozen=True)
class Broken:
    name: ClassVar[str] = "broken"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        raise ZeroDivisionError("a bug in a pass")


@dataclass(frozen=True)
class Shout:
    """A custom pass: marks every prefilling."""

    name: ClassVar[str] = "shout"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        edit = GraphEdit(graph)
        for p in graph:
            if p.prefills and p.option("loud") is None:
                edit.replace(p.with_(options=(*p.options, ("loud", True))))
        return edit.freeze()


def test_failing_pass_is_logged_and_the_original_runs(caplog: pytest.LogCaptureFixture) -> None:
    with pool_of() as pool:
        chain = independent_assigns(parts(pool))
        with caplog.at_level(logging.WARNING, "teola_plugin"):
            assert accelerate(chain, passes=[Broken()]).invoke(QUESTION) == chain.invoke(QUESTION)
        assert "planning failed" in caplog.text and "broken" in caplog.text


def test_custom_pass_changes_the_plan() -> None:
    with pool_of() as pool:
        chain = independent_assigns(parts(pool))
        fast = accelerate(chain, passes=[*DEFAULT_PASSES, Shout()])
        assert fast.invoke(QUESTION) == chain.invoke(QUESTION)
        assert "loud=True" in str(fast.plan(QUESTION).graph) and "shout" in fast.plan(QUESTION).fired
