"""The demo's app: document QA with advanced RAG (the paper's Figure 2d), in LangChain's own classes.

`make_app` is somebody's who never heard of this package, but for its last lines: they tell which engine can do the work
of which object. That, `make_pool` and the call of `accelerate` are what is added; docs/using.md shows it as a diff.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from langchain_core.output_parsers import JsonOutputParser
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from teola_plugin.cli.demo.server import SERVED
from teola_plugin.cli.demo.steps import EXPAND, LIST_OF_QUESTIONS, answer_with, make_splitter, nothing_to_gain, texts
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.engines.sentence_transformers import EmbeddingEngine, RerankingEngine
from teola_plugin.pool import EnginePool

KEY: Any = "none"
JSON = {"type": "json_schema", "json_schema": {"name": "questions", "schema": LIST_OF_QUESTIONS}}


@dataclass(frozen=True, slots=True)
class App:
    """The chain in three forms, and the objects that it is made of."""

    chain: Runnable[Any, Any]
    """Input: `{"question": str, "documents": [...]}`."""
    indexed: Runnable[Any, Any]
    """The same over what the store holds. Input: `{"question": str}`."""
    nothing_to_gain: Runnable[Any, Any]
    index: Runnable[Any, Any]
    store: InMemoryVectorStore
    llm: Runnable[Any, Any]
    bind: list[tuple[Any, str]]
    """What engines of a pool can do for it: the object, and the engine's name."""


def make_app(server: str, embedder: str, reranker: str) -> App:
    """Ordinary LangChain objects, made as they always were; `server` is the address of an OpenAI-compatible one."""
    from langchain_classic.retrievers import ContextualCompressionRetriever, MultiQueryRetriever
    from langchain_classic.retrievers.document_compressors import CrossEncoderReranker
    from langchain_community.cross_encoders import HuggingFaceCrossEncoder
    from langchain_huggingface import HuggingFaceEmbeddings
    from langchain_openai import ChatOpenAI

    splitter = make_splitter()
    llm = ChatOpenAI(base_url=server, model=SERVED, api_key=KEY, temperature=0, max_completion_tokens=64)
    embeddings = HuggingFaceEmbeddings(model_name=embedder)
    scorer = HuggingFaceCrossEncoder(model_name=reranker)
    store = InMemoryVectorStore(embeddings)
    index = RunnableLambda(splitter.split_documents) | RunnableLambda(store.add_documents)
    retriever = ContextualCompressionRetriever(
        base_compressor=CrossEncoderReranker(model=scorer, top_n=3),
        base_retriever=MultiQueryRetriever(
            retriever=store.as_retriever(search_kwargs={"k": 16}),
            llm_chain=EXPAND | llm.bind(response_format=JSON, max_tokens=96) | JsonOutputParser(),
        ),
    )
    answer = (
        RunnablePassthrough.assign(passages=itemgetter("question") | retriever | RunnableLambda(texts))
        | RunnablePassthrough.assign(first=answer_with(0, llm))
        | RunnablePassthrough.assign(second=answer_with(1, llm, "first"))
        | RunnablePassthrough.assign(answer=answer_with(2, llm, "second"))
        | itemgetter("answer")
    )
    chain = RunnablePassthrough.assign(ids=itemgetter("documents") | index) | answer
    bind = [(llm, "llm"), (embeddings, "embedder"), (scorer, "reranker")]
    return App(chain, answer, nothing_to_gain(llm, store), index, store, llm, bind)


def make_pool(
    server: str, embedder: str, reranker: str, cores: str | None = None, *, drafts: bool = False
) -> EnginePool:
    """Engines of the same models, started, for what the app holds. `cores`: those of the models in this process.
    `drafts`: whether the server was started to draft."""
    pool = EnginePool.local(
        llm=OpenAIServer(base_url=server, model=SERVED, prefix_caching=True, priorities=True, drafts=drafts),
        embedder=EmbeddingEngine(model=embedder, cores=cores),
        reranker=RerankingEngine(model=reranker, cores=cores),
    ).start()
    return pool
