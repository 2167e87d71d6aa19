"""The objects that a cookbook's chain is made of, twice over: on a pool of fakes, and as the user's own.

Both kinds answer alike, as a pure function of the prompt, and take as long as a profile says: the own models sleep and,
like a hosted API, do not slow each other.
"""

from __future__ import annotations

import json
import random
import re
import time
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.retrievers import BaseRetriever
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore
from pydantic import ConfigDict, Field

from benchmarks.rag.apps import WORDS, tokens_of
from benchmarks.replies import reply_after
from teola_plugin import EnginePool
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore, bag_of_words, embed_words
from teola_plugin.engines.profiles import scaled as scaled
from teola_plugin.graph import EngineProfile, PrimitiveKind
from teola_plugin.requests.payloads import Prompt, Sampling

K = PrimitiveKind
CHUNKS, CHUNK_TOKENS = 24, 128
Machine = Mapping[str, EngineProfile]


@dataclass(frozen=True)
class Kit:
    """What a pattern is built from."""

    name: str
    chat: Callable[[int], BaseChatModel]
    """A chat model that answers in so many tokens."""
    store: VectorStore
    uploads: VectorStore
    keywords: BaseRetriever
    """A keyword search: the user's own in both kits."""
    reranker: BaseDocumentCompressor
    pool: EnginePool | None
    fresh: Callable[[], None]
    """Nothing of an earlier query helps the next."""
    web: BaseRetriever
    """A search on the web, as slow as those are: the user's own in both kits."""
    concurrent: tuple[Any, ...] = ()
    """What of the user's own several threads may call, as a client of an API: for `accelerate(concurrent=)`."""
    slow: Slow | None = None
    """What the own models sleep, where that is all there is."""


# ------------------------------------------------------------ what models say


def answer(prompt: str, tokens: int) -> str:
    """Lines, JSON or a verdict where the prompt asks for them; words otherwise. A pure function of the prompt."""
    rng = random.Random(prompt)
    if "one per line" in prompt:
        return "\n".join(" ".join(rng.choices(WORDS, k=tokens // 3)) for _ in range(3))
    if "JSON list" in prompt:
        return json.dumps([" ".join(rng.choices(WORDS, k=tokens // 3)) for _ in range(3)])
    if "'yes' or 'no'" in prompt:
        return "yes" if zlib.crc32(prompt.encode()) % 2 else "no"
    return " ".join(rng.choices(WORDS, k=tokens))


def corpus(tokens: int = CHUNK_TOKENS, seed: int = 3) -> list[Document]:
    rng = random.Random(seed)
    texts = (" ".join(rng.choices(WORDS[i * 7 % 900 :: 4], k=tokens)) for i in range(CHUNKS))
    return [Document(text, id=f"chunk-{i}", metadata={"source": f"report-{i % 5}.txt"}) for i, text in enumerate(texts)]


# ------------------------------------------------------------ on a pool


def pool_kit(machine: Machine) -> Kit:
    """Pool-backed objects on fake engines."""

    def said(prompt: Prompt, sampling: Sampling) -> str:
        return answer(prompt.messages[-1].content, sampling.max_tokens)

    llm, embedder = FakeLLM("llm", machine["llm"], said), FakeEmbedder("embedder", machine["embedder"])
    engines = [llm, embedder, FakeReranker("reranker", machine["reranker"]), FakeStore("store", machine["store"])]
    pool = EnginePool.local(engines=engines).start()

    def store(collection: str) -> TeolaVectorStore:
        return TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection=collection)

    def fresh() -> None:
        pool.reset()
        pool.admin("store", "delete_collection", "uploads").result()

    return Kit(
        "pool",
        lambda tokens: ChatTeola(pool=pool, max_tokens=tokens),
        _filled(store("reports")),
        store("uploads"),
        Keywords(documents=corpus(), seconds=machine["store"].seconds(K.SEARCHING, 10)),
        TeolaRerank(pool=pool, top_n=3),
        pool,
        fresh,
        web(machine),
        concurrent=(Keywords,),
    )


def web(machine: Machine, tokens: int = CHUNK_TOKENS) -> Keywords:
    """As slow as the decoding of 18 tokens, 0.5 s on the RTX 3090: assumed, there is nothing in the logs about it."""
    return Keywords(documents=corpus(tokens), seconds=machine["llm"].seconds(K.DECODING, 18), k=2)


def _filled(store: VectorStore) -> VectorStore:
    store.add_documents(corpus())
    return store


# ------------------------------------------------------------ the user's own


class Slow:
    """How long a profile says that calls take; `took` keeps it, by what was asked for, in the order of the calls."""

    def __init__(self, machine: Machine) -> None:
        self._machine = machine
        self.took: dict[str, list[float]] = {"write": [], "embed": [], "rerank": []}

    def clear(self) -> None:
        for kept in self.took.values():
            kept.clear()

    def _kept(self, kind: str, seconds: float) -> float:
        self.took[kind].append(seconds)
        return seconds

    def generate(self, prompt: str, text: str) -> float:
        llm = self._machine["llm"]
        seconds = llm.seconds(K.PREFILLING, tokens_of(prompt)) + llm.seconds(K.DECODING, tokens_of(text))
        return self._kept("write", seconds)

    def embed(self, texts: int) -> float:
        return self._kept("embed", self._machine["embedder"].seconds(K.EMBEDDING, texts))

    def rerank(self, pairs: int) -> float:
        return self._kept("rerank", self._machine["reranker"].seconds(K.RERANKING, pairs))


class OwnChat(BaseChatModel):
    """A model behind an API, with code of its own for both paths."""

    tokens: int
    slow: Any = Field(exclude=True, repr=False)

    @property
    def _llm_type(self) -> str:
        return "own"

    def _said(self, messages: list[BaseMessage]) -> tuple[float, ChatResult]:
        prompt = str(messages[-1].content)
        text = answer(prompt, self.tokens)
        return self.slow.generate(prompt, text), ChatResult(generations=[ChatGeneration(message=AIMessage(text))])

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        seconds, result = self._said(messages)
        time.sleep(seconds)
        return result

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        seconds, result = self._said(messages)
        await reply_after(seconds)
        return result


class OwnEmbeddings(Embeddings):
    def __init__(self, slow: Slow) -> None:
        self._slow = slow

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        time.sleep(self._slow.embed(len(texts)))
        return [list(embed_words(text, "document")) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        time.sleep(self._slow.embed(1))
        return list(embed_words(text))

    async def aembed_documents(self, texts: list[str]) -> list[list[float]]:
        await reply_after(self._slow.embed(len(texts)))
        return [list(embed_words(text, "document")) for text in texts]

    async def aembed_query(self, text: str) -> list[float]:
        await reply_after(self._slow.embed(1))
        return list(embed_words(text))


class OwnReranker(BaseDocumentCompressor):
    top_n: int = 3
    slow: Any = Field(exclude=True, repr=False)

    model_config = ConfigDict(arbitrary_types_allowed=True)

    def _best(self, documents: Sequence[Document], query: str) -> list[Document]:
        asked = bag_of_words(query)
        shared = [sum(weight for w, weight in asked.items() if w in bag_of_words(d.page_content)) for d in documents]
        order = sorted(range(len(documents)), key=lambda i: shared[i], reverse=True)
        return [documents[i] for i in order[: self.top_n]]

    def compress_documents(self, documents: Sequence[Document], query: str, callbacks: Any = None) -> list[Document]:
        time.sleep(self.slow.rerank(len(documents)))
        return self._best(documents, query)

    async def acompress_documents(
        self, documents: Sequence[Document], query: str, callbacks: Any = None
    ) -> list[Document]:
        await reply_after(self.slow.rerank(len(documents)))
        return self._best(documents, query)


class Keywords(BaseRetriever):
    """As BM25 retrievers do: words that question and passage share."""

    documents: list[Document]
    seconds: float
    k: int = 4

    def _best(self, query: str) -> list[Document]:
        asked = set(re.findall(r"\w+", query.lower()))
        return sorted(self.documents, key=lambda d: -len(asked & bag_of_words(d.page_content).keys()))[: self.k]

    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        time.sleep(self.seconds)
        return self._best(query)

    async def _aget_relevant_documents(self, query: str, *, run_manager: Any) -> list[Document]:
        await reply_after(self.seconds)
        return self._best(query)


def own_kit(machine: Machine) -> Kit:
    """The user's own models; no pool anywhere."""
    slow = Slow(machine)
    embeddings = OwnEmbeddings(slow)
    uploads = InMemoryVectorStore(embeddings)
    return Kit(
        "own",
        lambda tokens: OwnChat(tokens=tokens, slow=slow),
        _filled(InMemoryVectorStore(embeddings)),
        uploads,
        Keywords(documents=corpus(), seconds=machine["store"].seconds(K.SEARCHING, 10)),
        OwnReranker(slow=slow),
        None,
        uploads.store.clear,
        web(machine),
        concurrent=(OwnChat, OwnEmbeddings, Keywords),
        slow=slow,
    )


def mixed_kit(machine: Machine) -> Kit:
    """A model of the pool; the user's own stores, embeddings and reranker, as with one's own LLM server."""
    pool, own = pool_kit(machine), own_kit(machine)

    def fresh() -> None:
        pool.fresh()
        own.fresh()

    return replace(own, name="mixed", chat=pool.chat, pool=pool.pool, fresh=fresh, slow=None)
