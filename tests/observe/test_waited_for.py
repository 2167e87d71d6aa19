"""What traces say that an answer waited for, against what engines, models, tools and code really took."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from support import documented
from support.agents import agent, run, world
from support.openai_stub import MODEL, openai_stub
from support.writing_llm import call

from benchmarks.langchain.kits import scaled
from benchmarks.llamaindex import engines, kits
from teola_plugin import EnginePool, accelerate
from teola_plugin.engines.fake import fake_engines
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.langchain import ChatTeola, TeolaEmbeddings, read_only
from teola_plugin.observe import QueryTrace
from teola_plugin.runtime.virtual_time import run_virtual

Chain = Runnable[Any, Any]
THINKS = 0.3
"""Seconds of the chain's own code, at its end."""
LATE = 0.15
"""Seconds by which a busy machine may wake up whoever sleeps."""


async def think(value: Any) -> Any:
    await asyncio.sleep(THINKS)
    return value


def path(trace: QueryTrace) -> dict[str, float]:
    """Seconds of each step of the critical path that has any; several of one name are put together."""
    found: dict[str, float] = {}
    for step in trace.critical_path():
        found[step.span.primitive] = found.get(step.span.primitive, 0.0) + step.total
    assert sum(found.values()) == pytest.approx(trace.seconds), "nothing is left out, nothing is twice"
    assert sum(trace.waited_for().values()) == pytest.approx(trace.seconds)
    return {name: seconds for name, seconds in found.items() if seconds > 1e-9}


def exactly(trace: QueryTrace, expected: dict[str, float]) -> None:
    """In virtual time: to the microsecond."""
    found = path(trace)
    assert list(found) == list(expected)
    assert found == {name: pytest.approx(seconds, abs=1e-6) for name, seconds in expected.items()}


# ------------------------------------------------------------ in virtual time


def watched(chain: Callable[[EnginePool], Chain], given: Any) -> tuple[QueryTrace, QueryTrace]:
    """The traces of a plain and an accelerated call."""

    async def both() -> tuple[Any, Any]:
        async with EnginePool.on_this_loop(fake_engines(rtx3090())) as pool:
            made = chain(pool)
            with pool.watching() as live:
                plain = await made.ainvoke(given)
            await pool.runtime.areset()
            fast = accelerate(made)
            assert await fast.ainvoke(given) == plain
            return live.trace.result(), fast.last_trace()

    return run_virtual(both())


def test_plain_calls_one_after_the_other_are_all_waited_for() -> None:
    """18 and 82 tokens at 0.35 ms, 16 written at 28.5 ms; two embeddings, of which the second waits for the first."""
    plain, _ = watched(lambda pool: documented.chain(pool) | RunnableLambda(think), documented.QUESTION)
    exactly(
        plain,
        {
            "llm.call#1": 0.4623,
            "embedder.call#3": 2 * 0.02315,
            "store.call#5": 0.002,
            "llm.call#6": 0.4847,
            "your code": THINKS,
        },
    )
    waited = plain.waited_for()
    assert waited["queued"] == pytest.approx(0.02315) and waited["code"] == pytest.approx(THINKS)
    assert waited["llm"] == pytest.approx(0.4623 + 0.4847)
    assert {s.kind for s in plain.spans} == {"GENERATION", "EMBEDDING", "SEARCHING"}
    assert [(s.tokens, s.written) for s in plain.spans if s.kind == "GENERATION"] == [(18, 16), (82, 16)]


def test_an_accelerated_call_waits_for_what_is_left() -> None:
    _, fast = watched(lambda pool: documented.chain(pool) | RunnableLambda(think), documented.QUESTION)
    found = path(fast)
    assert list(found) == [
        "queries.model.prefilling",
        "queries.model.decoding#0",
        "queries.model.decoding#1",
        "found[1]/found.retrieve.embedding",
        "found[1]/found.retrieve.searching",
        "model.prefilling",
        "model.decoding",
        "think",
    ]
    assert found["think"] == pytest.approx(THINKS) and found["model.decoding"] == pytest.approx(15 * 0.0285)
    spans = fast.finished()
    for name in ("queries.model", "model"):  # the first token ends the prefilling, and gives the decoding 15 more
        prefilling = spans[f"{name}.prefilling"]
        assert prefilling.done == prefilling.first and prefilling.seconds == pytest.approx(0.0348)
    assert fast.wasted() == (0, 0) and spans["model.prefilling.partial#0"].outcome == "done"


def test_branches_are_waited_for_until_the_last() -> None:
    """A branch of two calls is slower than one of one call, though that takes longer than either."""

    def chain(pool: EnginePool) -> Chain:
        def ask(text: str, tokens: int) -> Chain:
            model = ChatTeola(pool=pool, max_tokens=tokens)
            return ChatPromptTemplate.from_template(text) | model | StrOutputParser()

        deep = ask("one {x}", 10) | RunnableLambda(think) | ask("two {x}", 10)
        return RunnableParallel(deep=deep, flat=ask("three {x}", 15)) | ask("both {deep} {flat}", 4)

    async def plain() -> QueryTrace:
        async with EnginePool.on_this_loop(fake_engines(rtx3090())) as pool:
            with pool.watching() as live:
                await chain(pool).ainvoke({"x": "x"})
            trace = live.trace.result()
            assert trace is not None
            return trace

    trace = run_virtual(plain())
    spans = trace.finished()
    found = path(trace)
    first, flat, second, last = (spans[f"llm.call#{n}"] for n in (1, 2, 3, 4))
    assert flat.done > first.done and second.queued == pytest.approx(first.done + THINKS)
    assert {"llm.call#3", "llm.call#4"} <= found.keys() and found["llm.call#4"] == pytest.approx(last.seconds)


# ------------------------------------------------------------ the user's own models


class Slow(BaseChatModel):
    """Answers after so many seconds."""

    takes: float

    @property
    def _llm_type(self) -> str:
        return "slow"

    def _answer(self, messages: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage(f"of {messages[-1].content}"))])

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        time.sleep(self.takes)
        return self._answer(messages)

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        await asyncio.sleep(self.takes)
        return self._answer(messages)


def asked(text: str, takes: float) -> Chain:
    return ChatPromptTemplate.from_template(text) | Slow(takes=takes) | StrOutputParser()


def sleeps(value: Any) -> Any:
    time.sleep(0.15)
    return value


OWN = (
    RunnablePassthrough.assign(a=asked("a {q}", 0.4))
    | RunnablePassthrough.assign(b=asked("b {q}", 0.2))
    | asked("{a} {b}", 0.1)
    | sleeps
)


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_own_models_have_their_real_times_and_are_no_waste(way: str) -> None:
    fast = accelerate(OWN)
    for _ in range(2):  # whatever is made once
        fast.invoke({"q": "x"}) if way == "invoke" else asyncio.run(fast.ainvoke({"q": "x"}))
    trace = fast.last_trace()
    assert trace is not None
    spans = trace.finished()
    took = {name: spans[name].seconds for name in ("a.model", "b.model", "model")}
    assert took == {
        name: pytest.approx(s, abs=0.06) for name, s in (("a.model", 0.4), ("b.model", 0.2), ("model", 0.1))
    }
    assert {s.kind for s in trace.spans if s.engine} == {"GENERATION"} and trace.wasted() == (0, 0)
    found = path(trace)
    assert 0.4 <= found["a.model"] < 0.4 + LATE and "b.model" not in found
    assert 0.099 <= found["model"] < 0.1 + LATE and 0.149 <= found["sleeps"] < 0.15 + LATE


def test_an_own_call_that_was_made_for_nothing_is_waste() -> None:
    """The plain object comes with something else than what was predicted."""
    fast = accelerate(
        RunnablePassthrough.assign(a=asked("a {q}", 0.1)) | _fails | asked("b {q}", 0.01), speculate="all"
    )
    with pytest.raises(ValueError, match="no more"):
        fast.invoke({"q": "x"})
    trace = fast.last_trace()
    if trace is not None:  # where anything was made early at all
        assert all(s.unused for s in trace.spans if s.primitive == "model")


def _fails(value: Any) -> Any:
    raise ValueError("no more")


# ------------------------------------------------------------ answers that come whole


def test_of_an_answer_that_comes_whole_no_prefilling_is_told() -> None:
    with openai_stub() as stub:
        engine = OpenAIServer(base_url=stub.base_url, api_key="k", prefix_caching=False, calibrate=False)
        one = ChatOpenAI(base_url=stub.base_url, api_key="k", model=MODEL, temperature=0.0)  # type: ignore[arg-type]
        first = RunnablePassthrough.assign(a=ChatPromptTemplate.from_template("a {q}") | one | StrOutputParser())
        second = RunnablePassthrough.assign(b=ChatPromptTemplate.from_template("b {q}") | one | StrOutputParser())
        with EnginePool.local(llm=engine) as pool:
            fast = accelerate(first | second, pool=pool, bind=[(one, "llm")])
            for attempt in range(4):  # the answer may be there before the last call around the engine has ended
                fast.invoke({"q": f"x{attempt}"})
                trace = fast.last_trace()
                assert trace is not None
                models = {s.primitive: (s.kind, s.engine) for s in trace.spans if s.primitive.endswith("model")}
                if "b.model" in models:
                    break
    served = [s for s in trace.spans if s.engine]
    assert [(s.kind, s.first) for s in served] == [("GENERATION", None)] * 2
    assert all(s.written > 1 and s.tokens > 0 for s in served)
    assert models == {"a.model": ("CALL", ""), "b.model": ("CALL", "")}, "code around what the engine has done"
    found = path(trace)
    assert {"llm.call#1", "llm.call#2"} & found.keys() and trace.wasted() == (0, 0)


# ------------------------------------------------------------ agents, LlamaIndex


def paused(seconds: float) -> Callable[[], bool]:
    """For a `WritingLLM`: not before so many seconds."""
    until: list[float] = []

    def over() -> bool:
        until.append(time.monotonic() + seconds)
        return time.monotonic() >= until[0]

    return over


def test_an_agent_waits_for_its_model_its_tool_and_its_model() -> None:
    @tool
    def lookup(q: str) -> str:
        """Looks."""
        time.sleep(0.3)
        return f"found {q}"

    with world() as at:
        at.llm.writes = lambda prompt: (
            [paused(0.2), "done"] if prompt.messages[-1].role == "tool" else [paused(0.2), call("lookup", q="x")]
        )
        fast = at.fast(agent(at.model, [lookup]))
        run(fast, "invoke")
        found = path(fast.last_trace())
    assert 0.3 <= found["tool lookup"] < 0.3 + LATE
    assert 0.2 <= found["llm.call#1"] < 0.2 + LATE and 0.2 <= found["llm.call#2"] < 0.2 + LATE


def test_a_tool_that_ran_early_is_waited_for_from_its_call_on() -> None:
    """The model writes its call after 0.2 s, and 0.2 s more; the tool takes 0.5 s."""

    @read_only
    @tool
    def peek(q: str) -> str:
        """Looks."""
        time.sleep(0.5)
        return f"found {q}"

    with world() as at:
        at.llm.writes = lambda prompt: (
            ["done"] if prompt.messages[-1].role == "tool" else [paused(0.2), call("peek", q="x"), paused(0.2), " so"]
        )
        fast = at.fast(agent(at.model, [peek]))
        run(fast, "invoke")
        found = path(fast.last_trace())
    assert 0.4 <= found["tool peek (early)"] < 0.5 + LATE
    assert 0.2 <= found["llm.call#1"] < 0.2 + LATE, "what it wrote after the call held nobody up"


@pytest.mark.parametrize("way", ["query", "aquery"])
def test_sub_questions_of_llamaindex_wait_for_three_generations(way: str) -> None:
    """The questions, the slower of two answers, the last answer: each call is one span, whoever asked first."""
    kit = kits.pool_kit(scaled(rtx3090(), 0.3), kits.Sizes(8, 40))
    with kit.in_force():
        fast: Any = accelerate(engines.sub_questions(kit), pool=kit.pool)
        fast.query("what is it?") if way == "query" else asyncio.run(fast.aquery("what is it?"))
    trace: QueryTrace = fast.last_trace()
    assert kit.pool is not None
    kit.pool.close()
    found = path(trace)
    on_engine = sum(seconds for name, seconds in found.items() if name.endswith(("filling", "decoding", "decoding#0")))
    assert on_engine / trace.seconds > 0.8 and found.get("your code", 0.0) / trace.seconds < 0.2
    written = sum(s.tokens + s.written for s in trace.spans if "DECODING" in s.kind or s.kind == "GENERATION")
    assert written == 60 + 3 * 24, "each answer once"


def test_a_call_of_several_batches_ends_with_the_last_of_them() -> None:
    texts = [f"lamb {number}" for number in range(300)]
    with EnginePool.local(fake_engines(rtx3090())) as pool:
        embeddings = TeolaEmbeddings(pool=pool)
        with pool.watching() as live:
            embeddings.embed_documents(texts)
        trace = live.trace.result(10)
    (span,) = trace.spans
    assert span.size == 300 and span.done is not None
    assert trace.ended - span.done < 0.2 * trace.seconds, "the first batch is over after a third of it"
