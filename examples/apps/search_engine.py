"""Search-engine-empowered generation: a small model guesses and judges; if a search is needed, the core model gets its
4 best results.

Run it from the root of the checkout::

    python -m examples.apps.search_engine                              real engines, texts of its own for a web
    python -m examples.apps.search_engine --web searxng                the web, through the SearXNG at SEARXNG_URL
    python -m examples.apps.search_engine --fakes --compare            latencies of an RTX 3090, no model
"""

from __future__ import annotations

import argparse
from typing import Any, Literal, TypedDict

from langchain_core.documents import Document
from langchain_core.runnables import RunnableLambda
from langgraph.graph import END, START, StateGraph
from langgraph.graph.state import CompiledStateGraph
from pydantic import BaseModel

from examples.apps.prompts import INSTRUCTION, JUDGE
from examples.apps.runner import App, run
from teola_plugin import EnginePool
from teola_plugin.langchain import ChatTeola, TeolaWebSearch

RESULTS, GUESS_TOKENS, ANSWER_TOKENS = 4, 48, 64


class Verdict(BaseModel):
    """Whether the model can answer by itself."""

    alone: Literal["yes", "no"]


class State(TypedDict, total=False):
    question: str
    guess: str
    alone: str
    sources: list[Document]
    answer: str


def app(pool: EnginePool, *, proxy: str = "llm", tokens: int = ANSWER_TOKENS) -> CompiledStateGraph[State]:
    """Nothing in here knows of `accelerate`. Input: `question`; output: `answer`, and `sources` if it has searched.
    Every node has a sync and an async form, for `invoke` and `ainvoke`."""
    small = ChatTeola(pool=pool, engine=proxy, max_tokens=GUESS_TOKENS)
    judge = small.with_structured_output(Verdict)
    core, web = ChatTeola(pool=pool, max_tokens=tokens), TeolaWebSearch(pool=pool, k=RESULTS)

    def guess(state: State) -> dict[str, Any]:
        return {"guess": small.invoke(for_guess(state["question"])).content}

    async def aguess(state: State) -> dict[str, Any]:
        return {"guess": (await small.ainvoke(for_guess(state["question"]))).content}

    def decide(state: State) -> dict[str, Any]:
        return {"alone": judge.invoke(for_verdict(state["question"], state["guess"])).alone}

    async def adecide(state: State) -> dict[str, Any]:
        return {"alone": (await judge.ainvoke(for_verdict(state["question"], state["guess"]))).alone}

    def search(state: State) -> dict[str, Any]:
        return {"sources": web.invoke(state["question"])}

    async def asearch(state: State) -> dict[str, Any]:
        return {"sources": await web.ainvoke(state["question"])}

    def answer(state: State) -> dict[str, Any]:
        passages = [document.page_content for document in state.get("sources", [])]
        return {"answer": core.invoke(for_answer(state["question"], state["guess"], passages)).content}

    async def aanswer(state: State) -> dict[str, Any]:
        passages = [document.page_content for document in state.get("sources", [])]
        return {"answer": (await core.ainvoke(for_answer(state["question"], state["guess"], passages))).content}

    def needed(state: State) -> str:
        return "answer" if state["alone"] == "yes" else "search"

    graph = StateGraph(State)
    graph.add_node("guess", RunnableLambda(guess, aguess))
    graph.add_node("decide", RunnableLambda(decide, adecide))
    graph.add_node("search", RunnableLambda(search, asearch))
    graph.add_node("answer", RunnableLambda(answer, aanswer))
    graph.add_edge(START, "guess")
    graph.add_edge("guess", "decide")
    graph.add_conditional_edges("decide", needed, ["search", "answer"])
    graph.add_edge("search", "answer")
    graph.add_edge("answer", END)
    return graph.compile()


def for_guess(question: str) -> list[tuple[str, str]]:
    return [("system", "You are a helpful assistant."), ("human", question)]


def for_verdict(question: str, guess: str) -> list[tuple[str, str]]:
    return [("system", JUDGE), ("human", f"A guess at the answer: {guess}\n\nMessage: {question}")]


def for_answer(question: str, guess: str, passages: list[str]) -> list[tuple[str, str]]:
    known = "\n\n".join(passages) or guess
    return [("system", INSTRUCTION), ("human", f"Question: {question}\n\nPassage:\n{known}\n\nAnswer:")]


def given(args: argparse.Namespace) -> dict[str, Any]:
    return {"question": args.question}


APP = App("search_engine", app, given, "What does an expression-less except clause match?")

if __name__ == "__main__":
    run(APP)
