"""Tests that `explain()` names the objects that `concurrent=` would make faster, and no others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from langchain_classic.retrievers import MultiQueryRetriever
from langchain_core.embeddings import DeterministicFakeEmbedding
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore
from support.own_composites import OWN, Chain, Lines, ensemble, extractor, map_reduce, merger, queries
from support.own_leaves import Ledger, Notes, SyncChat

from teola_plugin import accelerate


def expectation(chain: Chain, **options: Any) -> str:
    return str(accelerate(chain, **options).explain()).split("\n")[2]


@pytest.mark.parametrize(
    ("make", "name", "composite"),
    [
        (queries, "Notes", "MultiQueryRetriever"),
        (ensemble, "Notes", "EnsembleRetriever"),
        (merger, "Notes", "MergerRetriever"),
        (extractor, "Chat", "LLMChainExtractor"),
        (map_reduce, "Counted", "LLMChain"),
    ],
)
def test_advice_names_class_to_pass_as_concurrent(make: Callable[[Ledger], Chain], name: str, composite: str) -> None:
    advice = expectation(make(Ledger()))
    assert advice.endswith(
        f"if several threads may call {name} at once, say so: accelerate(..., concurrent=[{name}]); "
        f"then the sync calls of {composite} run side by side"
    )
    for other in ({"concurrent": OWN}, {"speculate": "off"}):
        assert "concurrent=" not in expectation(make(Ledger()), **other), other


def test_advice_for_a_store_names_its_embeddings() -> None:
    store = InMemoryVectorStore(DeterministicFakeEmbedding(size=4))
    advice = expectation(MultiQueryRetriever.from_llm(store.as_retriever(), Lines()))
    assert "concurrent=[DeterministicFakeEmbedding]" in advice


def test_advice_omits_objects_with_own_callbacks() -> None:
    retriever = Notes(ledger=Ledger(), callbacks=[])
    vars(retriever)["callbacks"] = [object()]  # hears of its calls by itself: never called early
    assert "concurrent=" not in expectation(MultiQueryRetriever.from_llm(retriever, Lines()))


def test_advice_names_sync_model_shared_by_steps() -> None:
    model = SyncChat(ledger=Ledger())
    chain: Chain = RunnablePassthrough.assign(a=ChatPromptTemplate.from_template("A of {x}") | model)
    chain = chain | RunnablePassthrough.assign(b=ChatPromptTemplate.from_template("B of {x}") | model)
    assert "accelerate(..., concurrent=[SyncChat])" in expectation(chain)
    assert "concurrent=" not in expectation(chain, concurrent=[SyncChat])
