"""The applications as a plain script, which is what a person writes first: one call after the other, none at once.

The same engines are asked with the same prompts as by `pipelines`. Each is a coroutine: (`Kit`, input) -> answer and
sources.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from langchain_core.documents import Document

from benchmarks.apps.pipelines import Found, Given, Kit, search
from examples.apps import advanced_rag, agent, contextual_retrieval, naive_rag
from examples.apps.prompts import ANSWER, COMBINE
from teola_plugin.langchain import TeolaRerank, on_engine


async def naive(kit: Kit, given: Given) -> Found:
    question, llm = given["question"], kit.llm(naive_rag.ANSWER_TOKENS)
    await naive_rag.indexer(kit.pool, kit.collection).ainvoke(given["document"])
    top = await kit.near(await kit.embed(question), naive_rag.TOP)
    known = {"question": question, "sources": top}
    answers = {name: await naive_rag.leaf(rank, llm).ainvoke(known) for rank, name in enumerate("abc")}
    return (await (COMBINE | llm).ainvoke({"question": question, **answers})).text, top


async def advanced(kit: Kit, given: Given) -> Found:
    question, llm = given["question"], kit.llm(naive_rag.ANSWER_TOKENS)
    await naive_rag.indexer(kit.pool, kit.collection).ainvoke(given["document"])
    found = []
    for query in await advanced_rag.expansion(llm).ainvoke(given):
        found.append(await kit.near(await kit.embed(query), advanced_rag.SEARCHED))
    rerank = TeolaRerank(pool=kit.pool, top_n=advanced_rag.TOP)
    top = list(await rerank.acompress_documents(advanced_rag.union(found), question))
    state: dict[str, Any] = {"question": question, "sources": top}
    state["first"] = await advanced_rag.answer_from(0, llm).ainvoke(state)
    state["second"] = await advanced_rag.answer_from(1, llm, "first").ainvoke(state)
    return await advanced_rag.answer_from(2, llm, "second").ainvoke(state), top


async def contextual(kit: Kit, given: Given) -> Found:
    question, line = given["question"], contextual_retrieval.line(kit.pool, kit.proxy)
    chunks = contextual_retrieval.chunks(given["document"])
    lines = [await line.ainvoke(chunk) for chunk in chunks]
    documents = contextual_retrieval.situated({"lines": lines, "chunks": chunks})
    await contextual_retrieval.indexer(kit.pool, kit.collection).ainvoke(documents)
    top = await kit.near(await kit.embed(question), naive_rag.TOP)
    known = {"question": question, "passage": contextual_retrieval.together(top)}
    return (await (ANSWER | kit.llm(naive_rag.ANSWER_TOKENS)).ainvoke(known)).text, top


async def search_flow(kit: Kit, given: Given) -> Found:
    """Nothing in it could be at once."""
    return await search(kit, given, "modules")


async def agent_flow(kit: Kit, given: Given) -> Found:
    tools = {tool.name: tool for tool in on_engine(agent.TOOLS, kit.pool)}
    llm, request = kit.llm(agent.ANSWER_TOKENS), given["messages"][-1].content
    call = await llm.bind_tools(list(tools.values()), tool_choice="any").ainvoke(agent.for_call(request))
    told = [(await tools[one["name"]].ainvoke(one)).content for one in call.tool_calls]
    return (await llm.ainvoke(agent.for_answer(request, told))).text, [Document(str(text)) for text in told]


SCRIPTS: dict[str, Callable[[Kit, Given], Awaitable[Found]]] = {
    "naive_rag": naive,
    "advanced_rag": advanced,
    "contextual_retrieval": contextual,
    "search_engine": search_flow,
    "agent": agent_flow,
}
