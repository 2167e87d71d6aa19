"""Workflows that several tests use."""

from __future__ import annotations

import re

from teola_plugin.engines.fake import FakeLLM, fake_engines
from teola_plugin.engines.fake.base import FakeEngine
from teola_plugin.engines.fake.llm import answer_words, default_answer
from teola_plugin.graph import EngineProfile
from teola_plugin.requests.payloads import Prompt, Sampling
from teola_plugin.workflow import (
    PER_QUERY,
    Indexing,
    QueryExpansion,
    Reranking,
    Searching,
    Synthesis,
    Workflow,
)


def answer(prompt: Prompt, sampling: Sampling) -> str:
    """Return words that depend on the prompt. If it requests queries, return that many lines, or one fewer or more."""
    text = prompt.flat()
    match = re.search(r"Write (\d+) search queries", text)
    if match is None:
        return default_answer(prompt, sampling)
    lines = int(match[1]) + len(text) % 3 - 1
    return "".join(f"{answer_words(f'{i} {text}', 8)}\n" for i in range(lines))


def engines(machine: dict[str, EngineProfile] | None = None) -> list[FakeEngine]:
    """Return fake engines whose LLM writes lists where the prompt requests them."""
    fakes = fake_engines(machine)
    llm = FakeLLM(profile=fakes[0].profile, answer=answer)
    return [llm, *fakes[1:]]


DOCUMENT = " ".join(f"Paragraph {i} says what paragraph {i - 1} does not say." for i in range(60))
GIVEN = {"question": "What does paragraph 7 say?", "documents": DOCUMENT}


def advanced_rag(name: str = "advanced_rag") -> Workflow:
    """Return a workflow that indexes a document, writes three queries, searches with each, reranks and refines."""
    return Workflow(
        name,
        Indexing("index", chunk_size=20, chunk_overlap=3, collection=PER_QUERY)
        >> QueryExpansion("queries", n=3)
        >> Searching("found", query="queries", k=8, collection=PER_QUERY)
        >> Reranking("best", passages="found", k=3)
        >> Synthesis("answer", context="best", mode="refine", max_tokens=20),
    )
