"""Tests of an accelerated graph as a graph: its class, its copies, its nodes, and one query for each call."""

from __future__ import annotations

import asyncio
import pickle
import time
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnableParallel
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.func import entrypoint, task
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.types import CachePolicy, Command, interrupt
from support.recording import record
from typing_extensions import TypedDict

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM
from teola_plugin.engines.profiles import rtx3090, scaled
from teola_plugin.errors import QueryTimeout, RegistrationError
from teola_plugin.langchain import ChatTeola
from teola_plugin.requests.payloads import Generate

RULES = "Answer as briefly as you can, in plain words, and say what you do not know. " * 12


class State(TypedDict, total=False):
    question: str
    first: str
    second: str


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    with EnginePool.local(engines=[FakeLLM(), FakeEmbedder()]) as made:
        yield made


@pytest.fixture
def slow_llm() -> FakeLLM:
    """Return an engine slow enough that a warm-up is sent while it answers, even on a busy machine."""
    return FakeLLM("llm", scaled(rtx3090(), 2.0)["llm"])


def chains(pool: EnginePool) -> Any:
    """Build a graph of two nodes in sequence that do not depend on each other."""
    llm = ChatTeola(pool=pool)
    builder = StateGraph(State)
    for name in ("first", "second"):
        chain = ChatPromptTemplate.from_template(name + ": {question}") | llm | StrOutputParser()
        builder.add_node(f"say_{name}", RunnableParallel({name: chain}))
    builder.add_edge(START, "say_first")
    builder.add_edge("say_first", "say_second")
    builder.add_edge("say_second", END)
    return builder


def functions(pool: EnginePool) -> Any:
    llm = ChatTeola(pool=pool)

    def ask(state: State) -> State:
        return {"first": llm.invoke(f"Say {state['question']}").text}

    return StateGraph(State).add_node("ask", ask).add_edge(START, "ask")


def test_accelerated_graph_keeps_class_and_leaves_the_original_unchanged(pool: EnginePool) -> None:
    plain = chains(pool).compile(name="two")
    nodes = dict(plain.nodes)
    fast = accelerate(plain)
    assert isinstance(fast, CompiledStateGraph) and type(fast).__name__ == "CompiledStateGraph"
    assert fast.builder is plain.builder and fast.get_name() == "two"
    assert plain.nodes == nodes and type(plain) is CompiledStateGraph
    assert fast.get_graph(xray=True).draw_mermaid() == plain.get_graph(xray=True).draw_mermaid()
    assert fast.get_input_jsonschema() == plain.get_input_jsonschema()


def test_call_of_a_later_node_is_prefetched_before_the_barrier(pool: EnginePool) -> None:
    plain = chains(pool).compile()
    fast = accelerate(plain)
    given: State = {"question": "why"}
    assert fast.invoke(given) == plain.invoke(given)
    spans = {span.primitive: span for span in fast.last_trace().spans}
    first, second = spans["part1/say_first.first.model.prefilling"], spans["part1/say_second.second.model.prefilling"]
    assert second.queued < first.done
    assert not [name for name in spans if ".call#" in name], "the plain nodes' own calls were served by these"


def test_interrupted_call_and_its_resume_are_two_queries(pool: EnginePool) -> None:
    llm = ChatTeola(pool=pool)

    def ask(state: State) -> State:
        first = llm.invoke("before").text
        return {"first": first, "second": interrupt("which?")}

    fast = accelerate(StateGraph(State).add_node("ask", ask).add_edge(START, "ask").compile(InMemorySaver()), pool=pool)
    config = {"configurable": {"thread_id": "1"}}
    assert "__interrupt__" in fast.invoke({"question": "x"}, config)
    first = fast.last_trace()
    assert fast.invoke(Command(resume="this"), config)["second"] == "this"
    second = fast.last_trace()
    assert first.query_id != second.query_id
    assert len(first.spans) == len(second.spans) == 1, "each execution of the node made its own call"


def test_prompt_behind_an_interrupt_is_only_prefilled(slow_llm: FakeLLM) -> None:
    """Its known beginning waits in the engine's cache for the human; nothing is generated, which might be lost."""
    with EnginePool.local(llm=slow_llm) as pool:
        llm = ChatTeola(pool=pool, max_tokens=8)

        def write(state: State) -> State:
            return {"first": llm.invoke(f"Write about {state['question']}").text}

        def review(state: State) -> State:
            return {"second": interrupt(state["first"])}

        def revise(state: State) -> State:
            return {"first": llm.invoke(f"{RULES} {state['question']} {state['second']}").text}

        graph = StateGraph(State).add_sequence([write, review, revise]).add_edge(START, "write")
        fast, config = accelerate(graph.compile(InMemorySaver())), {"configurable": {"thread_id": "1"}}
        requests = record(slow_llm)
        assert "__interrupt__" in fast.invoke({"question": "x"}, config)
        prefixes = [one.payload.prompt.known_prefix() for one in requests if not isinstance(one.payload, Generate)]
        assert any(RULES in prefix for prefix in prefixes)
        fast.invoke(Command(resume="shorter"), config)
        prompts = [one.payload.prompt.flat() for one in requests if isinstance(one.payload, Generate)]
        assert [prompt.count("shorter") for prompt in prompts] == [0, 1]


def test_copies_of_an_accelerated_graph_keep_its_options(pool: EnginePool) -> None:
    fast = accelerate(chains(pool).compile(), app="two")
    for made in (fast.with_config(tags=["x"]), fast.copy()):
        assert isinstance(made, CompiledStateGraph)
        made.invoke({"question": "x"})
        assert made.last_trace().app == "two"
    assert fast.with_config(tags=["x"]).config["tags"] == ["x"]
    with pytest.raises((RegistrationError, TypeError, AttributeError, pickle.PicklingError)):
        pickle.dumps(fast)


def test_copy_of_an_accelerated_graph_keeps_changed_attributes(pool: EnginePool) -> None:
    fast = accelerate(chains(pool).compile())
    fast.step_timeout = 7
    assert fast.copy().step_timeout == 7


def test_graph_in_a_chain_joins_the_query_of_the_chain(pool: EnginePool) -> None:
    plain = RunnableLambda(lambda text: {"question": text}) | chains(pool).compile() | (lambda state: state["second"])
    fast = accelerate(plain, pool=pool)
    assert fast.invoke("why") == plain.invoke("why")
    trace = fast.last_trace()
    assert any("say_second" in span.primitive for span in trace.spans)
    assert pool.traces[-1].query_id == trace.query_id


def test_graphs_in_nodes_and_functions_join_the_outer_query(pool: EnginePool) -> None:
    inner = chains(pool).compile()
    fast_inner = accelerate(inner)

    def call(state: State) -> State:
        return {"first": fast_inner.invoke({"question": "inside"})["first"]}

    builder = StateGraph(State).add_node("inner", inner).add_node("call", call)
    fast = accelerate(builder.add_edge(START, "inner").add_edge("inner", "call").compile(), pool=pool)
    fast.invoke({"question": "why"})
    assert fast.last_trace().query_id and len(pool.traces) == 1
    assert isinstance(dict(fast.get_subgraphs())["inner"], CompiledStateGraph)


def test_graphs_with_a_shared_node_cache_keep_their_own_results(pool: EnginePool) -> None:
    cache = InMemoryCache()

    def made(word: str) -> Any:
        def alpha(state: State) -> State:
            return {"first": "alpha"}

        def beta(state: State) -> State:
            return {"first": "beta"}

        func = alpha if word == "alpha" else beta
        builder = StateGraph(State).add_node("n", func, cache_policy=CachePolicy()).add_edge(START, "n")
        return builder.compile(cache=cache)

    fast = {word: accelerate(made(word), pool=pool) for word in ("alpha", "beta")}
    for _ in range(2):
        for word, graph in fast.items():
            assert graph.invoke({"question": "same"})["first"] == word
            assert made(word).invoke({"question": "same"})["first"] == word


def test_deadline_ends_a_graph_call(pool: EnginePool) -> None:
    async def slow(state: State) -> State:
        await asyncio.sleep(60)
        return {"first": "late"}

    fast = accelerate(StateGraph(State).add_node("slow", slow).add_edge(START, "slow").compile(), pool=pool)
    begun = time.monotonic()
    with pytest.raises(QueryTimeout):
        asyncio.run(fast.ainvoke({"question": "x"}, {"configurable": {"teola_deadline_s": 0.1}}))
    assert time.monotonic() - begun < 50


def test_functional_api_entrypoint_is_accelerated(pool: EnginePool) -> None:
    llm = ChatTeola(pool=pool)

    @task
    def ask(text: str) -> str:
        return llm.invoke(text).text

    @entrypoint(checkpointer=InMemorySaver())
    def flow(text: str) -> str:
        return ask(text).result()

    fast = accelerate(flow, pool=pool)
    config: Any = {"configurable": {"thread_id": "1"}}
    assert fast.invoke("hello", config) == flow.invoke("hello", {"configurable": {"thread_id": "2"}})
    assert fast.last_trace().query_id and len(pool.traces) == 1
    assert fast.get_state(config).values == flow.get_state(config).values


def test_shadow_option_raises_for_graphs(pool: EnginePool) -> None:
    with pytest.raises(RegistrationError, match="checkpoints"):
        accelerate(chains(pool).compile(), shadow=0.5)


def test_unknown_speculate_option_raises_for_graphs(pool: EnginePool) -> None:
    with pytest.raises(RegistrationError, match="speculate"):
        accelerate(functions(pool).compile(), speculate="yes")


def test_nodes_of_a_graph_count_as_user_code(pool: EnginePool) -> None:
    """Which may write to a store that cannot tell: no early search is claimed there."""
    fast = accelerate(functions(pool).compile(), pool=pool)
    fast.invoke({"question": "x"})
    assert fast._teola.last_run[0].has_user_code
