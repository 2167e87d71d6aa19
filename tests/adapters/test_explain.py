"""Tests of `explain()`: three lines for every object, figures that match measurements, more details on request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from itertools import accumulate
from typing import Any, TypedDict

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableBranch, RunnableLambda, RunnablePassthrough
from langchain_core.tools import tool
from langgraph.graph import START, StateGraph
from llama_index.core import VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.embeddings import MockEmbedding
from llama_index.core.llms import MockLLM
from llama_index.core.schema import TextNode
from llama_index.core.tools import QueryEngineTool
from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step
from support.documented import chain as documented

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.explain import describe_measured_gain, seconds_saved
from teola_plugin.adapters.plan_report import Status
from teola_plugin.adapters.plan_summary import component_of, listed
from teola_plugin.engines.fake import fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.graph import Graph, Primitive, PrimitiveKind, Ref
from teola_plugin.langchain import ChatTeola
from teola_plugin.llamaindex import TeolaLLM
from teola_plugin.observe import QueryTrace
from teola_plugin.observe.spans import Span
from teola_plugin.observe.steps import Wait
from teola_plugin.runtime.virtual_time import run_virtual

QUESTION = {"question": "what do lambs eat?"}


class Slow(BaseChatModel):
    """A model of the user's own."""

    seconds: float = 0.05

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        time.sleep(self.seconds)
        return ChatResult(generations=[ChatGeneration(message=AIMessage("a"))])

    @property
    def _llm_type(self) -> str:
        return "slow"


class Hosted(Slow):
    """A model with async code of its own, so that it takes several calls at the same time."""

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        await asyncio.sleep(self.seconds)
        return ChatResult(generations=[ChatGeneration(message=AIMessage("a"))])


def ask(text: str, model: Any) -> Any:
    return ChatPromptTemplate.from_template(text) | model | StrOutputParser()


def three(model: Any) -> Any:
    """Return a chain of three calls. The last one needs the other two."""
    return (
        RunnablePassthrough.assign(a=ask("Rewrite {question}", model))
        .assign(b=ask("Shorten {question}", model))
        .assign(c=ask("Join {a} and {b}", model))
    )


def unseen(text: str) -> dict[str, str]:
    time.sleep(0.0)
    return {"question": text}


@pytest.fixture(scope="module")
def pool() -> Iterator[EnginePool]:
    with EnginePool.local(fake_engines(rtx3090())) as made:
        yield made


def lines(text: str) -> list[str]:
    found = text.split("\n")
    assert [line[:15].rstrip() for line in found] == ["Understood:", "Starts early:", "Expect:"], text
    return [line[15:] for line in found]


# ------------------------------------------------------------ the three lines


def test_explain_gives_no_figure_before_a_measurement() -> None:
    """An earlier version printed a ratio from the engines' profiles for models that were never measured."""
    fast = accelerate(three(Hosted()))
    assert lines(fast.explain(QUESTION)) == [
        "9 parts: 9 optimized",
        "2 model calls (a.model and b.model) side by side",
        "not known yet: your own models have not been measured: `teola compare` measures it",
    ]


async def timed(call: Awaitable[Any]) -> float:
    """Return the result and the seconds by the loop's clock."""
    clock = asyncio.get_running_loop()
    begun = clock.time()
    await call
    return clock.time() - begun


def ratio_of(line: str) -> float:
    assert "faster in the last call" in line
    return float(line.split(" times")[0])


def test_explain_gives_the_measured_speed_up() -> None:
    """The speed-up is that of the last call. In virtual time, 3 calls take the time of 2."""

    async def measured() -> tuple[float, float, str]:
        async with EnginePool.on_this_loop(fake_engines(rtx3090())) as pool:
            plain, fast = three(Hosted(seconds=0.2)), accelerate(three(Hosted(seconds=0.2)), pool=pool)
            took = await timed(plain.ainvoke(QUESTION)), await timed(fast.ainvoke(QUESTION))
            return *took, lines(fast.explain(QUESTION))[2]

    took, fast, expectation = run_virtual(measured())
    assert took == pytest.approx(0.6) and fast == pytest.approx(0.4) and ratio_of(expectation) == 1.5


def test_explain_gives_the_measured_speed_up_without_a_pool() -> None:
    """The speed-up compares the sum of all calls with the time of the last query, both from its trace."""
    fast = accelerate(three(Hosted(seconds=0.2)))
    fast.invoke(QUESTION)
    trace = fast.last_trace()
    expectation = lines(fast.explain(QUESTION))[2]
    if any(".call#" in span.primitive for span in trace.spans):  # the plain object came to it before it was planned
        assert "does not tell" in expectation
    else:
        calls = [span.seconds for span in trace.spans if span.engine]
        code_s = trace.seconds - trace.busy("wrapped")
        assert len(calls) == 3 and min(calls) >= 0.2
        assert ratio_of(expectation) == pytest.approx((sum(calls) + code_s) / trace.seconds, abs=0.0051)


def test_explain_names_the_arm_of_a_branch_that_gains() -> None:
    chain = RunnableBranch((lambda x: len(x["question"]) > 3, three(Hosted())), ask("Answer {question}", Hosted()))
    fast = accelerate(chain)
    assert lines(fast.explain(QUESTION)) == [
        "2 parts: 2 shared (RunnableBranch and RunnableSequence)",
        "calls inside chain.branches[0][1], if it is called",
        "not known yet: your own models have not been measured: `teola compare` measures it",
    ]
    rows = {row.name: row for row in fast.report().calls}
    assert rows["b.model"].status is Status.PREFETCHED
    assert rows["b.model"].source.startswith("chain.branches[0][1].steps[")


def test_explain_expects_no_gain_for_a_sync_model() -> None:
    """A model without async code gets one call at a time, so that nothing gets faster."""
    fast = accelerate(three(Slow()))
    fast.invoke(QUESTION)
    assert lines(fast.explain(QUESTION))[1:] == [
        "nothing",
        "no gain: Slow answers one call at a time, without async code of its own; "
        "if several threads may call it at once, say so: accelerate(..., concurrent=[Slow])",
    ]


def test_explain_gives_no_figure_for_answers_of_unknown_length() -> None:
    """An earlier version predicted a ratio of 0.99 from profiles. The real one is 1.04."""

    async def measured() -> tuple[list[str], float, float, str]:
        async with EnginePool.on_this_loop(fake_engines(rtx3090())) as pool:
            plain, fast = documented(pool), accelerate(documented(pool))
            first_lines = lines(fast.explain(QUESTION))
            took = await timed(plain.ainvoke(QUESTION))
            await pool.runtime.areset()
            now = await timed(fast.ainvoke(QUESTION))
            return first_lines, took, now, lines(fast.explain(QUESTION))[2]

    first, took, now, expectation = run_virtual(measured())
    assert first[1].startswith(
        "each search of found as soon as its item is written; the beginning of the prompt of model"
    )
    assert first[2].startswith("known after the first call, as the length of answers is not known")
    assert ratio_of(expectation) > 1.0 and ratio_of(expectation) == pytest.approx(took / now, rel=0.05)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda m: ask("{question}", m), "its only call (model) has nothing to run beside"),
        (
            lambda m: ask("{question}", m) | (lambda text: {"question": text}) | ask("{question}", m),
            "each of its 2 calls needs what the one before gives",
        ),
        (
            lambda m: ask("{question}", m) | RunnableLambda(lambda text: unseen(text)) | ask("{question}", m),
            "its calls (model and model2) wait for each other or for your code (lambda)",
        ),
        (lambda m: RunnablePassthrough(), "no part of it can start sooner or is served by an engine"),
    ],
)
def test_explain_gives_the_reason_for_no_gain(pool: EnginePool, make: Callable[[Any], Any], why: str) -> None:
    fast = accelerate(make(ChatTeola(pool=pool, max_tokens=4)))
    explanation = lines(fast.explain(QUESTION))
    assert explanation[1] == "nothing" and explanation[2].startswith(f"no gain: {why}") and not fast.gains


def test_explain_names_the_first_change_to_make(pool: EnginePool) -> None:
    model = ChatTeola(pool=pool, max_tokens=4)
    chain = RunnablePassthrough.assign(a=ask("Rewrite {question}", model)) | ask("Say {a} again, of {question}", model)
    expectation = lines(accelerate(chain).explain(QUESTION))[2]
    assert "; change first: in the prompt of model, question stands behind a, which is known last" in expectation


# ------------------------------------------------------------ objects of every kind


def index() -> VectorStoreIndex:
    return VectorStoreIndex([TextNode(text="Lambs eat grass.")], embed_model=MockEmbedding(embed_dim=8))


class Flow(Workflow):
    @step
    async def only(self, ev: StartEvent) -> StopEvent:
        return StopEvent(result="a")


def graph(model: Any) -> Any:
    class State(TypedDict, total=False):
        question: str
        first: str
        second: str

    made = StateGraph(State)
    made.add_node("one", lambda state: {"first": model.invoke(f"Rewrite {state['question']}").text})
    made.add_node("two", lambda state: {"second": model.invoke(f"Shorten {state['question']}").text})
    made.add_edge(START, "one")
    made.add_edge("one", "two")
    return made.compile()


@tool
def pay(amount: int) -> str:
    """Pays."""
    return "paid"


def agent_of_llamaindex(pool: EnginePool) -> Any:
    llm = TeolaLLM(pool=pool)
    return FunctionAgent(llm=llm, tools=[QueryEngineTool.from_defaults(index().as_query_engine(llm=llm), name="farm")])


OBJECTS: dict[str, Callable[[EnginePool], Any]] = {
    "chain": lambda pool: three(ChatTeola(pool=pool)),
    "model": lambda pool: ChatTeola(pool=pool),
    "graph": lambda pool: graph(ChatTeola(pool=pool)),
    "plain graph": lambda pool: graph(Slow()),
    "query engine": lambda pool: index().as_query_engine(llm=TeolaLLM(pool=pool), response_mode="accumulate"),
    "retriever": lambda pool: index().as_retriever(),
    "workflow": lambda pool: Flow(),
    "agent": agent_of_llamaindex,
}


@pytest.mark.parametrize("name", list(OBJECTS))
def test_explain_has_one_layout_for_all_objects(pool: EnginePool, name: str) -> None:
    fast = accelerate(OBJECTS[name](pool), pool=None if name == "plain graph" else pool)
    short, whole = fast.explain(), fast.explain(details=True)
    assert lines(short) and whole.startswith(f"{short}\n\nWhat was understood\n-------------------\n")
    assert fast.explain(None) == short
    assert (lines(short)[1] == "nothing") == lines(short)[2].startswith("no gain")


def test_explain_of_a_graph_gives_figures_after_a_call(pool: EnginePool) -> None:
    fast = accelerate(graph(ChatTeola(pool=pool, max_tokens=4)))
    assert lines(fast.explain())[1:] == [
        "two.model: when one begins",
        "not known yet, as a graph decides while it runs: `teola compare` measures it",
    ]
    fast.invoke(QUESTION)
    assert lines(fast.explain())[2].startswith("unknown, as the trace of the last call (")


def trace_of(*calls: tuple[float, float, float], engine: str = "wrapped") -> QueryTrace:
    """Return the trace of a query of 3 s, whose calls have (seconds, when the original asked, when it was answered)."""
    spans = [
        Span("q", "app", str(i), "GENERATION", 0.0, 0.0, done=seconds, engine=engine)
        for i, (seconds, *_) in enumerate(calls)
    ]
    waits = [Wait(requested_s, answered, (str(i),)) for i, (_, requested_s, answered) in enumerate(calls)]
    return QueryTrace("q", "app", 0.0, 3.0, tuple(spans), waits=tuple(waits))


@pytest.mark.parametrize(
    ("trace", "saved"),
    [
        (trace_of((1.0, 0.0, 1.0), (1.0, 1.0, 2.0)), 0.0),
        (trace_of((1.0, 0.0, 1.0), (1.0, 1.0, 1.1), (2.0, 1.1, 2.1)), 1.9),
        (trace_of((1.0, 0.0, 1.0), (1.0, 0.5, 1.5)), None),
        (trace_of((1.0, 0.0, 1.0), engine="llm"), None),
        (trace_of(), None),
    ],
    ids=["each in its place", "prefetched", "side by side in the original", "on an engine", "no calls"],
)
def test_seconds_saved_are_call_time_minus_waiting_time(trace: QueryTrace, saved: float | None) -> None:
    assert seconds_saved(trace) == (None if saved is None else pytest.approx(saved))


def test_call_without_gain_is_described_as_no_gain() -> None:
    assert describe_measured_gain(trace_of((1.0, 0.0, 1.0), (1.0, 1.0, 2.0))).startswith(
        "no gain in the last call (3.00 s)"
    )
    assert describe_measured_gain(trace_of((1.0, 0.0, 1.0), (1.5, 1.0, 1.0))).startswith(
        "1.50 times faster in the last call: 3.00 s"
    )


def side_by_side(*seconds: float) -> tuple[Graph, QueryTrace]:
    """Return the graph of a query whose embeddings do not wait for each other, and a trace in which they did."""
    names = [f"e{number}.embedding" for number in range(len(seconds))]
    graph = Graph((Primitive(name, PrimitiveKind.EMBEDDING, "embedder") for name in names), Ref(names[0]))
    ends = list(accumulate(seconds))
    spans = (
        Span("q", "app", name, "EMBEDDING", end - one, end - one, done=end, engine="embedder")
        for name, one, end in zip(names, seconds, ends, strict=True)
    )
    return graph, QueryTrace("q", "app", 0.0, ends[-1] + 1.0, tuple(spans))


def test_slower_call_is_described_as_slower() -> None:
    """An earlier version printed `0.67 times faster`."""
    graph, trace = side_by_side(1.0, 2.0)

    assert seconds_saved(trace, graph) == -1.0
    assert describe_measured_gain(trace, graph).startswith(
        "1.33 times slower in the last call: 4.00 s, about 3.00 s with each call"
    )


def test_time_without_model_calls_counts_as_no_loss() -> None:
    graph, trace = side_by_side(1.0)

    assert describe_measured_gain(trace, graph).startswith("no gain in the last call (2.00 s)")


def test_function_with_prefetched_calls_gets_no_advice() -> None:
    model = Slow()
    answer_all = RunnableLambda(lambda given: [model.invoke(f"{one} in short") for one in given["questions"]])
    fast = accelerate(RunnablePassthrough() | answer_all, concurrent=[Slow])
    explanation = fast.explain()
    assert "change first" not in explanation
    assert "together with those of the other items" in explanation


def test_explain_counts_each_part_once() -> None:
    """LlamaIndex's report has a row for each way in which a part is asked."""
    fast = accelerate(index().as_query_engine(llm=MockLLM()))
    assert lines(fast.explain())[0] == "2 parts: 2 unchanged (VectorIndexRetriever and CompactAndRefine)"


# ------------------------------------------------------------ words


def test_component_of_strips_primitive_suffixes() -> None:
    assert component_of("model.prefilling.partial#0") == component_of("model.decoding#1") == "model"
    assert component_of("found[0]/found.retrieve.embedding") == "found.retrieve"
    assert component_of("rows#1") == "rows" and component_of("part1/a.searching") == "a"
    assert component_of("store.call#3") == "store.call"


def test_listed_cuts_long_lists() -> None:
    assert listed([]) == "" and listed(["a"]) == "a" and listed(["a", "b", "c"]) == "a, b and c"
    assert listed(["a", "b", "c", "d", "e"], "or") == "a, b, c or 2 more"
