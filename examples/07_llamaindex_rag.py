"""A LlamaIndex query engine, accelerated by one line: two collections, four queries, an answer for each passage.

    python examples/07_llamaindex_rag.py

prints, with fake engines::

    plain        1.85 s
    accelerated  0.93 s
    same answer: True, same passages: True
    streamed:    13 chunks
"""

import time
from typing import Any

from llama_index.core import StorageContext, VectorStoreIndex
from llama_index.core.base.base_query_engine import BaseQueryEngine
from llama_index.core.query_engine import RetrieverQueryEngine
from llama_index.core.response_synthesizers import ResponseMode
from llama_index.core.retrievers import QueryFusionRetriever
from llama_index.core.retrievers.fusion_retriever import FUSION_MODES
from llama_index.core.schema import TextNode

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.llamaindex import TeolaEmbedding, TeolaLLM, TeolaVectorStore
from teola_plugin.engines import fake_engines
from teola_plugin.engines.profiles import rtx3090

FARM = ["Oats are sown in spring.", "Lambs eat oats and ivy.", "Ivy climbs walls."]
HOUSE = ["Walls need lime.", "Ivy harms old walls."]


def index(pool: EnginePool, name: str, texts: list[str]) -> VectorStoreIndex:
    """An index over a collection of the pool."""
    nodes = [TextNode(id_=f"{name}-{i}", text=text) for i, text in enumerate(texts)]
    storage = StorageContext.from_defaults(vector_store=TeolaVectorStore(pool=pool, collection=name))
    return VectorStoreIndex(nodes, storage_context=storage, embed_model=TeolaEmbedding(pool=pool))


def rag(pool: EnginePool, mode: ResponseMode, **options: Any) -> BaseQueryEngine:
    """Nothing in here knows of `accelerate`."""
    llm = TeolaLLM(pool=pool, max_tokens=12)
    both = [index(pool, "farm", FARM).as_retriever(), index(pool, "house", HOUSE).as_retriever()]
    retriever = QueryFusionRetriever(
        both, llm=llm, num_queries=4, similarity_top_k=4, mode=FUSION_MODES.RECIPROCAL_RANK
    )
    return RetrieverQueryEngine.from_args(retriever, llm=llm, response_mode=mode, **options)


def timed(label: str, engine: BaseQueryEngine, question: str) -> Any:
    begun = time.perf_counter()
    response = engine.query(question)
    print(f"{label:12} {time.perf_counter() - begun:.2f} s")
    return response


with EnginePool.local(fake_engines(rtx3090())) as pool:
    engine = rag(pool, ResponseMode.ACCUMULATE)
    fast = accelerate(engine)  # the one line
    question = "What harms walls?"
    engine.query("warm up")
    plain = timed("plain", engine, question)
    pool.reset()
    sooner = timed("accelerated", fast, question)
    print(f"same answer: {str(plain) == str(sooner)}, same passages: {plain.source_nodes == sooner.source_nodes}")
    streamed: Any = accelerate(rag(pool, ResponseMode.COMPACT, streaming=True)).query(question)
    print(f"streamed:    {len(list(streamed.response_gen))} chunks")
