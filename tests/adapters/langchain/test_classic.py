"""Tests of retrievers, compressors and chains of langchain_classic with plans.

The original runs beside the plan, so the result is the same, its requests are in the plan, and none is made twice.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from langchain_classic.chains import LLMChain, RetrievalQA, create_retrieval_chain
from langchain_classic.chains.combine_documents import create_stuff_documents_chain
from langchain_classic.chains.summarize import load_summarize_chain
from langchain_classic.retrievers import (
    ContextualCompressionRetriever,
    MultiVectorRetriever,
    ParentDocumentRetriever,
)
from langchain_classic.retrievers.document_compressors import (
    CrossEncoderReranker,
    DocumentCompressorPipeline,
    EmbeddingsFilter,
    LLMChainExtractor,
    LLMChainFilter,
)
from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate, PromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough
from langchain_core.stores import InMemoryByteStore, InMemoryStore
from langchain_text_splitters import CharacterTextSplitter

from teola_plugin import accelerate
from teola_plugin.adapters.langchain import runnable
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.rerank import TeolaCrossEncoder, TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.engines.base import EngineLoad
from teola_plugin.engines.fake import FakeEmbedder, FakeReranker, FakeStore
from teola_plugin.errors import EngineError
from teola_plugin.graph import Batching, EngineProfile, PrimitiveKind
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Done, Failed, Generation, Request, Result

Chain = Runnable[Any, Any]
WORDS = ("lambda", "class", "import", "with", "raise")
DOCUMENTS = [Document(f"Of {w}: {w} and naïve. More of {w}.", id=w, metadata={"source": w}) for w in WORDS]
ASKED = "what of import and raise?"
_names = (f"equivalents{i}" for i in itertools.count())


class Model:
    """Answers by the prompt alone; holds answers back until `together` requests are there at once."""

    name = "llm"
    kinds = frozenset({PrimitiveKind.PREFILLING, PrimitiveKind.DECODING})
    profile = EngineProfile(batching=Batching.CONTINUOUS)

    def __init__(self) -> None:
        self.requests: Counter[str] = Counter()
        self.together = 1
        self.open = 0

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def reset(self) -> None: ...

    async def cancel(self, request_id: str) -> None: ...

    def size(self, request: Request) -> int:
        return 1

    def load(self) -> EngineLoad:
        return EngineLoad()

    def versions(self) -> dict[str, str]:
        return {}

    async def execute(self, batch: Sequence[Request]) -> AsyncIterator[Result]:
        self.open += len(batch)
        for _ in range(1000):
            if self.open >= self.together:
                break
            await asyncio.sleep(0.002)
        for request in batch:
            text = request.payload.prompt.flat()
            self.requests[text] += 1
            if self.open < self.together:
                yield Failed(request.id, EngineError(f"only {self.open} requests came together"))
            else:
                yield Done(request.id, Generation(_says(text), "stop", 5, 5, 0))


def _says(prompt: str) -> str:
    if "YES if the context is relevant" in prompt:
        return "YES" if len(prompt) % 3 else "NO"
    if "Extract any parts" in prompt and "lambda" in prompt:
        return " NO_OUTPUT"
    return f"so much for {sum(map(ord, prompt)) % 9973}"


class Embedder(FakeEmbedder):
    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[Any] = Counter()

    def _value(self, request: Request) -> tuple[float, ...]:
        self.requests[request.payload] += 1
        return super()._value(request)


class Reranker(FakeReranker):
    def __init__(self) -> None:
        super().__init__()
        self.requests: Counter[Any] = Counter()

    def _value(self, request: Request) -> float:
        self.requests[request.payload] += 1
        return super()._value(request)


@dataclass
class Kit:
    pool: EnginePool
    llm: Model
    embedder: Embedder
    reranker: Reranker
    stores: Iterator[str] = field(default_factory=lambda: _names)

    def clear(self) -> None:
        for engine in (self.llm, self.embedder, self.reranker):
            engine.requests.clear()
        self.llm.together, self.llm.open = 1, 0

    @property
    def requests(self) -> list[Counter[Any]]:
        return [Counter(self.llm.requests), Counter(self.embedder.requests), Counter(self.reranker.requests)]

    @property
    def chat(self) -> ChatTeola:
        return ChatTeola(pool=self.pool, custom_get_token_ids=lambda text: list(range(len(text) // 4)))

    @property
    def embeddings(self) -> TeolaEmbeddings:
        return TeolaEmbeddings(pool=self.pool)

    def store(self, documents: Sequence[Document] = ()) -> TeolaVectorStore:
        made = TeolaVectorStore(pool=self.pool, embedding=self.embeddings, collection=next(self.stores))
        if documents:
            made.add_documents(list(documents))
        return made

    def compressed(self, compressor: Any) -> Chain:
        base = self.store(DOCUMENTS).as_retriever(search_kwargs={"k": 4})
        return ContextualCompressionRetriever(base_compressor=compressor, base_retriever=base)


@pytest.fixture(scope="module")
def _kit() -> Iterator[Kit]:
    llm, embedder, reranker = Model(), Embedder(), Reranker()
    with EnginePool.local(engines=[llm, embedder, reranker, FakeStore()]) as pool:
        yield Kit(pool, llm, embedder, reranker)


@pytest.fixture
def kit(_kit: Kit) -> Kit:
    _kit.clear()
    return _kit


def answered(kit: Kit, retriever: Chain) -> Chain:
    """Return the retriever with a model behind it, which is called early only with the retriever's documents."""
    prompt = ChatPromptTemplate.from_template("Use {context} to answer {question}")
    read = retriever | (lambda documents: "\n".join(f"{d.page_content} {d.metadata}" for d in documents))
    return {"context": read, "question": RunnablePassthrough()} | prompt | kit.chat | StrOutputParser()


def parents(kit: Kit, **where: Any) -> ParentDocumentRetriever:
    splitter = CharacterTextSplitter(chunk_size=30, chunk_overlap=0, separator=". ")
    made = ParentDocumentRetriever(
        vectorstore=kit.store(),
        child_splitter=splitter,
        search_kwargs={"k": 3},
        **(where or {"docstore": InMemoryStore()}),
    )
    made.add_documents(DOCUMENTS, ids=list(WORDS))
    return made


def summaries(kit: Kit) -> MultiVectorRetriever:
    pieces = [Document(f"about {w}", id=f"about {w}", metadata={"of": w}) for w in WORDS]
    made = MultiVectorRetriever(vectorstore=kit.store(pieces), docstore=InMemoryStore(), id_key="of")
    made.docstore.mset([(one.metadata["source"], one) for one in DOCUMENTS])
    return made


def pipeline(kit: Kit) -> DocumentCompressorPipeline:
    steps = [EmbeddingsFilter(embeddings=kit.embeddings, k=3), TeolaRerank(pool=kit.pool, top_n=2)]
    return DocumentCompressorPipeline(transformers=steps)


RETRIEVERS: dict[str, Callable[[Kit], Chain]] = {
    "cross encoder": lambda kit: kit.compressed(CrossEncoderReranker(model=TeolaCrossEncoder(pool=kit.pool), top_n=2)),
    "embeddings filter": lambda kit: kit.compressed(EmbeddingsFilter(embeddings=kit.embeddings, k=2)),
    "extractor": lambda kit: kit.compressed(LLMChainExtractor.from_llm(kit.chat)),
    "filter": lambda kit: kit.compressed(LLMChainFilter.from_llm(kit.chat)),
    "pipeline": lambda kit: kit.compressed(pipeline(kit)),
    "parents": parents,
    "parents in bytes": lambda kit: parents(kit, byte_store=InMemoryByteStore()),
    "summaries": summaries,
}
CHAINS: dict[str, tuple[Callable[[Kit], Chain], Any]] = {
    **{name: (lambda kit, make=make: answered(kit, make(kit)), ASKED) for name, make in RETRIEVERS.items()},
    "LLM chain": (lambda kit: LLMChain(llm=kit.chat, prompt=PromptTemplate.from_template("Say {x}")), {"x": "hi"}),
    "LLM chain, bare input": (lambda kit: LLMChain(llm=kit.chat, prompt=PromptTemplate.from_template("Say {x}")), "hi"),
    "stuff": (lambda kit: load_summarize_chain(kit.chat, chain_type="stuff"), {"input_documents": DOCUMENTS[:3]}),
    "stuff function": (
        lambda kit: create_stuff_documents_chain(kit.chat, ChatPromptTemplate.from_template("Sum up {context}")),
        {"context": DOCUMENTS[:3]},
    ),
    "retrieval chain": (
        lambda kit: create_retrieval_chain(
            kit.store(DOCUMENTS).as_retriever(),
            create_stuff_documents_chain(kit.chat, ChatPromptTemplate.from_template("{context} {input}")),
        ),
        {"input": ASKED},
    ),
    "retrieval QA": (
        lambda kit: RetrievalQA.from_chain_type(kit.chat, retriever=kit.store(DOCUMENTS).as_retriever()),
        {"query": ASKED},
    ),
    "retrieval QA with sources": (
        lambda kit: RetrievalQA.from_chain_type(
            kit.chat, retriever=kit.store(DOCUMENTS).as_retriever(), return_source_documents=True
        ),
        ASKED,
    ),
}
MAPPED = {
    "extractor": (lambda kit: kit.compressed(LLMChainExtractor.from_llm(kit.chat)), ASKED, 4),
    "filter": (lambda kit: kit.compressed(LLMChainFilter.from_llm(kit.chat)), ASKED, 4),
    "map-reduce": (
        lambda kit: load_summarize_chain(kit.chat, chain_type="map_reduce"),
        {"input_documents": DOCUMENTS},
        len(DOCUMENTS),
    ),
}


def called(chain: Chain, given: Any, way: str) -> Any:
    if way == "batch":
        return chain.batch([given, given])
    if way == "stream":
        return list(chain.stream(given))[-1:]
    return asyncio.run(chain.ainvoke(given)) if way == "ainvoke" else chain.invoke(given)


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "batch", "stream"])
@pytest.mark.parametrize("name", CHAINS)
def test_classic_chain_gives_the_same_result_with_no_repeated_request(
    kit: Kit, always_ahead: None, name: str, way: str
) -> None:
    make, given = CHAINS[name]
    chain = make(kit)
    kit.clear()
    plain, expected_requests = called(chain, given, way), kit.requests
    kit.clear()
    fast = accelerate(chain, pool=kit.pool)
    assert {row.level for row in fast.report().parts} == {"lowered"}, str(fast.report().parts)
    assert called(fast, given, way) == plain
    for before, after in zip(expected_requests, kit.requests, strict=True):
        assert set(after) == set(before) and all(after[one] <= before[one] for one in after)
    trace = fast.last_trace()
    assert trace is not None and trace.wasted() == (0, 0)
    planned = {p.id: p for p in fast.plan(given).graph}
    engines = {p.engine for p in planned.values()}  # where the plain object is first, its call has a name of its own
    names = [(name, span.engine) for span in trace.spans for name in (span.also or (span.primitive,))]
    assert all(name in planned or "[" in name or (".call#" in name and engine in engines) for name, engine in names)


@pytest.mark.parametrize("name", CHAINS)
def test_classic_chain_result_does_not_depend_on_speculation(kit: Kit, always_ahead: None, name: str) -> None:
    make, given = CHAINS[name]
    chain = make(kit)
    expected = chain.invoke(given)
    fast = accelerate(chain, pool=kit.pool)
    assert (
        fast.invoke(given) == expected and accelerate(chain, pool=kit.pool, speculate="off").invoke(given) == expected
    )


@pytest.fixture
def always_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the plans of all chains, as in larger chains. Some of these prefetch nothing by themselves."""
    monkeypatch.setattr(runnable, "graph_saves_time", lambda source, graph: True)


@pytest.mark.parametrize("name", MAPPED)
def test_requests_for_list_items_overlap_in_classic_chains(kit: Kit, name: str) -> None:
    make, given, items = MAPPED[name]
    chain = make(kit)
    kit.clear()
    expected = chain.invoke(given)
    expected_requests = Counter(kit.llm.requests)
    kit.clear()
    kit.llm.together = items
    fast = accelerate(chain, pool=kit.pool)
    assert fast.gains and fast.invoke(given) == expected
    assert kit.llm.requests == expected_requests


def test_map_reduce_chain_prefetches_its_first_requests(kit: Kit) -> None:
    chain = load_summarize_chain(kit.chat, chain_type="map_reduce", return_intermediate_steps=True)
    (row,) = accelerate(chain, pool=kit.pool).report().parts
    assert row.level == "joined" and "first requests" in row.reason
    behind = chain | (lambda made: made["output_text"]) | ChatPromptTemplate.from_template("Shorter: {text}") | kit.chat
    given = {"input_documents": DOCUMENTS}
    plain = behind.invoke(given).content
    kit.clear()
    for way in ("invoke", "ainvoke"):
        assert called(accelerate(behind, pool=kit.pool), given, way).content == plain
    assert set(kit.llm.requests.values()) == {2}


def test_classic_chain_raises_the_errors_of_the_original(kit: Kit, always_ahead: None) -> None:
    qa = RetrievalQA.from_chain_type(kit.chat, retriever=kit.store(DOCUMENTS).as_retriever())
    stuffed = load_summarize_chain(kit.chat, chain_type="stuff")
    for chain, given in ((qa, {"nothing": 1}), (stuffed, {"input_documents": "no documents"}), (qa, {"query": 3})):
        with pytest.raises(Exception) as plain:
            chain.invoke(given)
        with pytest.raises(type(plain.value)) as made:
            accelerate(chain, pool=kit.pool).invoke(given)
        assert anonymous(made.value) == anonymous(plain.value)


def anonymous(error: BaseException) -> str:
    """Return a text without the numbers of requests and queries."""
    return re.sub(r"\b(q|call)\d+(-\d+)?", "#", str(error))


def _mine(chain: Any) -> Any:
    """Return the same object in a subclass, as users write it."""
    cls = type(chain)
    return type("Mine", (cls,), {"__module__": __name__})(**{k: v for k, v in vars(chain).items() if v is not None})


def test_user_subclasses_of_classic_chains_are_not_lowered(kit: Kit) -> None:
    class Noisy(InMemoryStore): ...

    class Strict(LLMChainExtractor):
        def compress_documents(self, *args: Any, **kwargs: Any) -> Any:
            return super().compress_documents(*args, **kwargs)[:1]

    class Loud(TeolaEmbeddings):
        def embed_query(self, text: str) -> list[float]:
            return super().embed_query(text.upper())

    kept = RetrievalQA.from_chain_type(kit.chat, retriever=kit.store(DOCUMENTS).as_retriever())
    from langchain_classic.memory import ConversationBufferMemory

    for chain in (
        kit.compressed(Strict.from_llm(kit.chat)),
        kit.compressed(LLMChainExtractor.from_llm(kit.chat, get_input=lambda q, d: {"question": q, "context": q})),
        kit.compressed(EmbeddingsFilter(embeddings=Loud(pool=kit.pool), k=2)),
        kit.compressed(EmbeddingsFilter(embeddings=kit.embeddings, k=2, similarity_fn=lambda a, b: [[1.0] * len(b)])),
        kit.compressed(DocumentCompressorPipeline(transformers=[CharacterTextSplitter(), TeolaRerank(pool=kit.pool)])),
        _mine(kept),
        LLMChain(llm=kit.chat, prompt=PromptTemplate.from_template("{x}"), memory=ConversationBufferMemory()),
        LLMChain(llm=kit.chat, prompt=PromptTemplate.from_template("{x}"), llm_kwargs={"max_tokens": 3}),
    ):
        assert all(row.level != "lowered" for row in accelerate(chain, pool=kit.pool).report().parts), chain
    searched = accelerate(parents(kit, docstore=Noisy()), pool=kit.pool)
    assert [row.level for row in searched.report().parts] == ["joined"]
    assert searched.invoke(ASKED) == searched.original.invoke(ASKED)
