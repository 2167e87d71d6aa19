"""The demo's app in stock classes only: what somebody has who never heard of this package.

A chat model on a server, embeddings and a cross encoder in this process, a store in memory. `bind` names the engine
for each; nothing else changes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from operator import itemgetter
from pathlib import Path
from typing import Any

from langchain_core.output_parsers import JsonOutputParser
from langchain_core.runnables import Runnable, RunnableLambda, RunnablePassthrough
from langchain_core.vectorstores import InMemoryVectorStore

from teola_plugin.cli.demo import chain
from teola_plugin.cli.demo.engines import ANSWER_TOKENS, Models, device_cores, make_splitter
from teola_plugin.cli.demo.measure import Case, run_case
from teola_plugin.cli.demo.server import SERVED, api_server
from teola_plugin.engines.base import Engine
from teola_plugin.engines.openai_api import OpenAIServer
from teola_plugin.engines.quiet import no_loading_bars
from teola_plugin.errors import EngineUnavailable
from teola_plugin.pool import EnginePool

PACKAGES = ("langchain-openai", "langchain-huggingface", "langchain-classic", "langchain-community")


@dataclass(frozen=True, slots=True)
class Stock:
    """The app, and what of it an engine can serve."""

    uploaded: Runnable[Any, Any]
    """Input: `{"question": str, "documents": [...]}`."""
    indexed: Runnable[Any, Any]
    """The same over what the store holds. Input: `{"question": str}`."""
    nothing_to_gain: Runnable[Any, Any]
    index: Runnable[Any, Any]
    store: InMemoryVectorStore
    bind: tuple[tuple[Any, str], ...]


@contextmanager
def running(models: Models) -> Iterator[tuple[EnginePool, Stock]]:
    """The server, the app and engines of the same models, all on the same cores.

    Raises `EngineUnavailable` with the line that installs what is missing.
    """
    from teola_plugin.engines import bundled
    from teola_plugin.engines.embedding import EmbeddingEngine, packaged_minilm
    from teola_plugin.engines.reranking import RerankingEngine

    _check_packages()
    llm_cores, others = device_cores()
    embedder, reranker = models.embedder or packaged_minilm(), models.reranker or str(bundled.reranker_folder())
    folder = Path(tempfile.mkdtemp(prefix="teola-demo-"))
    with api_server(models.llm or bundled.llm_folder(), folder, cores=llm_cores) as server, _pinned(others):
        app = make_stock(server.base_url, embedder, reranker)
        llm = OpenAIServer("llm", base_url=server.base_url, model=SERVED, prefix_caching=True, priorities=True)
        engines: list[Engine] = [
            llm,
            EmbeddingEngine(model=embedder, cores=others),
            RerankingEngine(model=reranker, cores=others),
        ]
        with EnginePool.local(engines) as pool:
            yield pool, app


def _check_packages() -> None:
    missing = [name for name in PACKAGES if find_spec(name.replace("-", "_")) is None]
    if missing:
        raise EngineUnavailable(
            f"teola demo --stock needs LangChain's own classes, and has no {', '.join(missing)}.",
            hint=f"pip install {' '.join(missing)}",
        )


@contextmanager
def _pinned(cores: str | None) -> Iterator[None]:
    """What runs in this process, plain or as engines, keeps to these cores: the server has the others."""
    if cores is None:
        yield
        return
    import torch

    before, threads = os.sched_getaffinity(0), torch.get_num_threads()
    os.sched_setaffinity(0, {int(core) for core in cores.split(",")})
    torch.set_num_threads(len(cores.split(",")))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
        torch.set_num_threads(threads)


def make_stock(base_url: str, embedder: str, reranker: str) -> Stock:
    """Ordinary LangChain objects, made as they always were."""
    from langchain_classic.retrievers import ContextualCompressionRetriever, MultiQueryRetriever
    from langchain_classic.retrievers.document_compressors import CrossEncoderReranker
    from langchain_community.cross_encoders import HuggingFaceCrossEncoder
    from langchain_huggingface import HuggingFaceEmbeddings
    from langchain_openai import ChatOpenAI

    terms: dict[str, Any] = {"api_key": "none", "temperature": 0.0, "max_tokens": ANSWER_TOKENS}
    llm = ChatOpenAI(base_url=base_url, model=SERVED, **terms)
    with no_loading_bars():
        embeddings = HuggingFaceEmbeddings(model_name=embedder)
        scorer = HuggingFaceCrossEncoder(model_name=reranker)
    store = InMemoryVectorStore(embeddings)
    schema = {"type": "json_schema", "json_schema": {"name": "questions", "schema": chain.LIST_OF_QUESTIONS}}
    retriever = ContextualCompressionRetriever(
        base_compressor=CrossEncoderReranker(model=scorer, top_n=chain.KEPT),
        base_retriever=MultiQueryRetriever(
            retriever=store.as_retriever(search_kwargs={"k": chain.SEARCHED}),
            llm_chain=chain.EXPAND | llm.bind(response_format=schema, max_tokens=96) | JsonOutputParser(),
        ),
    )
    answer = (
        RunnablePassthrough.assign(passages=itemgetter("question") | retriever | RunnableLambda(chain.texts))
        | RunnablePassthrough.assign(first=chain.answer_with(0, llm))
        | RunnablePassthrough.assign(second=chain.answer_with(1, llm, "first"))
        | RunnablePassthrough.assign(answer=chain.answer_with(2, llm, "second"))
        | itemgetter("answer")
    )
    index = RunnableLambda(make_splitter().split_documents) | RunnableLambda(store.add_documents)
    bind = ((llm, "llm"), (embeddings, "embedder"), (scorer, "reranker"))
    uploaded = RunnablePassthrough.assign(ids=itemgetter("documents") | index) | answer
    return Stock(uploaded, answer, chain.nothing_to_gain(llm, store), index, store, bind)


def run_cases(pool: EnginePool, app: Stock, question: str, uploaded: list[Any], repeats: int) -> dict[str, Case]:
    """The document comes with the question; the document is there already; a chain with nothing to gain."""

    def case(name: str, plain: Runnable[Any, Any], given: Any, *, fresh: bool = False) -> Case:
        kept = [(obj, engine) for obj, engine in app.bind if plain is not app.nothing_to_gain or engine != "reranker"]
        clear = app.store.store.clear if fresh else lambda: None
        return run_case(name, plain, given, pool, clear, repeats=repeats, bind=kept)

    given = {"question": question, "documents": uploaded}
    cases = {"uploaded": case("uploaded document", app.uploaded, given, fresh=True)}
    cases["indexed"] = case("document already indexed", app.indexed, {"question": question})
    cases["nothing_to_gain"] = case("nothing to gain", app.nothing_to_gain, question)
    return cases


def index_seconds(app: Stock, uploaded: list[Any], repeats: int) -> float:
    """What indexing takes by itself; the median."""
    return statistics.median(_timed(app, uploaded) for _ in range(repeats))


def _timed(app: Stock, uploaded: list[Any]) -> float:
    app.store.store.clear()
    begun = time.perf_counter()
    app.index.invoke(uploaded)
    return time.perf_counter() - begun
