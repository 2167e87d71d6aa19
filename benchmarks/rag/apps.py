"""The applications, as a LangChain user writes them, on pool-backed objects with fake engines.

Sizes are realistic: 666 chunks of 256 tokens, an expansion prompt of about 184 tokens, instructions of about 60.
"""

from __future__ import annotations

import asyncio
import gc
import json
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from langchain_core.documents import Document
from langchain_core.output_parsers import JsonOutputParser, StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableLambda, RunnableParallel, RunnablePassthrough
from langchain_text_splitters import CharacterTextSplitter

from benchmarks.rag.texts import written
from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.indexing import TeolaIndexer
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.engines.fake import Decoded, FakeEmbedder, FakeLLM, FakeReranker, FakeStore, split_tokens
from teola_plugin.graph import EngineProfile
from teola_plugin.requests.payloads import Prompt, Sampling

CHUNKS, CHUNK_TOKENS, ITEM_TOKENS = 666, 256, 20
CHUNK_CHARS = 1300
"""Room for one paragraph of 256 tokens, not for two: a chunk is a paragraph."""
COLLECTION = "uploads"
LIST = {"type": "array", "items": {"type": "string"}, "minItems": 3, "maxItems": 3}
QUESTION = (
    "Which of the terms in the uploaded report would have to change first, and what does it say about the reasons?"
)

EXPAND = (
    "You help a search engine that looks for passages in long reports. A user has asked the question below. "
    "Write three other questions that ask for the same thing in different words, so that passages which are worded "
    "differently are found as well. Keep every name and every number as it is. Do not answer the question. Do not "
    "number the questions and do not explain them. Each must be one sentence that can be understood on its own, and "
    "none may repeat another. Write them as a JSON list of three strings and nothing else.\n\nQuestion: "
)
INSTRUCTIONS = (
    "You are a careful analyst. Answer the question with the passages of the report that are given to you and with "
    "nothing else. If they do not hold the answer, say so. Be brief, name your sources, do not guess.\n\nQuestion: "
)

PASSAGE = "\n\nPassage: "
"""What stands between the question and a passage in every answering prompt."""

HEAD = INSTRUCTIONS + "{question}" + PASSAGE

_RNG = random.Random(7)
WORDS = sorted({"".join(_RNG.choice(s) for s in ("bdfgklmnprst", "aeiou") * 2) for _ in range(4000)})
"""Four letters each: one token of the fake LLM."""


@dataclass
class Observed:
    """What the plain object did, for the bound: prompts with their answers, and the pairs it reranked."""

    generated: list[tuple[str, str]] = field(default_factory=list)
    reranked: int = 0

    def clear(self) -> None:
        self.generated.clear()
        self.reranked = 0


@dataclass(frozen=True)
class Bench:
    """A pool of fakes and what it saw."""

    pool: EnginePool
    observed: Observed

    @property
    def decoded(self) -> Decoded:
        """By its model, since the last `fresh`."""
        llm: Any = self.pool.engine("llm")
        found: Decoded = llm.decoded
        return found

    def model(self, tokens: int) -> ChatTeola:
        return ChatTeola(pool=self.pool, engine="llm", max_tokens=tokens)

    def store(self) -> TeolaVectorStore:
        embedding = TeolaEmbeddings(pool=self.pool, engine="embedder")
        return TeolaVectorStore(pool=self.pool, embedding=embedding, engine="store", collection=COLLECTION)

    def indexer(self) -> TeolaIndexer:
        splitter = CharacterTextSplitter(separator="\n\n", chunk_size=CHUNK_CHARS, chunk_overlap=0)
        return TeolaIndexer(store=self.store(), splitter=splitter)

    def fresh(self) -> None:
        """Empty caches and collections: nothing of an earlier run helps the next, nor leaves its garbage to it."""
        gc.collect()
        self.pool.reset()
        self.pool.admin("store", "delete_collection", COLLECTION).result()
        self.observed.clear()


def fake_pool(
    machine: Mapping[str, EngineProfile], make: Callable[..., EnginePool] = EnginePool.local, share: float = 0.0
) -> Bench:
    """A pool of fake engines with these profiles, answering in words that depend on the prompt; answers copy such a
    share of them from it (see `texts`)."""
    observed = Observed()

    def answer(prompt: Prompt, sampling: Sampling) -> str:
        text = _answer(prompt, sampling, share)
        observed.generated.append((prompt.flat(), text))
        return text

    engines = [
        FakeLLM("llm", machine["llm"], answer),
        FakeEmbedder("embedder", machine["embedder"]),
        FakeReranker("reranker", machine["reranker"]),
        FakeStore("store", machine["store"]),
    ]
    return Bench(make(engines=engines), observed)


def _answer(prompt: Prompt, sampling: Sampling, share: float) -> str:
    if sampling.json_schema:
        rng = random.Random(prompt.flat())
        return json.dumps([" ".join(rng.choices(WORDS, k=ITEM_TOKENS)) for _ in range(3)])
    return written(prompt.flat(), sampling.max_tokens, share, WORDS)


def document(seed: int = 0, chunks: int = CHUNKS) -> str:
    """An uploaded report: paragraphs of 256 tokens, each becomes a chunk."""
    rng = random.Random(seed)
    paragraphs = (" ".join(rng.choices(WORDS[i % 50 :: 3], k=CHUNK_TOKENS)) for i in range(chunks))
    return "\n\n".join(paragraphs)


async def warm_up(bench: Bench) -> None:
    """Imports and first-use costs of both ways, untimed."""
    chain = advanced_rag(bench, 1)
    given = {"question": QUESTION, "document": document(chunks=16)}
    for runnable in (chain, accelerate(chain, pool=bench.pool)):
        await asyncio.to_thread(bench.fresh)
        await runnable.ainvoke(given)


# ------------------------------------------------------------ chains


def advanced_rag(bench: Bench, tokens: int, *, parallel: bool = False) -> Runnable[Any, str]:
    """Upload, expand the question, search with each, union, rerank to 3, refine over the 3."""
    index = itemgetter("document") | bench.indexer()
    expand = ChatPromptTemplate.from_template(EXPAND + "{question}")
    queries = expand | bench.model(128).bind(json_schema=LIST) | JsonOutputParser()
    head: Runnable[Any, Any]
    if parallel:
        head = RunnableParallel(question=itemgetter("question"), indexed=index, queries=queries)
    else:
        head = RunnablePassthrough.assign(indexed=index) | RunnablePassthrough.assign(queries=queries)
    retriever = bench.store().as_retriever(search_kwargs={"k": 16})
    rerank = TeolaRerank(pool=bench.pool, engine="reranker", top_n=3).as_runnable()
    pair = {"query": itemgetter("question"), "documents": itemgetter("union")}
    return (
        head
        | RunnablePassthrough.assign(found=itemgetter("queries") | retriever.map())
        | RunnablePassthrough.assign(union=RunnableLambda(_union_noting(bench.observed)))
        | RunnablePassthrough.assign(top=pair | rerank)
        | RunnablePassthrough.assign(first=_passage(0), second=_passage(1), third=_passage(2))
        | _refine(bench, tokens)
    )


def _refine(bench: Bench, tokens: int) -> Runnable[Any, str]:
    """Question and context stand before the previous answer, which is known last."""
    start = ChatPromptTemplate.from_template(HEAD + "{first}\n\nAnswer:")
    better = "\n\nAn answer without this passage: {answer}\n\nBetter answer:"
    second = ChatPromptTemplate.from_template(HEAD + "{second}" + better)
    third = ChatPromptTemplate.from_template(HEAD + "{third}" + better)
    model = bench.model(tokens)
    return (
        RunnablePassthrough.assign(answer=start | model | StrOutputParser())
        | RunnablePassthrough.assign(answer=second | model | StrOutputParser())
        | third
        | model
        | StrOutputParser()
    )


def naive_rag(bench: Bench, tokens: int) -> Runnable[Any, str]:
    """Upload, take the 3 nearest passages, answer with each (a tree's leaves), combine."""
    index = itemgetter("document") | bench.indexer()
    retriever = bench.store().as_retriever(search_kwargs={"k": 3})
    model = bench.model(tokens)

    def leaf(name: str) -> Runnable[Any, str]:
        prompt = ChatPromptTemplate.from_template(HEAD + f"{{{name}}}\n\nAnswer:")
        return prompt | model | StrOutputParser()

    combine = ChatPromptTemplate.from_template(
        INSTRUCTIONS + "{question}\n\nAnswers from single passages:\n1. {a}\n2. {b}\n3. {c}\n\nTheir common answer:"
    )
    return (
        RunnablePassthrough.assign(indexed=index)
        | RunnablePassthrough.assign(top=itemgetter("question") | retriever)
        | RunnablePassthrough.assign(first=_passage(0), second=_passage(1), third=_passage(2))
        | RunnablePassthrough.assign(a=leaf("first"), b=leaf("second"), c=leaf("third"))
        | combine
        | model
        | StrOutputParser()
    )


def retrieve_and_answer(bench: Bench, tokens: int) -> Runnable[Any, str]:
    """Retrieve, prompt, answer: every step needs the whole of the one before; nothing can be gained."""
    retriever = bench.store().as_retriever(search_kwargs={"k": 3})
    prompt = ChatPromptTemplate.from_template("{context}\n\nAnswer with these passages: {question}")
    context = itemgetter("question") | retriever | RunnableLambda(_joined)
    given = RunnableParallel(context=context, question=itemgetter("question"))
    return given | prompt | bench.model(tokens) | StrOutputParser()


def _union_noting(observed: Observed) -> Callable[[dict[str, Any]], list[Document]]:
    def union(state: dict[str, Any]) -> list[Document]:
        kept = {d.id: d for documents in state["found"] for d in documents}
        observed.reranked = len(kept)
        return list(kept.values())

    return union


def _passage(rank: int) -> Callable[[dict[str, Any]], str]:
    def passage(state: dict[str, Any]) -> str:
        text: str = state["top"][rank].page_content
        return text

    return passage


def _joined(documents: list[Document]) -> str:
    return "\n\n".join(d.page_content for d in documents)


def tokens_of(text: str) -> int:
    return len(split_tokens(text))
