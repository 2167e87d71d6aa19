"""The objects that graphs are made of: a chat model, two collections, a web search; engines are fakes of one pool."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from langchain_core.retrievers import BaseRetriever

from benchmarks.langchain.kits import corpus, web
from benchmarks.langgraph.answers import Size, said
from teola_plugin import EnginePool
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeStore
from teola_plugin.graph import EngineProfile
from teola_plugin.requests.payloads import Prompt, Sampling

MOST_TOKENS = 1024
"""More than any answer has: models say when they are done, as everywhere."""
PASSAGE = 96
"""Tokens of a passage: thirty of them fit in the profile's context."""


@dataclass(frozen=True, slots=True)
class Call:
    """One that the model was asked for."""

    prompt: Prompt
    text: str

    @property
    def shown(self) -> str:
        """All that the model reads."""
        return self.prompt.flat()


@dataclass(frozen=True, slots=True)
class Kit:
    size: Size
    pool: EnginePool
    llm: ChatTeola
    reports: TeolaVectorStore
    notes: TeolaVectorStore
    web: BaseRetriever
    """A search on the web, in the user's own code."""
    tool_s: float
    """What a slow tool takes."""
    calls: list[Call] = field(default_factory=list)
    """What the model was asked for since `fresh`."""

    def retriever(self, store: TeolaVectorStore | None = None) -> Any:
        return (store or self.reports).as_retriever(search_kwargs={"k": self.size.documents})

    def fresh(self) -> None:
        """Nothing of an earlier query helps the next."""
        self.pool.reset()
        self.calls.clear()


@contextmanager
def make_kit(machine: Mapping[str, EngineProfile], size: Size, tool_s: float) -> Iterator[Kit]:
    """A kit whose pool runs."""
    calls: list[Call] = []

    def answer(prompt: Prompt, sampling: Sampling) -> str:
        text = said(prompt, sampling, size)
        calls.append(Call(prompt, text))
        return text

    llm, embedder = FakeLLM("llm", machine["llm"], answer), FakeEmbedder("embedder", machine["embedder"])
    pool = EnginePool.local([llm, embedder, FakeStore("store", machine["store"])])

    def filled(collection: str, seed: int) -> TeolaVectorStore:
        store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection=collection)
        store.add_documents(corpus(PASSAGE, seed))
        return store

    with pool:
        chat = ChatTeola(pool=pool, max_tokens=MOST_TOKENS)
        stores = filled("reports", 3), filled("notes", 4)
        yield Kit(size, pool, chat, *stores, web(machine, PASSAGE), tool_s, calls)


def arguments_end(text: str) -> list[int]:
    """Where the arguments of each call that is written in `text` are closed: offsets."""
    ends, at, decoder = [], 0, json.JSONDecoder()
    while (start := text.find('"arguments": ', at)) >= 0:
        _, at = decoder.raw_decode(text, start + len('"arguments": '))
        ends.append(at)
    return ends
