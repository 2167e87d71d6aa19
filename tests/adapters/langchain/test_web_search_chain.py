"""Tests of a web search in a chain: it starts once its query is known, and the original claims it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from operator import itemgetter
from typing import Any, TypedDict

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.tools import create_retriever_tool
from langgraph.graph import END, START, StateGraph

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines.fake import FakeWebSearch, Faults, fake_engines
from teola_plugin.engines.profiles import rtx3090, scaled, web_search
from teola_plugin.errors import EngineError, RegistrationError
from teola_plugin.langchain import ChatTeola, TeolaWebSearch

PAGES = ["Oats are sown in spring.", "Ivy climbs walls.", "Lambs eat oats and ivy."]
GIVEN = {"question": "What do lambs eat?"}


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    with EnginePool.local(
        [*fake_engines(scaled(rtx3090(), 0.1)), FakeWebSearch("web", web_search(0.05), PAGES)]
    ) as made:
        yield made


def chain(pool: EnginePool) -> Any:
    """Return a chain that writes a summary before the search, although the search does not need it."""
    llm = ChatTeola(pool=pool, max_tokens=8)
    summary = ChatPromptTemplate.from_template("Sum up: {question}") | llm | StrOutputParser()
    answer = ChatPromptTemplate.from_template("{question} {summary}\n{found}")
    search = itemgetter("question") | TeolaWebSearch(pool=pool, k=2)
    return (
        RunnablePassthrough.assign(summary=summary) | RunnablePassthrough.assign(found=search) | answer | llm
    ) | StrOutputParser()


def test_web_search_is_prefetched_and_claimed(pool: EnginePool) -> None:
    plain = chain(pool)
    fast = accelerate(plain)
    assert "unchanged" not in str(fast.report().parts)
    assert fast.invoke(GIVEN) == plain.invoke(GIVEN) == asyncio.run(fast.ainvoke(GIVEN))
    spans = {span.primitive: span for span in fast.last_trace().spans}
    [search] = [span for span in spans.values() if span.engine == "web"]
    written = next(span for name, span in spans.items() if "summary" in name and "decoding" in name)
    assert search.started is not None and written.done is not None and search.started < written.done


@pytest.mark.parametrize("own", [True, False])
def test_web_search_of_an_arm_is_speculative_on_dedicated_engine(own: bool) -> None:
    """A search of one branch starts before the choice if it is free, but not if each search is paid for."""
    seen: list[str] = []
    web = FakeWebSearch(
        "web", replace(web_search(0.01), dedicated=own), answer=lambda query, k: seen.append(query) or ()
    )
    with EnginePool.local([*fake_engines(scaled(rtx3090(), 0.1)), web]) as pool:
        plain = searching_where_needed(pool)
        fast = accelerate(plain)
        assert fast.invoke(GIVEN) == plain.invoke(GIVEN)
        assert len(seen) == int(own)
        assert accelerate(searching_where_needed(pool, needed="")).invoke(GIVEN)["found"] == []
        assert len(seen) == int(own) + 1


def searching_where_needed(pool: EnginePool, needed: str = "never") -> Any:
    """Return a graph that searches only if the model's answer contains `needed`."""
    llm, web = ChatTeola(pool=pool, max_tokens=8), TeolaWebSearch(pool=pool)

    class State(TypedDict, total=False):
        question: str
        said: str
        found: list[Any]

    def judge(state: State) -> State:
        return {"said": llm.invoke(f"Is a search needed? {state['question']}").content}

    def search(state: State) -> State:
        return {"found": web.invoke(state["question"])}

    graph = StateGraph(State)
    graph.add_node("judge", judge)
    graph.add_node("search", search)
    graph.add_edge(START, "judge")
    graph.add_conditional_edges("judge", lambda state: "search" if needed in state["said"] else END, ["search", END])
    graph.add_edge("search", END)
    return graph.compile()


def test_two_equal_web_searches_are_both_made(pool: EnginePool) -> None:
    seen: list[str] = []
    pool.engine("web")._answer = lambda query, k: seen.append(query) or ()  # type: ignore[attr-defined]
    web = TeolaWebSearch(pool=pool)
    fast = accelerate({"a": web, "b": web} | RunnablePassthrough())
    assert fast.invoke("oats") == {"a": [], "b": []} and seen == ["oats", "oats"]


def test_failed_web_search_raises_engine_error() -> None:
    faults = Faults(fail_on=lambda request: True, retryable=False)
    with EnginePool.local([*fake_engines(), FakeWebSearch("web", documents=PAGES, faults=faults)]) as pool:
        plain = chain(pool)
        for one in (plain, accelerate(plain)):
            with pytest.raises(EngineError, match="failed"):
                one.invoke(GIVEN)


def test_web_search_documents_have_source_metadata(pool: EnginePool) -> None:
    found = TeolaWebSearch(pool=pool, k=1).invoke("oats in spring")
    assert [(one.page_content, one.id, one.metadata) for one in found] == [
        (PAGES[0], "text:0", {"source": "text:0", "title": ""})
    ]
    tool = create_retriever_tool(TeolaWebSearch(pool=pool, k=1), "search", "Searches the web.")
    assert tool.invoke({"query": "oats in spring"}) == PAGES[0]


def test_unknown_web_search_engine_raises_with_suggestion(pool: EnginePool) -> None:
    with pytest.raises(RegistrationError, match="did you mean 'web'"):
        TeolaWebSearch(pool=pool, engine="wep")
