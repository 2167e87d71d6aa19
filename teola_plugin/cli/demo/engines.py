"""The demo's engines: all real, pinned, and the same for the plain and the accelerated runs."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from langchain_core.runnables import Runnable

from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.indexing import TeolaIndexer
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.cli.demo import chain
from teola_plugin.cli.demo.steps import ANSWER_TOKENS, KEPT, make_splitter, nothing_to_gain
from teola_plugin.engines.base import Engine
from teola_plugin.pool import EnginePool

COLLECTION = "demo"


@dataclass(frozen=True, slots=True)
class Models:
    """What the user chose; None for the default."""

    llm: str | None = None
    embedder: str | None = None
    reranker: str | None = None


SHIPPED = "shipped"
"""The engine with an LLM as vLLM ships it."""


def make_pool(models: Models, *, shipped: bool = False) -> EnginePool:
    """vLLM, two sentence-transformers engines and an embedded PostgreSQL; not started yet. With `shipped` one more
    vLLM, without drafts.

    On a machine without CUDA the LLM is pinned to one core and the others to another: two devices.
    """
    from teola_plugin.engines.bundled import files as bundled
    from teola_plugin.engines.pgvector import PgVectorEngine
    from teola_plugin.engines.sentence_transformers import EmbeddingEngine, RerankingEngine
    from teola_plugin.engines.vllm import VllmEngine

    llm_cores, other_cores = device_cores()
    engines: list[Engine] = [
        VllmEngine("llm", models.llm or bundled.llm_folder(), cores=llm_cores),
        EmbeddingEngine("embedder", models.embedder, cores=other_cores),
        RerankingEngine("reranker", models.reranker or bundled.reranker_folder(), cores=other_cores),
        PgVectorEngine("store", cores=other_cores),
    ]
    if shipped:
        engines.append(VllmEngine(SHIPPED, models.llm or bundled.llm_folder(), cores=llm_cores, drafts="off"))
    return EnginePool.local(engines)


def device_cores() -> tuple[str | None, str | None]:
    """(the LLM's, the others'); None for no pinning, where a GPU or too few cores make it pointless."""
    from teola_plugin.engines.devices.cards import cuda

    available = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
    if cuda().is_available() or len(available) < 2:
        return None, None
    return str(available[0]), str(available[1])


@dataclass(frozen=True, slots=True)
class Chains:
    """The plain chains, all on the same objects."""

    uploaded: Runnable[Any, Any]
    indexed: Runnable[Any, Any]
    nothing_to_gain: Runnable[Any, Any]
    indexer: TeolaIndexer


def make_chains(pool: EnginePool, engine: str = "llm") -> Chains:
    llm = ChatTeola(pool=pool, engine=engine, max_tokens=ANSWER_TOKENS)
    embeddings = TeolaEmbeddings(pool=pool, engine="embedder")
    store = TeolaVectorStore(pool=pool, engine="store", embedding=embeddings, collection=COLLECTION)
    reranker = TeolaRerank(pool=pool, engine="reranker", top_n=KEPT)
    indexer = TeolaIndexer(store=store, splitter=make_splitter())
    return Chains(
        chain.uploaded_document_qa(llm, store, reranker, indexer),
        chain.search_and_answer(llm, store, reranker),
        nothing_to_gain(llm, store),
        indexer,
    )
