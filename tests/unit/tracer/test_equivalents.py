"""Tests of retrievers of langchain_classic that are planned as chains, which are never run themselves."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_classic.retrievers import EnsembleRetriever, MultiQueryRetriever
from langchain_core.callbacks import CallbackManagerForRetrieverRun
from langchain_core.documents import Document
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from pool_leaves import PoolChat, PoolRetriever

from teola_plugin.graph import Role, build_pgraph
from teola_plugin.passes import PassContext, default_pipeline
from teola_plugin.tracer.langchain.equivalents import equivalent_chain
from teola_plugin.tracer.langchain.trace import trace


class Search(BaseRetriever):
    """A pool-backed retriever of the class that the framework's retrievers ask for."""

    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [Document(f"about {query}"), Document("about everything")]

    def __teola_leaf__(self, kwargs: Any) -> Any:
        return PoolRetriever().__teola_leaf__(kwargs)


class Own(BaseRetriever):
    def _get_relevant_documents(self, query: str, *, run_manager: CallbackManagerForRetrieverRun) -> list[Document]:
        return [Document(f"mine about {query}")]


def multi_query(**more: Any) -> MultiQueryRetriever:
    return MultiQueryRetriever.from_llm(retriever=Search(), llm=PoolChat(), **more)


def levels(chain: Runnable[Any, Any]) -> list[str]:
    return [f"{row.level} {row.class_name}" for row in trace(chain).report]


def test_multi_query_retriever_searches_queries_as_they_are_written() -> None:
    traced = trace(multi_query())
    assert levels(multi_query()) == ["lowered MultiQueryRetriever"]
    roles = {c.role for c in traced.template.components}
    assert {Role.GENERATION, Role.MAP} <= roles and Role.OPAQUE not in roles and not traced.watched
    (generation,) = (c for c in traced.template.components if c.role is Role.GENERATION)
    assert generation.splittable and generation.attributes.items == "lines"
    context = PassContext(speculate="all")
    assert any(p.attributes.grow for p in default_pipeline().run(build_pgraph(traced.template), context).graph)


def test_the_original_question_is_searched_at_once() -> None:
    template = trace(multi_query(include_original=True)).template
    alone = [c for c in template.components if c.role is Role.RETRIEVAL]
    assert len(alone) == 1 and all(ref.external for _, ref in alone[0].inputs)


@pytest.mark.parametrize(
    "retriever",
    [multi_query(), multi_query(include_original=True), EnsembleRetriever(retrievers=[Search(), Search()])],
    ids=["multi-query", "with the original", "ensemble"],
)
def test_equivalent_chain_returns_the_retrievers_result(retriever: BaseRetriever) -> None:
    chain = equivalent_chain(retriever)
    assert chain is not None
    assert chain.invoke("lambs") == retriever.invoke("lambs")


def test_an_ensemble_of_pool_backed_retrievers_searches_side_by_side() -> None:
    chain = EnsembleRetriever(retrievers=[Search(), Search()])
    retrievals = [c for c in trace(chain).template.components if c.role is Role.RETRIEVAL]
    assert levels(chain) == ["lowered EnsembleRetriever"] and len(retrievals) == 2


def test_ensemble_with_a_user_retriever_stays_opaque() -> None:
    chain = EnsembleRetriever(retrievers=[Search(), Own()])
    traced = trace(chain)
    assert levels(chain)[0].endswith("EnsembleRetriever") and not levels(chain)[0].startswith("lowered")
    assert [c.role for c in traced.template.components] == [Role.OPAQUE] and traced.watched


def test_overridden_retriever_class_has_no_equivalent() -> None:
    class Mine(MultiQueryRetriever):
        def unique_union(self, documents: list[Document]) -> list[Document]:
            return documents[:1]

    assert equivalent_chain(Mine.from_llm(retriever=Search(), llm=PoolChat())) is None
    assert equivalent_chain(Own()) is None
