"""The applications as pipelines of Haystack (`haystack-ai`, in the extra `dev`), run by `Pipeline.run_async`.

Haystack runs components side by side that do not need each other. They ask the same engines with the same prompts as
`pipelines` does. Each component is a step of the application; a list is one component, which asks for all of it
at once. Each function makes a pipeline of (`Kit`); `asked` runs it.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from importlib.util import find_spec
from typing import Any

from langchain_core.documents import Document

from benchmarks.apps.pipelines import Found, Given, Kit
from examples.apps import advanced_rag, agent, contextual_retrieval, naive_rag, search_engine
from examples.apps.prompts import ANSWER, COMBINE
from teola_plugin.langchain import TeolaRerank, TeolaWebSearch, on_engine

INSTALL = "Haystack is not installed, its scheme is left out: pip install 'haystack-ai>=3,<4'"
AT_ONCE = 16
"""Components that may run side by side: more than any of the pipelines has."""
Step = Callable[..., Awaitable[Any]]


def installed() -> bool:
    return find_spec("haystack") is not None


class Flow:
    """A pipeline, and which of its components get the input."""

    def __init__(self) -> None:
        os.environ.setdefault("HAYSTACK_TELEMETRY_ENABLED", "False")
        from haystack import Pipeline

        self.pipeline = Pipeline()
        self.given: dict[str, list[str]] = {}

    def step(self, name: str, do: Step, *given: str, outputs: tuple[str, ...] = (), **reads: str) -> None:
        """`given`: keys of the input that it is called with; `reads`: argument -> `component` or `component.output`.

        With `outputs`, `do` tells which of them it gives, as a dict.
        """
        self.pipeline.add_component(name, _component()(do, (*given, *reads), outputs))
        self.given[name] = list(given)
        for key, source in reads.items():
            self.pipeline.connect(source if "." in source else f"{source}.value", f"{name}.{key}")

    async def run(self, given: Given) -> dict[str, Any]:
        """What the components gave, by name."""
        data = {name: {key: given[key] for key in keys} for name, keys in self.given.items() if keys}
        found = await self.pipeline.run_async(data, include_outputs_from=set(self.given), concurrency_limit=AT_ONCE)
        return {name: one["value"] for name, one in found.items() if "value" in one}


@cache
def _component() -> type[Any]:
    """The class of all components; Haystack makes it one."""
    from haystack import component

    @component
    class Does:
        def __init__(self, do: Step, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> None:
            self._do, self._outputs = do, outputs
            component.set_input_types(self, **dict.fromkeys(inputs, Any))
            component.set_output_types(self, **dict.fromkeys(outputs or ("value",), Any))

        def run(self, **known: Any) -> dict[str, Any]:
            return asyncio.run(self.run_async(**known))

        async def run_async(self, **known: Any) -> dict[str, Any]:
            made = await self._do(**known)
            return made if self._outputs else {"value": made}

    return Does


# ------------------------------------------------------------ the applications


def naive(kit: Kit) -> Flow:
    flow, llm = Flow(), kit.llm(naive_rag.ANSWER_TOKENS)

    async def index(document: str) -> str:
        return await naive_rag.indexer(kit.pool, kit.collection).ainvoke(document)

    async def near(indexed: str, vector: list[float]) -> list[Document]:
        return await kit.near(vector, naive_rag.TOP)

    def leaf(rank: int) -> Step:
        return lambda question, sources: naive_rag.leaf(rank, llm).ainvoke({"question": question, "sources": sources})

    async def answer(**known: str) -> str:
        return (await (COMBINE | llm).ainvoke(known)).text

    flow.step("index", index, "document")
    flow.step("embed", lambda question: kit.embed(question), "question")
    flow.step("sources", near, indexed="index", vector="embed")
    for rank, name in enumerate("abc"):
        flow.step(name, leaf(rank), "question", sources="sources")
    flow.step("answer", answer, "question", a="a", b="b", c="c")
    return flow


def advanced(kit: Kit) -> Flow:
    flow, llm = Flow(), kit.llm(naive_rag.ANSWER_TOKENS)

    async def index(document: str) -> str:
        return await naive_rag.indexer(kit.pool, kit.collection).ainvoke(document)

    async def embed(queries: list[str]) -> list[list[float]]:
        return list(await asyncio.gather(*map(kit.embed, queries)))

    async def near(indexed: str, vectors: list[list[float]]) -> list[list[Document]]:
        return list(await asyncio.gather(*[kit.near(vector, advanced_rag.SEARCHED) for vector in vectors]))

    async def best(question: str, found: list[list[Document]]) -> list[Document]:
        rerank = TeolaRerank(pool=kit.pool, top_n=advanced_rag.TOP)
        return list(await rerank.acompress_documents(advanced_rag.union(found), question))

    def answer(rank: int, previous: str = "") -> Step:
        return lambda **known: advanced_rag.answer_from(rank, llm, previous).ainvoke(known)

    flow.step("index", index, "document")
    flow.step("queries", lambda question: advanced_rag.expansion(llm).ainvoke({"question": question}), "question")
    flow.step("embed", embed, queries="queries")
    flow.step("found", near, indexed="index", vectors="embed")
    flow.step("sources", best, "question", found="found")
    flow.step("first", answer(0), "question", sources="sources")
    flow.step("second", answer(1, "first"), "question", sources="sources", first="first")
    flow.step("answer", answer(2, "second"), "question", sources="sources", second="second")
    return flow


def contextual(kit: Kit) -> Flow:
    flow, line = Flow(), contextual_retrieval.line(kit.pool, kit.proxy)

    async def cut(document: str) -> list[dict[str, str]]:
        return contextual_retrieval.chunks(document)

    async def lines(chunks: list[dict[str, str]]) -> list[str]:
        return list(await asyncio.gather(*map(line.ainvoke, chunks)))

    async def index(chunks: list[dict[str, str]], lines: list[str]) -> str:
        documents = contextual_retrieval.situated({"lines": lines, "chunks": chunks})
        return await contextual_retrieval.indexer(kit.pool, kit.collection).ainvoke(documents)

    async def near(indexed: str, vector: list[float]) -> list[Document]:
        return await kit.near(vector, naive_rag.TOP)

    async def answer(question: str, sources: list[Document]) -> str:
        known = {"question": question, "passage": contextual_retrieval.together(sources)}
        return (await (ANSWER | kit.llm(naive_rag.ANSWER_TOKENS)).ainvoke(known)).text

    flow.step("chunks", cut, "document")
    flow.step("lines", lines, chunks="chunks")
    flow.step("index", index, chunks="chunks", lines="lines")
    flow.step("embed", lambda question: kit.embed(question), "question")
    flow.step("sources", near, indexed="index", vector="embed")
    flow.step("answer", answer, "question", sources="sources")
    return flow


def search(kit: Kit) -> Flow:
    flow, small = Flow(), kit.small(search_engine.GUESS_TOKENS)
    judge = small.with_structured_output(search_engine.Verdict)
    core = kit.llm(search_engine.ANSWER_TOKENS)

    async def guess(question: str) -> str:
        return (await small.ainvoke(search_engine.for_guess(question))).text

    async def decide(question: str, guess: str) -> dict[str, str]:
        verdict: Any = await judge.ainvoke(search_engine.for_verdict(question, guess))
        return {"alone": guess} if verdict.alone == "yes" else {"search": guess}

    async def web(question: str, guess: str) -> list[Document]:
        return await TeolaWebSearch(pool=kit.pool, k=search_engine.RESULTS).ainvoke(question)

    async def answer(question: str, guess: str, found: Any = ()) -> str:
        texts = [document.page_content for document in found]
        return (await core.ainvoke(search_engine.for_answer(question, guess, texts))).text

    flow.step("guess", guess, "question")
    flow.step("decide", decide, "question", guess="guess", outputs=("alone", "search"))
    flow.step("sources", web, "question", guess="decide.search")
    flow.step("answer", answer, "question", guess="guess", found="sources")
    flow.step("answer alone", answer, "question", guess="decide.alone")
    return flow


def agent_flow(kit: Kit) -> Flow:
    flow, llm = Flow(), kit.llm(agent.ANSWER_TOKENS)
    tools = {tool.name: tool for tool in on_engine(agent.TOOLS, kit.pool)}
    caller = llm.bind_tools(list(tools.values()), tool_choice="any")

    async def plan(messages: list[Any]) -> list[Any]:
        return list((await caller.ainvoke(agent.for_call(messages[-1].content))).tool_calls)

    async def execute(calls: list[Any]) -> list[Document]:
        told = await asyncio.gather(*[tools[one["name"]].ainvoke(one) for one in calls])
        return [Document(str(message.content)) for message in told]

    async def report(messages: list[Any], told: list[Document]) -> str:
        asked = agent.for_answer(messages[-1].content, [document.page_content for document in told])
        return (await llm.ainvoke(asked)).text

    flow.step("plan", plan, "messages")
    flow.step("sources", execute, calls="plan")
    flow.step("answer", report, "messages", told="sources")
    return flow


FLOWS: Mapping[str, Callable[[Kit], Flow]] = {
    "naive_rag": naive,
    "advanced_rag": advanced,
    "contextual_retrieval": contextual,
    "search_engine": search,
    "agent": agent_flow,
}


async def asked(flow: Flow, given: Given) -> Found:
    made = await flow.run(given)
    return made["answer" if "answer" in made else "answer alone"], made.get("sources", [])
