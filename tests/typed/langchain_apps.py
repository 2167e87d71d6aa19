"""LangChain and LangGraph apps as people write them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from operator import itemgetter
from typing import Any, TypedDict, assert_type

from langchain.agents import create_agent
from langchain_core.documents import Document
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel, FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.tools import tool
from langgraph.graph import START, StateGraph
from langgraph.graph.state import CompiledStateGraph

import teola_plugin as teola
from teola_plugin import EnginePool, accelerate
from teola_plugin.engines import fake_engines
from teola_plugin.langchain import (
    ChatTeola,
    TeolaCrossEncoder,
    TeolaEmbeddings,
    TeolaIndexer,
    TeolaLLM,
    TeolaRerank,
    TeolaVectorStore,
    TeolaWebSearch,
    on_engine,
    read_only,
    tool_engine,
)
from teola_plugin.observe import QueryTrace, html_page


def join(documents: Sequence[Document]) -> str:
    return "\n".join(one.page_content for one in documents)


def chain_of(pool: EnginePool) -> Runnable[dict[str, str], str]:
    llm = ChatTeola(pool=pool, max_tokens=8, temperature=0.0)
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="farm")
    store.add_texts(["Lambs eat oats."])
    index: Runnable[Any, str] = TeolaIndexer(store=store)
    index.invoke("Hay is dry grass.")
    found = itemgetter("question") | store.as_retriever(search_kwargs={"k": 2}) | RunnableLambda(join)
    prompt = ChatPromptTemplate.from_template("{question} {found}")
    return RunnablePassthrough.assign(found=found) | prompt | llm | StrOutputParser()


def chains(pool: EnginePool) -> None:
    chain = chain_of(pool)
    fast = teola.accelerate(chain, pool=pool, speculate="off", app="desk", passes=("prune-dependencies",))
    assert_type(fast.invoke({"question": "?"}), str)
    assert_type(asyncio.run(fast.ainvoke({"question": "?"})), str)
    for piece in fast.stream({"question": "?"}, config={"configurable": {"teola_deadline_s": 5.0}}):
        print(piece.upper())
    print(fast.explain({"question": "?"}, details=True), fast.batch([{"question": "?"}])[0].upper())
    trace = fast.last_trace()
    assert_type(trace, QueryTrace | None)
    if trace is not None:
        print(html_page([trace]), trace.seconds)
    chain = accelerate(chain)
    longer = accelerate(chain | StrOutputParser(), shadow=0.1)
    print(longer.shadow, longer.report().parts, accelerate(longer | StrOutputParser(), passes=()).plan())


def own_models(pool: EnginePool, model: FakeListChatModel, embeddings: Embeddings, mine: BaseRetriever) -> None:
    prompt = ChatPromptTemplate.from_template("{question}")
    chain = prompt | model | StrOutputParser()
    for fast in (
        accelerate(chain, pool=pool, bind={embeddings: "embedder"}, strict=False),
        accelerate(chain, pool=pool, bind=[(model, "llm"), (embeddings, "embedder")]),
        accelerate(chain, engines="auto", concurrent=[model]),
    ):
        assert_type(fast.invoke({"question": "?"}), str)
    assert_type(accelerate(mine, pool=pool).invoke("?"), list[Document])
    same: FakeListChatModel = accelerate(model, pool=pool, bind=[(model, "llm")])
    print(same.responses, accelerate(model).explain(), accelerate(TeolaLLM(pool=pool)).invoke("?").upper())
    served: BaseChatModel = pool.bound(model, "llm")
    print(served, TeolaCrossEncoder(pool=pool), TeolaRerank(pool=pool, top_n=2), TeolaWebSearch(pool=pool, k=4))


class State(TypedDict):
    question: str
    answer: str


@read_only
@tool
def weather(place: str) -> str:
    """The weather at a place."""
    return f"It rains at {place}."


def graphs(pool: EnginePool) -> None:
    def answer(state: State) -> dict[str, str]:
        return {"answer": state["question"]}

    builder = StateGraph(State)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    graph = builder.compile()
    fast = accelerate(graph, pool=pool, speculate="off")
    print(fast.invoke({"question": "?", "answer": ""})["answer"], fast.explain(), fast.last_trace())
    as_before: CompiledStateGraph[State, None, State, State] = fast
    graph = accelerate(graph)
    tools = on_engine([weather], pool)
    agent = create_agent(accelerate(ChatTeola(pool=pool)), tools)
    agent = accelerate(agent)
    print(as_before, agent.invoke({"messages": [{"role": "user", "content": "?"}]})["messages"])


with EnginePool.local([*fake_engines(), tool_engine([weather])]) as started:
    chains(started)
    graphs(started)
