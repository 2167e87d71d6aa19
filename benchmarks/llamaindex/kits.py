"""What LlamaIndex engines are made of, twice over: on a pool of fakes, and as the user's own.

Both kinds answer alike, as a pure function of the prompt, and take as long as a profile says.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from llama_index.core import Settings, StorageContext, VectorStoreIndex
from llama_index.core.base.embeddings.base import BaseEmbedding
from llama_index.core.callbacks import CallbackManager
from llama_index.core.llms import LLM
from llama_index.core.postprocessor.types import BaseNodePostprocessor
from llama_index.core.schema import TextNode

from benchmarks.llamaindex.answers import answer
from benchmarks.llamaindex.ledger import Ledger
from benchmarks.llamaindex.own import OwnEmbedding, OwnLLM, OwnRerank, OwnStore, Slow
from benchmarks.rag.apps import WORDS
from teola_plugin import EnginePool
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore, Faults
from teola_plugin.graph import EngineProfile
from teola_plugin.requests.payloads import EmbedText, Generate, Prompt, Request, Sampling, SearchVector

Machine = Mapping[str, EngineProfile]


@dataclass(frozen=True)
class Sizes:
    """Chunks of a collection, tokens of a chunk, words of an answer; a word is a token of the fakes."""

    chunks: int = 64
    chunk_tokens: int = 128
    answer: int = 24


@dataclass(frozen=True)
class Kit:
    """What an engine is built from."""

    name: str
    llm: LLM
    embedding: BaseEmbedding
    reports: VectorStoreIndex
    notes: VectorStoreIndex
    """Another collection, of another half of the chunks."""
    reranker: Callable[[int], BaseNodePostprocessor]
    """One that keeps so many."""
    ledger: Ledger
    manager: CallbackManager
    pool: EnginePool | None = None
    bind: tuple[tuple[Any, str], ...] = ()
    """Own models, and the engines that say what they say."""
    concurrent: tuple[Any, ...] = ()
    """Own objects that take several sync calls at once, like what is behind an API."""

    def fresh(self) -> None:
        """Nothing of an earlier query helps the next."""
        self.ledger.clear()
        if self.pool is not None:
            self.pool.reset()

    @contextmanager
    def in_force(self) -> Iterator[None]:
        """What LlamaIndex takes by default is of this kit."""
        before = Settings._llm, Settings._embed_model, Settings._callback_manager
        Settings._llm, Settings._embed_model, Settings._callback_manager = self.llm, self.embedding, self.manager
        try:
            yield
        finally:
            Settings._llm, Settings._embed_model, Settings._callback_manager = before


def corpus(sizes: Sizes) -> list[TextNode]:
    rng = random.Random(3)
    return [
        TextNode(
            id_=f"chunk-{i}",
            text=_sentences(rng.choices(WORDS[i * 7 % 900 :: 4], k=sizes.chunk_tokens)),
            metadata={"source": f"report-{i % 5}.txt", "page": i},
        )
        for i in range(sizes.chunks)
    ]


def _sentences(words: list[str]) -> str:
    return " ".join(" ".join(words[i : i + 10]) + "." for i in range(0, len(words), 10))


def index(nodes: list[TextNode], embedding: BaseEmbedding, store: Any, manager: CallbackManager) -> VectorStoreIndex:
    context = StorageContext.from_defaults(vector_store=store)
    copies = [node.model_copy(deep=True) for node in nodes]  # the index leaves vectors in them
    return VectorStoreIndex(copies, storage_context=context, embed_model=embedding, callback_manager=manager)


def own_kit(machine: Machine, sizes: Sizes, manager: CallbackManager | None = None, *, chat: bool = False) -> Kit:
    """The user's own models; no pool anywhere."""
    manager = manager or CallbackManager([])
    ledger = Ledger()
    slow = Slow(machine, ledger)
    llm = OwnLLM(words=sizes.answer, chat_model=chat, slow=slow, callback_manager=manager)
    embedding = OwnEmbedding(slow)
    embedding.callback_manager = manager
    nodes = corpus(sizes)
    return Kit(
        "chat" if chat else "own",
        llm,
        embedding,
        index(nodes, embedding, OwnStore(slow), manager),
        index(nodes[::2], embedding, OwnStore(slow), manager),
        lambda top_n: OwnRerank(top_n=top_n, slow=slow),
        ledger,
        manager,
        concurrent=(llm, embedding, OwnStore),
    )


# ------------------------------------------------------------ on a pool


def bound_kit(machine: Machine, sizes: Sizes, manager: CallbackManager | None = None) -> Kit:
    """The user's own models, and a pool of fakes that are like them; close it. The store stays the user's own."""
    own = own_kit(machine, sizes, manager)
    pool = EnginePool.local(engines=fakes(machine, sizes, own.ledger)).start()
    return replace(own, name="bound", pool=pool, bind=((own.llm, "llm"), (own.embedding, "embedder")))


def pool_kit(machine: Machine, sizes: Sizes, manager: CallbackManager | None = None) -> Kit:
    """Pool-backed objects on fake engines; close its pool."""
    from teola_plugin.adapters.llamaindex import TeolaEmbedding, TeolaLLM, TeolaRerank, TeolaVectorStore

    manager = manager or CallbackManager([])
    ledger = Ledger()
    pool = EnginePool.local(engines=fakes(machine, sizes, ledger)).start()
    llm = TeolaLLM(pool=pool, max_tokens=512, callback_manager=manager)
    embedding = TeolaEmbedding(pool=pool, callback_manager=manager)
    nodes = corpus(sizes)

    def store(collection: str) -> Any:
        return TeolaVectorStore(pool=pool, collection=collection)

    return Kit(
        "pool",
        llm,
        embedding,
        index(nodes, embedding, store("reports"), manager),
        index(nodes[::2], embedding, store("notes"), manager),
        lambda top_n: TeolaRerank(pool=pool, top_n=top_n),
        ledger,
        manager,
        pool,
    )


def fakes(machine: Machine, sizes: Sizes, ledger: Ledger) -> list[Any]:
    """Engines that say what the own models say, and keep what reaches them."""

    def said(prompt: Prompt, sampling: Sampling) -> str:
        ledger.asked(prompt.flat())
        return answer(prompt.flat(), sizes.answer)

    faults = Faults(fail_on=lambda request: _breaks(ledger, request), retryable=False)
    return [
        FakeLLM("llm", machine["llm"], said, faults=faults),
        RecordingEmbedder(machine["embedder"], ledger, faults),
        FakeReranker("reranker", machine["reranker"]),
        FakeStore("store", machine["store"], faults=faults),
    ]


class RecordingEmbedder(FakeEmbedder):
    def __init__(self, profile: EngineProfile, ledger: Ledger, faults: Faults) -> None:
        super().__init__("embedder", profile, faults=faults)
        self._ledger = ledger

    def _value(self, request: Request) -> tuple[float, ...]:
        payload: EmbedText = request.payload
        self._ledger.embedded(payload.role, [payload.text])
        return super()._value(request)


def _breaks(ledger: Ledger, request: Request) -> bool:
    payload = request.payload
    if isinstance(payload, Generate):
        return payload.prompt.flat() == ledger.broken_prompt
    if isinstance(payload, EmbedText):
        return payload.text == ledger.broken_text
    if isinstance(payload, SearchVector):
        return ledger.broken_store
    return False
