"""A server gets the requests of the original, each of them once: in whichever way a LlamaIndex object is called.

`bare`: the object's own model, without a pool. `exact`: bound to a server of one's own whose streams do not add up to
its whole answers, so that a request fixes the form of its answer. `joining`: to one whose streams do.
"""

from __future__ import annotations

import asyncio
import gc
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
from differential.llamaindex.compare import settled
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.agent.workflow import FunctionAgent, ReActAgent
from llama_index.core.chat_engine import CondensePlusContextChatEngine, CondenseQuestionChatEngine, ContextChatEngine
from llama_index.core.indices.query.query_transform import HyDEQueryTransform, StepDecomposeQueryTransform
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.query_engine import (
    MultiStepQueryEngine,
    RouterQueryEngine,
    SubQuestionQueryEngine,
    TransformQueryEngine,
)
from llama_index.core.question_gen import LLMQuestionGenerator
from llama_index.core.response_synthesizers import get_response_synthesizer
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.schema import TextNode
from llama_index.core.selectors import LLMMultiSelector
from llama_index.core.tools import QueryEngineTool
from llama_index.core.workflow import Event, StartEvent, StopEvent, Workflow, step
from llama_index.llms.openai_like import OpenAILike
from support.openai_stub import MODEL, OpenAIStub, openai_stub

from teola_plugin import accelerate
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.pool import EnginePool

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
SIDES = ("bare", "exact", "joining")
ASKED = "What grows here?"
SETTLED_S = 0.03
"""Seconds without a new request after which none is on its way."""
_loop = asyncio.Runner()
"""One loop for all: the package `openai` keeps connections between calls."""


# ------------------------------------------------------------ the server


def answer(body: dict[str, Any]) -> dict[str, Any]:
    """Return the stub's answer: sub-questions, choices, a step or a tool call if the prompt demands it."""
    prompt = str(body["messages"][-1]["content"])
    whole = json.dumps(body["messages"])
    if body.get("tools") and body["messages"][-1]["role"] != "tool":
        call = {"name": body["tools"][0]["function"]["name"], "arguments": json.dumps({"field": "north"})}
        return {"content": "", "tool_calls": [{"id": "call-1", "type": "function", "function": call}]}
    if "Given a user question, and a list of tools" in prompt:
        items = [{"sub_question": f"What of {name}?", "tool_name": name} for name in ("reports", "notes")]
        return {"content": "```json\n" + json.dumps({"items": items}) + "\n```"}
    if "Some choices are given below" in prompt:
        choices = [{"choice": number, "reason": "both"} for number in (1, 2)]
        return {"content": json.dumps(choices)}
    if "search queries" in prompt:
        return {"content": "oats of the north\nbarley of the south"}
    if "Thought" in whole and "Action Input" in whole:
        if "Observation" in whole.split("## Current Conversation")[-1] and body["messages"][-1]["role"] == "user":
            return {"content": "Thought: I can answer without using any more tools.\nAnswer: oats"}
        return {"content": 'Thought: I need a tool.\nAction: look_up\nAction Input: {"field": "north"}'}
    return {"content": f"an answer of {len(prompt)} characters"}


class Server(NamedTuple):
    stub: OpenAIStub
    pool: EnginePool | None
    """None for the side without one."""

    def accelerated(self, app: Any, llm: Any) -> Any:
        return accelerate(app) if self.pool is None else accelerate(app, pool=self.pool, bind=[(llm, "llm")])

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


@pytest.fixture(autouse=True)
def connections_are_freed() -> Iterator[None]:
    """Collect garbage after the test: SQLite connections that LlamaIndex leaves open warn when freed."""
    yield
    gc.collect()


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Server]]:
    with openai_stub(answer, joins=False) as exact, openai_stub(answer) as joining, openai_stub(answer) as bare:
        engines = [OpenAIServer(base_url=one.base_url, dedicated=True, calibrate=False) for one in (exact, joining)]
        with EnginePool.local(llm=engines[0]) as one, EnginePool.local(llm=engines[1]) as other:
            yield {"bare": Server(bare, None), "exact": Server(exact, one), "joining": Server(joining, other)}


def model(server: Server) -> Any:
    given: Any = {"is_chat_model": True, "is_function_calling_model": True, "max_retries": 0, "temperature": 0.0}
    given |= {"max_tokens": 50, "context_window": 20_000}
    return OpenAILike(model=MODEL, api_base=server.stub.base_url, api_key="none", **given)


# ------------------------------------------------------------ the objects


def index(name: str = "reports") -> Any:
    nodes = [TextNode(id_=f"{name}{i}", text=f"{name} {i}: field {i} has oats.") for i in range(4)]
    return VectorStoreIndex(nodes, embed_model=MockEmbedding(3))


def engine(mode: str, name: str = "reports") -> Callable[..., Any]:
    def make(llm: Any, *, streaming: bool = False) -> Any:
        return index(name).as_query_engine(llm=llm, similarity_top_k=3, response_mode=mode, streaming=streaming)

    return make


def tools(llm: Any) -> list[Any]:
    engines = {name: engine("compact", name)(llm) for name in ("reports", "notes")}
    return [QueryEngineTool.from_defaults(one, name=name, description=name) for name, one in engines.items()]


def sub_questions(llm: Any, *, streaming: bool = False) -> Any:
    return SubQuestionQueryEngine.from_defaults(
        tools(llm),
        llm=llm,
        question_gen=LLMQuestionGenerator.from_defaults(llm=llm),
        response_synthesizer=get_response_synthesizer(llm=llm, streaming=streaming),
        use_async=False,
        verbose=False,
    )


def steps(llm: Any, *, streaming: bool = False) -> Any:
    synthesizer = get_response_synthesizer(llm=llm, streaming=streaming)
    decompose = StepDecomposeQueryTransform(llm, verbose=False)
    return MultiStepQueryEngine(engine("compact")(llm), decompose, synthesizer, num_steps=2)


def router(llm: Any, *, streaming: bool = False) -> Any:
    from llama_index.core.response_synthesizers import TreeSummarize

    summarizer = TreeSummarize(llm=llm, streaming=streaming)
    selector = LLMMultiSelector.from_defaults(llm=llm)
    return RouterQueryEngine(selector, tools(llm), llm=llm, summarizer=summarizer)


def transformed(llm: Any, *, streaming: bool = False) -> Any:
    return TransformQueryEngine(engine("refine")(llm, streaming=streaming), HyDEQueryTransform(llm))


ENGINES: dict[str, Callable[..., Any]] = {
    **{mode: engine(mode) for mode in ("compact", "refine", "tree_summarize", "simple_summarize", "generation")},
    "accumulate": engine("accumulate"),
    "sub-questions": sub_questions,
    "steps": steps,
    "router": router,
    "transformed": transformed,
}


def fused(llm: Any) -> Any:
    return QueryFusionRetriever([index().as_retriever()], llm=llm, num_queries=3, use_async=False)


CHATS: dict[str, Callable[[Any], Any]] = {
    "condense question": lambda llm: CondenseQuestionChatEngine.from_defaults(engine("refine")(llm), llm=llm),
    "condense and context": lambda llm: CondensePlusContextChatEngine.from_defaults(fused(llm), llm=llm),
    "context": lambda llm: ContextChatEngine.from_defaults(
        fused(llm), llm=llm, memory=ChatMemoryBuffer.from_defaults(token_limit=5000)
    ),
}


class Drafted(Event):
    text: str


class Writing(Workflow):
    """A step that asks twice, and one that streams."""

    def __init__(self, llm: Any) -> None:
        super().__init__(timeout=20)
        self.llm = llm

    @step
    async def draft(self, ev: StartEvent) -> Drafted:
        first = await self.llm.acomplete(f"Draft {ev.about}")
        second = await self.llm.acomplete(f"Check {ev.about}")
        return Drafted(text=f"{first} {second}")

    @step
    async def write(self, ev: Drafted) -> StopEvent:
        text = ""
        async for chunk in await self.llm.astream_complete(f"Write {ev.text}"):
            text = chunk.text
        return StopEvent(result=text)


def look_up(field: str) -> str:
    """What grows in a field."""
    return f"oats grow in the {field}"


WORKFLOWS: dict[str, tuple[Callable[[Any], Any], dict[str, Any]]] = {
    "writing": (Writing, {"about": ASKED}),
    "function agent": (lambda llm: FunctionAgent(tools=[look_up], llm=llm), {"user_msg": ASKED}),
    "whole function agent": (lambda llm: FunctionAgent(tools=[look_up], llm=llm, streaming=False), {"user_msg": ASKED}),
    "ReAct agent": (lambda llm: ReActAgent(tools=[look_up], llm=llm), {"user_msg": ASKED}),
}


# ------------------------------------------------------------ the ways to call them


def read(response: Any) -> str:
    """Return the whole text of a response, streamed or not."""
    pieces = getattr(response, "response_gen", None)
    return str(response) if pieces is None else "".join(pieces)


async def aread(response: Any) -> str:
    pieces = getattr(response, "async_response_gen", None) or getattr(response, "response_gen", None)
    if pieces is None:
        return str(response)
    found = pieces() if callable(pieces) else pieces
    if hasattr(found, "__aiter__"):
        return "".join([piece async for piece in found])
    return "".join(found)


async def aquery(app: Any) -> str:
    return await aread(await app.aquery(ASKED))


async def chatting(app: Any, *, streamed: bool) -> None:
    for message in (ASKED, "And there?"):
        if streamed:
            await aread(await app.astream_chat(message))
        else:
            await app.achat(message)


def chat(app: Any) -> None:
    for message in (ASKED, "And there?"):
        app.chat(message)


def stream_chat(app: Any) -> None:
    for message in (ASKED, "And there?"):
        read(app.stream_chat(message))


async def run(app: Any, arguments: dict[str, Any], *, read_events: bool) -> None:
    handler = app.run(**arguments)
    if read_events:
        async for _ in handler.stream_events():
            pass
    await handler


QUERIES: dict[str, Callable[[Any], Any]] = {
    "query": lambda app: read(app.query(ASKED)),
    "aquery": lambda app: _loop.run(aquery(app)),
}
CHAT_WAYS: dict[str, Callable[[Any], Any]] = {
    "chat": chat,
    "achat": lambda app: _loop.run(chatting(app, streamed=False)),
    "stream_chat": stream_chat,
    "astream_chat": lambda app: _loop.run(chatting(app, streamed=True)),
}
RETRIEVALS: dict[str, Callable[[Any], Any]] = {
    "retrieve": lambda app: app.retrieve(ASKED),
    "aretrieve": lambda app: _loop.run(app.aretrieve(ASKED)),
}


def requests_of(server: Server, call: Callable[[], Any]) -> Counter[str]:
    """Count all requests that the server gets for a call, by body."""
    server.stub.requests.clear()
    call()
    return server.requests()


def assert_same_requests(server: Server, make: Callable[[Any], Any], way: Callable[[Any], Any]) -> None:
    original, llm = make(model(server)), model(server)
    expected = requests_of(server, lambda: way(original))
    fast = server.accelerated(make(llm), llm)
    found = requests_of(server, lambda: way(fast))
    settled()
    assert expected
    assert found == expected


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("way", QUERIES)
@pytest.mark.parametrize("name", ENGINES)
def test_a_query_engine_sends_the_requests_of_the_original(
    name: str, way: str, streaming: bool, side: str, servers: dict[str, Server]
) -> None:
    if name == "accumulate" and streaming:
        pytest.skip("it cannot stream, and says so")
    assert_same_requests(servers[side], lambda llm: ENGINES[name](llm, streaming=streaming), QUERIES[way])


@pytest.mark.parametrize("side", ["exact", "joining"])
def test_engines_whose_calls_are_prefetched_plan_no_requests(side: str, servers: dict[str, Server]) -> None:
    """Such a request would be sent beside the prefetched one whenever it is made before the original's call."""
    llm = model(servers[side])
    fast = servers[side].accelerated(sub_questions(llm), llm)
    fast.query(ASKED)
    assert not [span.primitive for span in fast.last_trace().spans if "/" in span.primitive]


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("way", RETRIEVALS)
def test_query_writing_retriever_sends_the_requests_of_the_original(
    way: str, side: str, servers: dict[str, Server]
) -> None:
    assert_same_requests(servers[side], fused, RETRIEVALS[way])


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("way", CHAT_WAYS)
@pytest.mark.parametrize("name", CHATS)
def test_a_chat_engine_sends_the_requests_of_the_original(
    name: str, way: str, side: str, servers: dict[str, Server]
) -> None:
    assert_same_requests(servers[side], CHATS[name], CHAT_WAYS[way])


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("read_events", [False, True])
@pytest.mark.parametrize("name", WORKFLOWS)
def test_a_workflow_sends_the_requests_of_the_original(
    name: str, read_events: bool, side: str, servers: dict[str, Server]
) -> None:
    make, arguments = WORKFLOWS[name]
    assert_same_requests(servers[side], make, lambda app: _loop.run(run(app, arguments, read_events=read_events)))
