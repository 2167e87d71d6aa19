"""A server gets the requests of the original, each of them once: in whichever way an app is called, bare or bound.

`bare`: the app's own models, without a pool. `exact`: bound to a server of one's own whose streams do not add up to its
whole answers, so that a request fixes the form of its answer. `joining`: to one whose streams do, where it does not.
"""

from __future__ import annotations

import asyncio
import json
import operator
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, TypedDict

import pytest
from differential.graphs.ways import GRAPH, RUNNABLE, Way
from langchain_core.callbacks import BaseCallbackHandler
from langchain_core.documents import Document
from langchain_core.output_parsers import CommaSeparatedListOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableBranch, RunnableConfig, RunnableLambda, RunnablePassthrough
from langchain_core.tracers._streaming import _StreamingCallbackHandler
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from support.openai_stub import MODEL, OpenAIStub, openai_stub

from teola_plugin import accelerate
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.pool import EnginePool

pytestmark = pytest.mark.filterwarnings(
    "ignore::pytest.PytestUnraisableExceptionWarning",
    "ignore::ResourceWarning",
    "ignore::langchain_core._api.beta_decorator.LangChainBetaWarning",
)
SETTLED_S = 0.03
"""Seconds without a new request after which none is on its way."""


class TokenReader(BaseCallbackHandler, _StreamingCallbackHandler[Any]):
    """A handler that models stream to, as those of LangGraph's message streams are."""

    def tap_output_aiter(self, run_id: Any, output: Any) -> Any:
        return output

    def tap_output_iter(self, run_id: Any, output: Any) -> Any:
        return output


# ------------------------------------------------------------ the server


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """Return the stub's answer. An agent calls its tool once, and only the second document is relevant."""
    prompt = str(body["messages"][-1]["content"])
    if body.get("tools") and body["messages"][-1]["role"] != "tool":
        call = {"name": body["tools"][0]["function"]["name"], "arguments": json.dumps({"field": "north"})}
        return {"content": "", "tool_calls": [{"id": "call-1", "type": "function", "function": call}]}
    if prompt.startswith("Refuse"):
        return {"status": 400}
    if prompt.startswith("List"):
        return {"content": "oats, rye, barley"}
    if prompt.startswith("Is it relevant:"):
        return {"content": "yes" if "second" in prompt or "better" in prompt else "no"}
    return {"content": f"an answer to {prompt}"}


class Server(NamedTuple):
    stub: OpenAIStub
    pool: EnginePool | None
    """None for the side without one."""

    def bound(self, model: Any) -> Any:
        return model if self.pool is None else self.pool.bound(model, "llm")

    def requests(self) -> Counter[str]:
        """Return the bodies since the last call, without warm-ups.

        Where streams add up, whether a body streams is left out.
        """
        before = -1
        while before != len(self.stub.requests):
            before = len(self.stub.requests)
            time.sleep(SETTLED_S)
        bodies = self.stub.generations
        self.stub.requests.clear()
        if self.pool is not None and self.stub.joins:
            bodies = [{key: body[key] for key in body if key not in ("stream", "stream_options")} for body in bodies]
        return Counter(json.dumps(body, sort_keys=True) for body in bodies)


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    with openai_stub(answer, joins=False) as exact, openai_stub(answer) as joining, openai_stub(answer) as bare:
        engines = [OpenAIServer(base_url=one.base_url, dedicated=True, calibrate=False) for one in (exact, joining)]
        with EnginePool.local(llm=engines[0]) as one, EnginePool.local(llm=engines[1]) as other:
            yield {"bare": Server(bare, None), "exact": Server(exact, one), "joining": Server(joining, other)}


def model(server: Server, **options: Any) -> Any:
    given: dict[str, Any] = {"model": MODEL, "temperature": 0.0, "max_retries": 0, **options}
    return ChatOpenAI(base_url=server.stub.base_url, api_key="none", **given)


# ------------------------------------------------------------ the apps


class State(TypedDict, total=False):
    question: str
    documents: list[str]
    notes: Annotated[list[str], operator.add]
    a: str
    b: str
    c: str
    tries: int


def ask(text: str, llm: Any) -> Runnable[Any, Any]:
    return ChatPromptTemplate.from_template(text) | llm | StrOutputParser()


def three_nodes(llm: Any) -> Any:
    """Build a graph of three calls in sequence. Two of them do not need the calls before."""

    def first(state: State) -> dict[str, str]:
        return {"a": llm.invoke(f"First, {state['question']}").text}

    def second(state: State) -> dict[str, str]:
        return {"b": llm.invoke(f"Second, {state['question']}").text}

    def third(state: State) -> dict[str, str]:
        return {"c": llm.invoke(f"Third, {state['question']}").text}

    return in_a_row(first, second, third)


def three_async_nodes(llm: Any) -> Any:
    async def first(state: State) -> dict[str, str]:
        return {"a": (await llm.ainvoke(f"First, {state['question']}")).text}

    async def second(state: State, config: RunnableConfig) -> dict[str, str]:
        return {"b": (await llm.ainvoke(f"Second, {state['question']}", config)).text}

    async def third(state: State) -> dict[str, str]:
        return {"c": (await llm.ainvoke(f"Third, {state['question']}")).text}

    return in_a_row(first, second, third)


def in_a_row(*nodes: Any) -> Any:
    graph = StateGraph(State)
    for node in nodes:
        graph.add_node(node.__name__, node)
    names = [START, *(node.__name__ for node in nodes), END]
    for one, other in pairwise(names):
        graph.add_edge(one, other)
    return graph.compile()


def graph_of_chains(llm: Any) -> Any:
    """Build a graph whose nodes are chains."""
    graph = StateGraph(State)
    for key, text in {"a": "First, {question}", "b": "Second, {question}"}.items():
        graph.add_node(f"node_{key}", RunnablePassthrough.assign(**{key: ask(text, llm)}))
    graph.add_edge(START, "node_a")
    graph.add_edge("node_a", "node_b")
    graph.add_edge("node_b", END)
    return graph.compile()


def grading_loop(llm: Any) -> Any:
    """Build a graph that grades documents in a loop, and searches again with a better question (adaptive RAG)."""

    def search(state: State) -> dict[str, Any]:
        better = state["question"].startswith("an answer")
        return {"documents": [f"{'better' if better else 'the first'} one", "the second one", "the third one"]}

    def grade(state: State) -> dict[str, Any]:
        kept = []
        for document in state["documents"]:
            if llm.invoke(f"Is it relevant: {document}").text == "yes":
                kept.append(document)
        return {"documents": kept, "tries": state.get("tries", 0) + 1}

    def way(state: State) -> str:
        return "write" if len(state["documents"]) > 1 or state["tries"] > 2 else "rewrite"

    def rewrite(state: State) -> dict[str, str]:
        return {"question": llm.invoke(f"Rewrite {state['question']}").text}

    def write(state: State) -> dict[str, str]:
        return {"a": llm.invoke(f"Answer {state['question']} from {state['documents']}").text}

    def check(state: State) -> dict[str, str]:
        return {"b": llm.invoke(f"Check {state['question']}").text}

    graph = StateGraph(State)
    for node in (search, grade, rewrite, write, check):
        graph.add_node(node.__name__, node)
    graph.add_edge(START, "search")
    graph.add_edge("search", "grade")
    graph.add_conditional_edges("grade", way, ["write", "rewrite"])
    graph.add_edge("rewrite", "search")
    graph.add_edge("write", "check")
    graph.add_edge("check", END)
    return graph.compile()


def subgraph(llm: Any) -> Any:
    """Build a graph with a graph as a node between two others."""

    def before(state: State) -> dict[str, str]:
        return {"a": llm.invoke(f"Before, {state['question']}").text}

    def after(state: State) -> dict[str, str]:
        return {"documents": [llm.invoke(f"After, {state['question']}").text]}

    graph = StateGraph(State)
    graph.add_node("before", before)
    graph.add_node("inner", three_nodes(llm))
    graph.add_node("after", after)
    graph.add_edge(START, "before")
    graph.add_edge("before", "inner")
    graph.add_edge("inner", "after")
    graph.add_edge("after", END)
    return graph.compile()


def sending(llm: Any) -> Any:
    """Build a graph that sends a task for each word, and then answers."""

    def each(state: State) -> list[Send]:
        return [Send("explain", {"question": word}) for word in state["question"].split()]

    def explain(state: State) -> dict[str, Any]:
        return {"notes": [llm.invoke(f"Explain {state['question']}").text]}

    def write(state: State) -> dict[str, str]:
        return {"a": llm.invoke(f"Sum up {state['question']}").text}

    graph = StateGraph(State)
    graph.add_node("explain", explain)
    graph.add_node("write", write)
    graph.add_conditional_edges(START, each, ["explain"])
    graph.add_edge("explain", "write")
    graph.add_edge("write", END)
    return graph.compile()


def streaming_nodes(llm: Any) -> Any:
    """Build a graph whose nodes stream by themselves."""

    def first(state: State) -> dict[str, str]:
        return {"a": llm.invoke(f"First, {state['question']}").text}

    def second(state: State) -> dict[str, str]:
        return {"b": "".join(chunk.text for chunk in llm.stream(f"Second, {state['question']}"))}

    def third(state: State) -> dict[str, str]:
        chain = ask("Third, {question}", llm)
        return {"c": "".join(chain.stream({"question": state["question"]}))}

    return in_a_row(first, second, third)


def nodes_with_handlers(llm: Any) -> Any:
    """Build a graph whose nodes have handlers of their own, to which the model streams."""
    reader = TokenReader()

    def first(state: State) -> dict[str, str]:
        return {"a": llm.invoke(f"First, {state['question']}").text}

    def second(state: State) -> dict[str, str]:
        return {"b": llm.invoke(f"Second, {state['question']}", {"callbacks": [reader]}).text}

    def third(state: State) -> dict[str, str]:
        return {"c": llm.with_config(callbacks=[reader]).invoke(f"Third, {state['question']}").text}

    return in_a_row(first, second, third)


def agent(llm: Any) -> Any:
    """Create an agent with a tool that calls the model."""
    from langchain.agents import create_agent
    from langchain_core.tools import tool

    @tool
    def look_up(field: str) -> str:
        """What grows in a field."""
        return str(llm.invoke(f"What grows in the {field} field?").text)

    return create_agent(llm, [look_up])


GRAPHS: dict[str, Callable[[Any], Any]] = {
    "three nodes": three_nodes,
    "three async nodes": three_async_nodes,
    "graph of chains": graph_of_chains,
    "grading loop": grading_loop,
    "subgraph": subgraph,
    "sending": sending,
    "streaming nodes": streaming_nodes,
    "nodes with handlers": nodes_with_handlers,
    "agent": agent,
}


def three_prompts(llm: Any) -> Any:
    keys = ("a", "b", "c")
    chain = RunnablePassthrough.assign(**{keys[0]: ask("First, {question}", llm)})
    chain = chain.assign(b=ask("Second, {question}", llm)).assign(c=ask("Third, {question}", llm))  # type: ignore[assignment]
    return chain | ask("Compare {a} with {b} and {c}", llm)


def mapped(llm: Any) -> Any:
    """Return a chain whose model writes a list, and calls the model for each item."""
    items = ChatPromptTemplate.from_template("List {question}") | llm | CommaSeparatedListOutputParser()
    return items | ask("Explain {item}", llm).map()


def split(value: Mapping[str, str]) -> list[dict[str, str]]:
    return [{"question": word} for word in value["question"].split()]


def mapped_by_code(llm: Any) -> Any:
    return RunnableLambda(split) | ask("Explain {question}", llm).map()


def branched(llm: Any) -> Any:
    """Return a chain with a branch, a fallback and a retry."""
    chosen = RunnableBranch(
        (lambda value: len(value["question"]) > 100, ask("Shorten {question}", llm)),
        RunnablePassthrough.assign(d=ask("Translate {question}", llm)) | ask("Praise {question}", llm),
    )
    careful = ask("Repeat {question}", llm).with_retry()
    safe = ask("Spell {question}", llm).with_fallbacks([ask("Read {question}", llm)])
    return RunnablePassthrough.assign(a=ask("First, {question}", llm)).assign(b=chosen).assign(c=careful, e=safe)


def inside_a_function(llm: Any) -> Any:
    """Return a chain with a function that returns a chain, and one that calls another."""
    inner = three_prompts(llm)
    return RunnablePassthrough.assign(d=ask("First of all, {question}", llm)).assign(
        e=RunnableLambda(lambda value: inner), f=RunnableLambda(lambda value: inner.invoke(value))
    )


class Words(BaseRetriever):
    """A document for each word of a query."""

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        return [Document(page_content=f"{word} grows") for word in query.split()[:2]]


def retrieving(llm: Any) -> Any:
    """Return a chain with queries that a model writes, documents that it shortens, and an answer."""
    from langchain_classic.retrievers import ContextualCompressionRetriever, MultiQueryRetriever
    from langchain_classic.retrievers.document_compressors import LLMChainExtractor

    queries = MultiQueryRetriever.from_llm(Words(), llm)
    shortened = ContextualCompressionRetriever(base_compressor=LLMChainExtractor.from_llm(llm), base_retriever=Words())
    found = RunnablePassthrough.assign(
        a=operator.itemgetter("question") | queries, b=operator.itemgetter("question") | shortened
    )
    return found.assign(c=ask("Translate {question}", llm)) | ask("Answer {question} from {a} and {b}", llm)


def chain_with_handlers(llm: Any) -> Any:
    """Return a chain whose model has a handler of its own, to which it streams."""
    model_with_handler = llm.with_config(callbacks=[TokenReader()])
    chain = RunnablePassthrough.assign(a=ask("First, {question}", llm)).assign(
        b=ask("Second, {question}", model_with_handler)
    )
    return chain | ask("Compare {a} with {b}", llm)


CHAINS: dict[str, Callable[[Any], Any]] = {
    "three prompts": three_prompts,
    "mapped": mapped,
    "mapped by code": mapped_by_code,
    "branched": branched,
    "inside a function": inside_a_function,
    "retrieving": retrieving,
    "chain with handlers": chain_with_handlers,
}


# ------------------------------------------------------------ the ways to call them


def as_completed(app: Any, given: Any, config: Any, **options: Any) -> list[Any]:
    return sorted(app.batch_as_completed([given, given], [config, config]), key=lambda item: int(item[0]))


async def aas_completed(app: Any, given: Any) -> list[Any]:
    return [item async for item in app.abatch_as_completed([given, given])]


async def atransformed(app: Any, given: Any) -> list[Any]:
    async def pieces() -> Any:
        yield given

    return [item async for item in app.atransform(pieces())]


async def inside_events(app: Any, given: Any) -> list[Any]:
    """Call an inner `ainvoke` inside an outer stream of events."""

    async def call(value: Any) -> Any:
        return await app.ainvoke(value)

    return [event async for event in RunnableLambda(call).astream_events(given, version="v2")]


HEARD: dict[str, Way] = {
    "invoke heard": lambda app, given, config, **_: app.invoke(given, {**config, "callbacks": [TokenReader()]}),
    "ainvoke heard": lambda app, given, config, **_: asyncio.run(
        app.ainvoke(given, {**config, "callbacks": [TokenReader()]})
    ),
    "batch heard": lambda app, given, config, **_: app.batch([given, given], {"callbacks": [TokenReader()]}),
    "inside events": lambda app, given, config, **_: asyncio.run(inside_events(app, given)),
    "configured": lambda app, given, config, **_: app.with_config(callbacks=[TokenReader()]).invoke(given, config),
}
"""Ways that give the answer whole while a handler makes models stream."""
CHAIN_WAYS: dict[str, Way] = {
    **RUNNABLE,
    **HEARD,
    "batch_as_completed": as_completed,
    "abatch_as_completed": lambda app, given, config, **_: asyncio.run(aas_completed(app, given)),
    "transform": lambda app, given, config, **_: list(app.transform(iter([given]))),
    "atransform": lambda app, given, config, **_: asyncio.run(atransformed(app, given)),
}
GRAPH_WAYS: dict[str, Way] = {
    **GRAPH,
    **HEARD,
    "stream tools": lambda app, given, config, **_: list(app.stream(given, config, stream_mode=["values", "tools"])),
}
CONFIG: Any = {"configurable": {"thread_id": "one"}}


def requests_of(server: Server, app: Any, way: Way, given: Any) -> Counter[str]:
    """Count all requests that the server gets for one call of the app, by body."""
    server.stub.requests.clear()
    way(app, dict(given), CONFIG)
    return server.requests()


def given_to(name: str) -> dict[str, Any]:
    return {"messages": [("user", "What grows?")]} if name == "agent" else {"question": "what grows here"}


def assert_same_requests(server: Server, make: Callable[[Any], Any], way: Way, given: Any, **options: Any) -> None:
    original = make(model(server, **options))
    expected = requests_of(server, original, way, given)
    fast = accelerate(make(server.bound(model(server, **options))))
    found = requests_of(server, fast, way, given)
    assert found == expected


def is_called_so(name: str, way: str) -> bool:
    """Return False for a graph of coroutines and a sync way, which it does not have."""
    return name != "three async nodes" or way.startswith("a") or way == "inside events"


@pytest.mark.parametrize("way", GRAPH_WAYS)
@pytest.mark.parametrize("name", GRAPHS)
def test_a_graph_sends_the_requests_of_the_original(name: str, way: str, servers: dict[str, Server]) -> None:
    if not is_called_so(name, way):
        pytest.skip("a graph of coroutines has no sync ways")
    assert_same_requests(servers["exact"], GRAPHS[name], GRAPH_WAYS[way], given_to(name))


@pytest.mark.parametrize("way", CHAIN_WAYS)
@pytest.mark.parametrize("name", CHAINS)
def test_a_chain_sends_the_requests_of_the_original(name: str, way: str, servers: dict[str, Server]) -> None:
    assert_same_requests(servers["exact"], CHAINS[name], CHAIN_WAYS[way], given_to(name))


FEW = ("invoke", "ainvoke", "batch", "stream", "astream_events v2", "invoke heard", "inside events")


@pytest.mark.parametrize("side", ["bare", pytest.param("joining", marks=pytest.mark.long)])
@pytest.mark.parametrize("way", [*FEW, "stream messages", "stream all subgraphs"])
@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "grading loop"])
def test_graph_on_other_servers_sends_the_originals_requests(
    name: str, way: str, side: str, servers: dict[str, Server]
) -> None:
    if not is_called_so(name, way):
        pytest.skip("a graph of coroutines has no sync ways")
    assert_same_requests(servers[side], GRAPHS[name], GRAPH_WAYS[way], given_to(name))


@pytest.mark.parametrize("side", ["bare", pytest.param("joining", marks=pytest.mark.long)])
@pytest.mark.parametrize("way", [*FEW, "astream", "astream_log", "batch_as_completed", "abatch", "transform"])
@pytest.mark.parametrize("name", CHAINS)
def test_chain_on_other_servers_sends_the_originals_requests(
    name: str, way: str, side: str, servers: dict[str, Server]
) -> None:
    assert_same_requests(servers[side], CHAINS[name], CHAIN_WAYS[way], given_to(name))


@pytest.mark.parametrize("way", [*FEW, "stream messages"])
def test_document_loop_on_unbound_server_sends_the_originals_requests(way: str, servers: dict[str, Server]) -> None:
    """A server whose streams add up may be asked for the answer of one arm before it is chosen; see docs/graphs.md."""
    assert_same_requests(servers["bare"], grading_loop, GRAPH_WAYS[way], given_to("grading loop"))


# ------------------------------------------------------------ models that always answer in one form

MODELS: dict[str, dict[str, Any]] = {
    "streaming": {"streaming": True},
    "not streaming": {"streaming": False},
    "streaming disabled": {"disable_streaming": True},
    "own handler": {"callbacks": [TokenReader()]},
}


@pytest.mark.parametrize(
    "side", ["exact", *(pytest.param(side, marks=pytest.mark.long) for side in ("bare", "joining"))]
)
@pytest.mark.parametrize("way", [*FEW, "stream messages", "astream_events v1"])
@pytest.mark.parametrize("name", MODELS)
def test_model_of_one_form_in_graph_sends_the_originals_requests(
    name: str, way: str, side: str, servers: dict[str, Server]
) -> None:
    assert_same_requests(servers[side], three_nodes, GRAPH_WAYS[way], given_to(""), **MODELS[name])


@pytest.mark.parametrize(
    "side", ["exact", *(pytest.param(side, marks=pytest.mark.long) for side in ("bare", "joining"))]
)
@pytest.mark.parametrize("way", [*FEW, "astream", "astream_log"])
@pytest.mark.parametrize("name", MODELS)
def test_model_of_one_form_in_chain_sends_the_originals_requests(
    name: str, way: str, side: str, servers: dict[str, Server]
) -> None:
    assert_same_requests(servers[side], three_prompts, CHAIN_WAYS[way], given_to(""), **MODELS[name])


@pytest.mark.parametrize("way", ["invoke", "stream messages"])
def test_stream_argument_in_a_graph_sends_the_originals_requests(way: str, servers: dict[str, Server]) -> None:
    assert_same_requests(
        servers["exact"], lambda llm: three_nodes(llm.bind(stream=True)), GRAPH_WAYS[way], given_to("")
    )


# ------------------------------------------------------------ what is still begun early


def begun_early(fast: Any) -> int:
    """Return the number of prefetched answers in the last call that the original took."""
    spans = [span for span in fast.last_trace().spans if span.kind in ("DECODING", "GENERATION")]
    return sum(span.outcome == "done" and ".call#" not in span.primitive for span in spans)


def called(server: Server, make: Callable[[Any], Any], way: Way, **options: Any) -> Any:
    """Return the accelerated app after a call."""
    fast = accelerate(make(server.bound(model(server, **options))))
    way(fast, given_to(""), CONFIG)
    return fast


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream values", "astream updates", "stream debug"])
def test_whole_answers_of_a_graph_are_prefetched(way: str, servers: dict[str, Server]) -> None:
    fast = called(servers["exact"], three_nodes, GRAPH_WAYS[way])
    assert begun_early(fast) >= 2


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch"])
def test_whole_answers_of_a_chain_are_prefetched(way: str, servers: dict[str, Server]) -> None:
    fast = called(servers["exact"], three_prompts, CHAIN_WAYS[way])
    assert begun_early(fast) >= 2


@pytest.mark.parametrize("name", ["not streaming", "streaming disabled"])
@pytest.mark.parametrize("way", ["stream messages", "astream_events v2", "invoke heard"])
def test_model_that_never_streams_is_prefetched_while_streaming(
    way: str, name: str, servers: dict[str, Server]
) -> None:
    fast = called(servers["exact"], three_nodes, GRAPH_WAYS[way], **MODELS[name])
    assert begun_early(fast) >= 2


@pytest.mark.parametrize("way", ["stream messages", "astream_events v2", "invoke heard"])
def test_answers_in_any_form_are_prefetched_if_streams_add_up(way: str, servers: dict[str, Server]) -> None:
    fast = called(servers["joining"], three_nodes, GRAPH_WAYS[way])
    assert begun_early(fast) >= 2


# ------------------------------------------------------------ what explain() says


def test_explain_names_calls_whose_answers_must_be_whole(servers: dict[str, Server]) -> None:
    server = servers["exact"]
    graph, chain = (accelerate(make(server.bound(model(server)))) for make in (three_nodes, three_prompts))
    for explanation in (graph.explain(), chain.explain()):
        assert "comes whole" in explanation or "come whole" in explanation
        assert "start in their place where answers are streamed" in explanation


def test_explain_claims_no_speed_up_after_a_streamed_call(servers: dict[str, Server]) -> None:
    graph = called(servers["exact"], three_nodes, GRAPH_WAYS["stream messages"])
    chain = called(servers["exact"], three_prompts, CHAIN_WAYS["astream_events v2"])
    for explanation in (graph.explain(), chain.explain()):
        assert "faster" not in explanation
        assert "the last call took" in explanation


def test_explain_expects_no_gain_for_a_streaming_model(servers: dict[str, Server]) -> None:
    server = servers["exact"]
    for make in (three_nodes, three_prompts):
        explanation = accelerate(make(server.bound(model(server, streaming=True)))).explain()
        assert "no gain" in explanation
        assert "Starts early:  nothing" in explanation


def test_explain_omits_answer_forms_if_streams_add_up(servers: dict[str, Server]) -> None:
    server = servers["joining"]
    for make in (three_nodes, three_prompts):
        explanation = accelerate(make(server.bound(model(server)))).explain()
        assert "whole" not in explanation
        assert re.search("Expect: +(not known yet|known after the first call)", explanation)


# ------------------------------------------------------------ requests that fail


def refused_chain(llm: Any) -> Any:
    chain = RunnablePassthrough.assign(a=ask("First, {question}", llm)).assign(b=ask("Refuse {question}", llm))
    return chain.assign(c=ask("Third, {question}", llm))


@pytest.mark.parametrize("side", ["exact", "joining"])
@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream", "batch", "astream_events v2", "invoke heard"])
def test_refused_request_is_sent_as_often_as_originally(way: str, side: str, servers: dict[str, Server]) -> None:
    server = servers[side]
    found = []
    for app in (refused_chain(model(server)), accelerate(refused_chain(server.bound(model(server))))):
        server.stub.requests.clear()
        error: Any = None
        try:
            [error] = [one for one in CHAIN_WAYS[way](app, given_to(""), CONFIG) if isinstance(one, Exception)][:1]
        except Exception as raised:
            error = raised
        requests = server.requests()
        found.append((type(error), sum(requests[body] for body in requests if "Refuse" in body)))
    assert found[0] == found[1]
