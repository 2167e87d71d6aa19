"""The applications as they are served without `accelerate`: chains of modules, by hand in parallel, or by messages.

All ask the same engines with the same prompts, by the same objects of LangChain (those of `examples/apps`), so that
their answers can be compared. Each is a coroutine: (`Kit`, input, way) -> answer and sources. A module is over before
the next begins; the requests within a module go out at once, as LlamaIndex's modules send them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from langchain_core.documents import Document
from langchain_core.messages import HumanMessage, ToolMessage

from examples.apps import advanced_rag, agent, contextual_retrieval, naive_rag, search_engine
from examples.apps.prompts import ANSWER, COMBINE
from examples.apps.runner import COLLECTION
from teola_plugin import EnginePool
from teola_plugin.langchain import ChatTeola, TeolaEmbeddings, TeolaRerank, TeolaWebSearch, on_engine

Way = Literal["modules", "parallel", "modern"]
"""`modules`: one after the other (LlamaDist). `parallel`: modules that do not need each other run side by side
(LlamaDistPC). `modern`: what a careful author writes with asyncio, within modules as well."""
Found = tuple[str, Sequence[Document]]
Given = Mapping[str, Any]
Pipeline = Callable[["Kit", Given, Way], Awaitable[Found]]


@dataclass(frozen=True, slots=True)
class Kit:
    """The objects on one pool."""

    pool: EnginePool
    proxy: str = "proxy"
    collection: str = COLLECTION
    """Of the upload."""

    def llm(self, tokens: int) -> ChatTeola:
        return ChatTeola(pool=self.pool, max_tokens=tokens)

    def small(self, tokens: int) -> ChatTeola:
        return ChatTeola(pool=self.pool, engine=self.proxy, max_tokens=tokens)

    async def embed(self, text: str) -> list[float]:
        return await TeolaEmbeddings(pool=self.pool).aembed_query(text)

    async def near(self, vector: list[float], k: int) -> list[Document]:
        return await naive_rag.uploads(self.pool, self.collection).asimilarity_search_by_vector(vector, k)


async def naive(kit: Kit, given: Given, way: Way) -> Found:
    index, question = naive_rag.indexer(kit.pool, kit.collection), given["question"]
    if way == "modules":
        await index.ainvoke(given["document"])
        vector = await kit.embed(question)
    else:
        _, vector = await asyncio.gather(index.ainvoke(given["document"]), kit.embed(question))
    top = await kit.near(vector, naive_rag.TOP)
    llm = kit.llm(naive_rag.ANSWER_TOKENS)
    known = {"question": question, "sources": top}
    a, b, c = await asyncio.gather(*[naive_rag.leaf(rank, llm).ainvoke(known) for rank in range(3)])
    reply = await (COMBINE | llm).ainvoke({"question": question, "a": a, "b": b, "c": c})
    return reply.text, top


async def advanced(kit: Kit, given: Given, way: Way) -> Found:
    index, llm = naive_rag.indexer(kit.pool, kit.collection), kit.llm(naive_rag.ANSWER_TOKENS)

    async def expanded() -> list[list[float]]:
        """The vectors of the further questions, where nothing has to wait for the index."""
        queries = await advanced_rag.expansion(llm).ainvoke(given)
        return list(await asyncio.gather(*map(kit.embed, queries)))

    if way == "modules":
        await index.ainvoke(given["document"])
        vectors = await expanded()
    elif way == "parallel":
        _, queries = await asyncio.gather(index.ainvoke(given["document"]), advanced_rag.expansion(llm).ainvoke(given))
        vectors = list(await asyncio.gather(*map(kit.embed, queries)))
    else:
        _, vectors = await asyncio.gather(index.ainvoke(given["document"]), expanded())
    found = await asyncio.gather(*[kit.near(vector, advanced_rag.SEARCHED) for vector in vectors])
    rerank = TeolaRerank(pool=kit.pool, top_n=advanced_rag.TOP)
    top = list(await rerank.acompress_documents(advanced_rag.union(list(found)), given["question"]))
    state: dict[str, Any] = {"question": given["question"], "sources": top}
    for rank, (name, before) in enumerate((("first", ""), ("second", "first"), ("answer", "second"))):
        state[name] = await advanced_rag.answer_from(rank, llm, before).ainvoke(state)
    return state["answer"], top


async def contextual(kit: Kit, given: Given, way: Way) -> Found:
    chunks = contextual_retrieval.chunks(given["document"])
    line = contextual_retrieval.line(kit.pool, kit.proxy)

    async def indexed() -> None:
        lines = await asyncio.gather(*map(line.ainvoke, chunks))
        documents = contextual_retrieval.situated({"lines": lines, "chunks": chunks})
        await contextual_retrieval.indexer(kit.pool, kit.collection).ainvoke(documents)

    if way == "modules":
        await indexed()
        vector = await kit.embed(given["question"])
    else:
        _, vector = await asyncio.gather(indexed(), kit.embed(given["question"]))
    top = await kit.near(vector, naive_rag.TOP)
    known = {"question": given["question"], "passage": contextual_retrieval.together(top)}
    reply = await (ANSWER | kit.llm(naive_rag.ANSWER_TOKENS)).ainvoke(known)
    return reply.text, top


async def search(kit: Kit, given: Given, way: Way) -> Found:
    """No module can begin before the one in front of it."""
    question, small = given["question"], kit.small(search_engine.GUESS_TOKENS)
    guess = (await small.ainvoke(search_engine.for_guess(question))).text
    judge = small.with_structured_output(search_engine.Verdict)
    verdict: Any = await judge.ainvoke(search_engine.for_verdict(question, guess))
    found: list[Document] = []
    if verdict.alone != "yes":
        found = await TeolaWebSearch(pool=kit.pool, k=search_engine.RESULTS).ainvoke(question)
    asked = search_engine.for_answer(question, guess, [document.page_content for document in found])
    return (await kit.llm(search_engine.ANSWER_TOKENS).ainvoke(asked)).text, found


async def agent_flow(kit: Kit, given: Given, way: Way) -> Found:
    """Calls of one answer go out at once; the answer is whole before the first."""
    tools = {tool.name: tool for tool in on_engine(agent.TOOLS, kit.pool)}
    llm, request = kit.llm(agent.ANSWER_TOKENS), given["messages"][-1].content
    call = await llm.bind_tools(list(tools.values()), tool_choice="any").ainvoke(agent.for_call(request))
    told: list[ToolMessage] = await asyncio.gather(*[tools[one["name"]].ainvoke(one) for one in call.tool_calls])
    reply = await llm.ainvoke(agent.for_answer(request, [message.content for message in told]))
    return reply.text, [Document(str(message.content)) for message in told]


PIPELINES: dict[str, Pipeline] = {
    "naive_rag": naive,
    "advanced_rag": advanced,
    "contextual_retrieval": contextual,
    "search_engine": search,
    "agent": agent_flow,
}
BY_MESSAGES = ("search_engine", "agent")
"""Flows of agents, which AutoGen is for."""


def human(question: str) -> dict[str, Any]:
    return {"messages": [HumanMessage(question)]}
