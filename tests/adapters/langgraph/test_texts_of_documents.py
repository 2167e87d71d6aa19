"""Nodes that write documents or messages into their prompts, as research agents do: their calls are prefetched."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypedDict

import pytest
from langchain_core.documents import Document
from langgraph.graph import START, StateGraph
from support.hosted_model import HostedModel

from teola_plugin import accelerate

MAX_CHARACTERS = 40


class State(TypedDict, total=False):
    """Search results and documents; two answers."""

    results: dict[str, dict[str, Any]]
    documents: list[Document]
    summary: str
    title: str


STATE: State = {
    "results": {f"https://farm.example/{i}": {"content": "oats grow here " * i, "title": f"T{i}"} for i in range(5)},
    "documents": [
        Document("Oats are sown\n\nin spring", metadata={"title": "Oats", "source": "a.pdf", "page": 1, "score": 0.91}),
        Document("Ivy {climbs}", metadata={"title": "Ivy", "source": "b.pdf", "page": 2, "score": 0.3}),
        Document("Oats are cut", metadata={"title": "Oats", "source": "a.pdf", "page": 9, "score": 0.77}),
    ],
}


def between_dashes(state: State) -> str:
    texts = []
    for url, result in state["results"].items():
        content = result.get("content", "")
        texts.append(f"URL: {url}\nContent: {content}")
    separator = "\n" + "-" * 40 + "\n"
    return separator.join(texts)


def cut_off(state: State) -> str:
    texts = []
    for url, result in state["results"].items():
        content = result.get("content", "")
        if len(content) > MAX_CHARACTERS:
            content = content[:MAX_CHARACTERS] + "... [content truncated]"
        texts.append(f"URL: {url}\nContent: {content}")
    return "\n\n".join(texts)


def numbered_with_rules(state: State) -> str:
    parts = []
    for i, document in enumerate(state["documents"]):
        title, source = document.metadata.get("title", "No title"), document.metadata.get("source", "")
        parts.append(f"Document {i + 1}:\nTitle: {title}\nSource: {source}\n{document.page_content}")
    return ("\n" + "=" * 80 + "\n").join(parts)


def with_scores(state: State) -> str:
    lines = []
    for i, document in enumerate(state["documents"], 1):
        title = document.metadata.get("title") or "Untitled"
        source = document.metadata.get("source") or document.metadata.get("url") or "unknown"
        score = document.metadata.get("score", 0.0)
        page = document.metadata["page"]
        text = document.page_content.replace("\n\n", "\n").replace("{", "{{").replace("}", "}}")
        lines.append(f"[{i}] {title} - {source}, page {page}, relevance {round(score, 2)}\n{text[:500]}\n{'-' * 60}")
    return f"\n{'*' * 80}\n".join(lines)


FORMATS: dict[str, Callable[[State], str]] = {
    one.__name__: one for one in (between_dashes, cut_off, numbered_with_rules, with_scores)
}


def compiled(model: HostedModel, to_text: Callable[[State], str]) -> Any:
    """Return a graph of one node that writes a text into the prompts of two calls."""

    def write(state: State) -> State:
        text = to_text(state)
        summary = model.invoke(f"Sum up\n{text}")
        title = model.invoke(f"Title of\n{text}")
        return {"summary": summary.text, "title": title.text}

    return StateGraph(State).add_node("write", write).add_edge(START, "write").compile()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_async", [False, True])
def test_calls_on_formatted_documents_run_at_the_same_time(name: str, is_async: bool) -> None:
    model, original_model = HostedModel(), HostedModel()
    fast = accelerate(compiled(model, FORMATS[name]))
    answer = asyncio.run(fast.ainvoke(STATE)) if is_async else fast.invoke(STATE)
    assert answer == compiled(original_model, FORMATS[name]).invoke(STATE)
    assert sorted(model.prompts) == sorted(original_model.prompts)
    assert model.most_at_once == 2


@pytest.mark.parametrize("name", FORMATS)
def test_documents_without_a_field_raise_the_error_of_the_original(name: str) -> None:
    state: State = {"results": {"url": ["no dictionary"]}, "documents": ["no document"]}  # type: ignore[dict-item, list-item]
    model = HostedModel()
    graph = compiled(model, FORMATS[name])
    with pytest.raises(Exception) as original:
        graph.invoke(state)
    with pytest.raises(type(original.value)) as accelerated:
        accelerate(graph).invoke(state)
    assert str(accelerated.value) == str(original.value)
    assert model.prompts == []
