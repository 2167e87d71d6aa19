"""Tests of the waits in traces, against the times that engines, models, tools and code really took."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
from langchain_core.callbacks import BaseCallbackHandler
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
from teola_plugin.engines.fake import FakeLLM, fake_engines
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.langchain import ChatTeola, TeolaEmbeddings, read_only
from teola_plugin.observe import QueryTrace, Span
from teola_plugin.runtime.virtual_time import run_virtual
from teola_plugin.workflow import Function, Generation, Map, Workflow

Chain = Runnable[Any, Any]
THINKS = 0.3
"""Seconds of the chain's own code, at its end."""


async def think(value: Any) -> Any:
    await asyncio.sleep(THINKS)
    return value


def path(trace: QueryTrace) -> dict[str, float]:
    """Return the seconds of each step on the critical path. Steps with the same name are added."""
    found: dict[str, float] = {}
    for step in trace.critical_path():
        found[step.span.primitive] = found.get(step.span.primitive, 0.0) + step.total
    assert sum(found.values()) == pytest.approx(trace.seconds), "nothing is left out, nothing is twice"
    assert sum(trace.waited_for().values()) == pytest.approx(trace.seconds)
    return {name: seconds for name, seconds in found.items() if seconds > 1e-9}


def exactly(trace: QueryTrace, expected: dict[str, float]) -> None:
    """Check the critical path of a trace in virtual time, to the microsecond."""
    found = path(trace)
    assert list(found) == list(expected)
    assert found == {name: pytest.approx(seconds, abs=1e-6) for name, seconds in expected.items()}


# ------------------------------------------------------------ in virtual time


def watched(chain: Callable[[EnginePool], Chain], given: Any) -> tuple[QueryTrace, QueryTrace]:
    """Return the traces of a call of the original and of an accelerated one."""

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


def test_sequential_calls_are_all_on_the_critical_path() -> None:
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


def test_critical_path_of_accelerated_call_has_the_remaining_steps() -> None:
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


def test_critical_path_of_a_map_follows_its_last_copy() -> None:
    """And what let that begin, back to the begin of the query: a workflow has no code of its own around it."""
    each = Generation("one", "Do {item}.", max_tokens=4)
    flow = Generation("list", "{x}", items="lines", max_tokens=8) >> Map("all", over="list", flow=each)
    joined = Function("joined", lambda all: "".join(all), pure=True)
    workflow = Workflow("mapped", flow >> joined)

    async def main() -> QueryTrace:
        async with EnginePool.on_this_loop(fake_engines(rtx3090())) as pool:
            result = await workflow.deploy(pool).arun({"x": "lines"})
            assert result.trace is not None
            return result.trace

    trace = run_virtual(main())
    found = path(trace)
    last = max((s for s in trace.spans if s.primitive.startswith("all[") and s.done), key=lambda s: s.done or 0.0)
    assert all(name.startswith(("list.", last.primitive.split("/")[0] + "/")) for name in found), found
    assert {name.split(".")[0] for name in found} == {"list", last.primitive.split("/")[0] + "/one"}


def test_critical_path_follows_the_slowest_branch() -> None:
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


@dataclass
class Moments:
    """Start and end of each piece of work, measured in the work itself by the clock of traces."""

    of: dict[str, tuple[float, float]] = field(default_factory=dict)

    @contextmanager
    def taken(self, name: str) -> Iterator[None]:
        began = time.monotonic()
        yield
        self.of[name] = began, time.monotonic()

    def over(self, name: str) -> bool:
        return not name or name in self.of

    def began(self, name: str) -> float:
        return self.of[name][0]

    def ended(self, name: str) -> float:
        return self.of[name][1]

    def took(self, name: str) -> float:
        return self.ended(name) - self.began(name)


class Slow(BaseChatModel):
    """Answers after so many seconds, and not before another has."""

    name: str
    takes: float
    after: str
    moments: Moments

    @property
    def _llm_type(self) -> str:
        return "slow"

    def _answer(self, messages: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=AIMessage(f"of {messages[-1].content}"))])

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        with self.moments.taken(self.name):
            time.sleep(self.takes)
            while not self.moments.over(self.after):
                time.sleep(0.001)
        return self._answer(messages)

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        with self.moments.taken(self.name):
            await asyncio.sleep(self.takes)
            while not self.moments.over(self.after):
                await asyncio.sleep(0.001)
        return self._answer(messages)


def model_chain(name: str, text: str, takes: float, moments: Moments, after: str = "") -> Chain:
    model = Slow(name=name, takes=takes, moments=moments, after=after)
    return ChatPromptTemplate.from_template(text) | model | StrOutputParser()


def own_models(moments: Moments) -> Chain:
    """Return a chain of two independent models, the first of which ends last, and one that needs both."""
    both = RunnablePassthrough.assign(a=model_chain("a.model", "a {q}", 0.4, moments, after="b.model"))
    return both.assign(b=model_chain("b.model", "b {q}", 0.2, moments)) | model_chain("model", "{a} {b}", 0.1, moments)


def test_unbound_models_have_virtual_times_and_no_waste() -> None:
    async def traced() -> QueryTrace | None:
        async with EnginePool.on_this_loop(fake_engines(rtx3090())) as pool:
            fast = accelerate(own_models(Moments()) | RunnableLambda(think), pool=pool)
            await fast.ainvoke({"q": "x"})
            return fast.last_trace()

    trace = run_virtual(traced())
    assert trace is not None
    exactly(trace, {"a.model": 0.4, "model": 0.1, "think": THINKS})
    assert {s.kind for s in trace.spans if s.engine} == {"GENERATION"} and trace.wasted() == (0, 0)
    spans = trace.finished()
    assert [round(spans[name].seconds, 6) for name in ("a.model", "b.model", "model")] == [0.4, 0.2, 0.1]


def span_of(trace: QueryTrace, moments: Moments, name: str) -> Span:
    """Return the span of this work. It has the planned name if the plan came to it before the original."""
    began, ended = moments.of[name]
    around = [s for s in trace.spans if s.engine and s.done is not None and s.begin <= began and ended <= s.done]
    [found] = [s for s in around if s.primitive == name] or [s for s in around if ".call#" in s.primitive]
    return found


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_unbound_models_have_their_real_times(way: str) -> None:
    """Against what they and the code after them saw themselves, in this very call."""
    moments = Moments()

    def sleeps(value: Any) -> Any:
        with moments.taken("sleeps"):
            time.sleep(0.15)
        return value

    fast = accelerate(own_models(moments) | sleeps)
    for _ in range(2):  # whatever is made once
        moments.of.clear()
        with moments.taken("call"):
            fast.invoke({"q": "x"}) if way == "invoke" else asyncio.run(fast.ainvoke({"q": "x"}))
    trace = fast.last_trace()
    assert trace is not None
    a, b, last = (span_of(trace, moments, name) for name in ("a.model", "b.model", "model"))
    assert len({a.primitive, b.primitive, last.primitive}) == 3 and {a.kind, b.kind, last.kind} == {"GENERATION"}
    assert moments.began("call") <= min(a.begin, b.begin)
    assert max(a.done, b.done) <= last.begin and last.done <= moments.began("sleeps")  # type: ignore[type-var]
    found = path(trace)
    assert b.primitive not in found and moments.took("a.model") <= found[a.primitive] <= a.done - trace.started
    assert moments.took("model") <= found[last.primitive] <= moments.began("sleeps") - moments.ended("a.model")
    code = found.get("sleeps", 0.0), found["your code"]  # the pool may hear late that it was to run
    assert moments.took("sleeps") <= sum(code) and code[0] <= moments.ended("call") - moments.ended("model")


def test_unbound_call_is_one_span_if_its_end_is_late() -> None:
    """An earlier version showed it as a prefilling without a decoding."""
    moments, hold = Moments(), threading.Event()

    class Last(Slow):
        def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
            pool.runtime.loop.post(hold.wait, 10)  # from here on the pool's loop hears nothing
            return super()._generate(messages, stop, run_manager, **kwargs)

    model = Last(name="model", takes=0.05, moments=moments, after="")
    a, b = (model_chain(f"{name}.model", f"{name} {{q}}", 0.1, moments) for name in "ab")
    both = RunnablePassthrough.assign(a=a) | RunnablePassthrough.assign(b=b)
    with EnginePool.local(llm=FakeLLM()) as pool:
        fast = accelerate(both | ChatPromptTemplate.from_template("{a} {b}") | model | StrOutputParser(), pool=pool)
        fast.invoke({"q": "x"})
        hold.set()
        trace = fast.last_trace()
    assert trace is not None
    called = [span for span in trace.spans if span.engine]  # the plan may have asked for the last one, or not
    assert [span.kind for span in called] == ["GENERATION"] * 3 and not any(span.unused for span in called)


def test_query_begins_at_its_call_on_a_busy_pool() -> None:
    """The trace contains the wait before the pool's loop comes to the query."""
    with EnginePool.local(llm=FakeLLM()) as pool:
        model = ChatTeola(pool=pool, max_tokens=2)
        a, b = (ChatPromptTemplate.from_template(text) | model | StrOutputParser() for text in ("a {q}", "b {q}"))
        fast = accelerate(RunnablePassthrough.assign(a=a) | RunnablePassthrough.assign(b=b), pool=pool)
        fast.invoke({"q": "made once"})
        pool.runtime.loop.post(time.sleep, 0.3)
        begin = time.perf_counter()
        fast.invoke({"q": "x"})
        took, trace = time.perf_counter() - begin, fast.last_trace()
    assert trace is not None and 0.29 <= trace.seconds <= took


def test_query_ends_with_its_answer_on_a_busy_pool() -> None:
    """Code of the original whose end the pool hears of late ends in time, too."""
    moments, hold = Moments(), threading.Event()

    async def planned(name: str) -> bool:
        recorder = pool.runtime.recorder
        return any(line.startswith(f"{name}:") for query in recorder.open_queries for line in recorder.story(query))

    def one(value: Any) -> Any:
        until = time.monotonic() + 20
        while not pool.runtime.loop.run(planned("one")).result(10) and time.monotonic() < until:
            time.sleep(0.001)
        pool.runtime.loop.post(hold.wait, 10)  # from here on the pool's loop hears nothing
        return value

    def other(value: Any) -> Any:
        with moments.taken("other"):
            time.sleep(0.05)
        return value

    with EnginePool.local(llm=FakeLLM()) as pool:
        model = ChatTeola(pool=pool, max_tokens=2)
        a, b = (ChatPromptTemplate.from_template(text) | model | StrOutputParser() for text in ("a {q}", "b {q}"))
        both = RunnablePassthrough.assign(a=a) | RunnablePassthrough.assign(b=b)
        fast = accelerate(both | one | other, pool=pool)
        with moments.taken("call"):
            fast.invoke({"q": "x"})
        time.sleep(0.05)
        hold.set()
        trace = fast.last_trace()
    assert trace is not None
    assert moments.ended("other") <= trace.ended <= moments.ended("call")
    spans = {span.primitive: span for span in trace.spans}
    assert spans["one"].done <= moments.began("other")
    assert all(span.done is None or span.done <= trace.ended for span in trace.spans)


def test_unclaimed_model_call_counts_as_waste() -> None:
    """The plain object comes with something else than what was predicted."""
    one, other = model_chain("a", "a {q}", 0.1, Moments()), model_chain("b", "b {q}", 0.01, Moments())
    fast = accelerate(RunnablePassthrough.assign(a=one) | _fails | other, speculate="all")
    with pytest.raises(ValueError, match="no more"):
        fast.invoke({"q": "x"})
    trace = fast.last_trace()
    if trace is not None:  # where anything was made early at all
        assert all(s.unused for s in trace.spans if s.primitive == "model")


def _fails(value: Any) -> Any:
    raise ValueError("no more")


# ------------------------------------------------------------ answers that come whole


def test_whole_answer_has_no_prefilling_span() -> None:
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


def paused(seconds: float, moments: Moments, name: str) -> Callable[[], bool]:
    """Return a condition for a `WritingLLM`: true after this many seconds."""
    began: list[float] = []

    def over() -> bool:
        now = time.monotonic()
        began.append(now)
        moments.of[name] = began[0], now
        return now >= began[0] + seconds

    return over


def test_critical_path_of_an_agent_has_model_tool_and_model() -> None:
    moments = Moments()

    @tool
    def lookup(q: str) -> str:
        """Looks."""
        with moments.taken("tool"):
            time.sleep(0.3)
        return f"found {q}"

    with world() as at:
        at.llm.writes = lambda prompt: (
            [paused(0.2, moments, "then"), "done"]
            if prompt.messages[-1].role == "tool"
            else [paused(0.2, moments, "first"), call("lookup", q="x")]
        )
        fast = at.fast(agent(at.model, [lookup]))
        with moments.taken("call"):
            run(fast, "invoke")
        found = path(fast.last_trace())
    assert moments.took("first") <= found["llm.call#1"] <= moments.began("tool") - moments.began("call")
    assert moments.took("tool") <= found["tool lookup"] <= moments.began("then") - moments.ended("first")
    assert moments.took("then") <= found["llm.call#2"] <= moments.ended("call") - moments.ended("tool")


class Comes(BaseCallbackHandler):
    """Tells when the plain object has come to a tool."""

    def __init__(self) -> None:
        self.come = threading.Event()

    def on_tool_start(self, *args: Any, **kwargs: Any) -> None:
        self.come.set()


def test_prefetched_tool_counts_from_its_call() -> None:
    """The model has written its call after 0.2 s, and writes 0.2 s more; the tool outlasts that."""
    moments, plain = Moments(), Comes()

    @read_only
    @tool
    def peek(q: str) -> str:
        """Looks."""
        with moments.taken("tool"):
            at.ran.append(q)
            assert plain.come.wait(10)
            time.sleep(0.1)
        return f"found {q}"

    with world() as at:
        at.llm.writes = lambda prompt: (
            [paused(0.1, moments, "then"), "done"]
            if prompt.messages[-1].role == "tool"
            else [paused(0.2, moments, "first"), call("peek", q="x"), at.has_run(), paused(0.2, moments, "more"), " so"]
        )
        fast = at.fast(agent(at.model, [peek]))
        with moments.taken("call"):
            run(fast, "invoke", config={"callbacks": [plain]})
        found = path(fast.last_trace())
    assert all(at.llm.fulfilled_waits) and len(at.ran) == 1
    waited = found["tool peek (early)"]
    assert moments.took("tool") <= waited <= moments.began("then") - moments.ended("first")
    until = moments.began("tool") - moments.began("call")
    assert moments.took("first") <= found["llm.call#1"] <= until, "what it wrote after the call held nobody up"


def waiting_seconds(trace: QueryTrace) -> float:
    """Return the seconds in which the original waited for work that was queued or running.

    Of calls that it waited for together, the one that was answered last counts.
    """
    spans, at, total = trace.finished(), trace.ended, 0.0
    for wait in sorted(trace.waits or (), key=lambda wait: wait.answered, reverse=True):
        if wait.answered <= at:
            called = [spans[name] for name in wait.spans if name in spans]
            since = max(wait.began, min(span.queued for span in called))
            total += max(0.0, min(at, max(span.done or 0.0 for span in called)) - since)
            at = wait.began
    return total


@pytest.mark.parametrize("way", ["query", "aquery"])
def test_sub_question_engine_waits_for_three_generations(way: str) -> None:
    """The questions, the slower of two answers, the last answer: each call is one span, whoever asked first."""
    kit = kits.pool_kit(scaled(rtx3090(), 0.3), kits.Sizes(8, 40))
    with kit.in_force():
        fast: Any = accelerate(engines.sub_questions(kit), pool=kit.pool)
        fast.query("what is it?") if way == "query" else asyncio.run(fast.aquery("what is it?"))
    trace: QueryTrace = fast.last_trace()
    assert kit.pool is not None
    kit.pool.close()
    found = path(trace)
    assert (
        "questions.decoding" in found and found.get("your code", 0.0) <= trace.seconds - waiting_seconds(trace) + 0.01
    )
    written = sum(s.tokens + s.written for s in trace.spans if "DECODING" in s.kind or s.kind == "GENERATION")
    assert written == 60 + 3 * 24, "each answer once"


def test_call_of_several_batches_ends_with_the_last() -> None:
    texts = [f"lamb {number}" for number in range(300)]
    with EnginePool.local(fake_engines(rtx3090())) as pool:
        embeddings = TeolaEmbeddings(pool=pool)
        with pool.watching() as live:
            embeddings.embed_documents(texts)
        trace = live.trace.result(10)
    (span,) = trace.spans
    assert span.size == 300 and span.done is not None
    assert trace.ended - span.done < 0.2 * trace.seconds, "the first batch is over after a third of it"
