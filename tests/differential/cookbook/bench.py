"""The objects from which the cookbooks' chains are made, pool-backed or the user's own, and records of their requests.

Every model is a pure function of its prompt, so the chain or the accelerator causes any difference between two runs.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from langchain_core.documents import BaseDocumentCompressor, Document
from langchain_core.embeddings import Embeddings
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_core.vectorstores import InMemoryVectorStore, VectorStore

from benchmarks.langchain.kits import Keywords, Kit, answer
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.adapters.langchain.embeddings import TeolaEmbeddings
from teola_plugin.adapters.langchain.rerank import TeolaRerank
from teola_plugin.adapters.langchain.vectorstore import TeolaVectorStore
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeReranker, FakeStore, Faults, bag_of_words, embed_words
from teola_plugin.engines.fake.base import NO_FAULTS
from teola_plugin.engines.fake.llm import _json_value
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import EmbedText, Prompt, Request, Sampling

WORDS = ("lambda", "class", "import", "with", "raise", "yield")
TEXTS = [f"passage {i} about {word} and naïve café. It says {word} again, and {word}." for i, word in enumerate(WORDS)]
DOCUMENTS = [Document(t, id=f"d{i}", metadata={"source": f"s{i}.txt", "n": i}) for i, t in enumerate(TEXTS)]


@dataclass
class Ledger:
    """The requests that reached the models since `clear`, and the faults that are set."""

    prompts: list[str] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tools: list[str] = field(default_factory=list)
    broken: str | None = None
    """The model raises on this prompt."""
    lock: threading.Lock = field(default_factory=threading.Lock)

    def clear(self) -> None:
        self.prompts, self.texts, self.tools = [], [], []

    def asked(self, prompt: str) -> None:
        with self.lock:
            self.prompts.append(prompt)
        if prompt == self.broken:
            raise ValueError(f"injected: {hashlib.blake2b(prompt.encode(), digest_size=4).hexdigest()}")

    def embedded(self, role: str, texts: Sequence[str]) -> None:
        with self.lock:
            self.texts += [f"{role}: {text}" for text in texts]

    def used(self, tool: str) -> None:
        with self.lock:
            self.tools.append(tool)

    @property
    def reached(self) -> tuple[Counter[str], Counter[str]]:
        return Counter(self.prompts), Counter(self.texts)


@dataclass(frozen=True)
class Bench:
    """A kit, as the benchmarks' cookbook takes it, and what else chains are made of."""

    kit: Kit
    tooled: BaseChatModel
    """A model that calls tools."""
    embeddings: Embeddings
    ledger: Ledger
    new_store: Callable[[str], VectorStore]

    @property
    def llm(self) -> BaseChatModel:
        return self.kit.chat(9)

    @property
    def retriever(self) -> Any:
        return self.kit.store.as_retriever(search_kwargs={"k": 3})


def says(prompt: str, tokens: int) -> str:
    """Return the answer of the model: as in the benchmarks, and as langchain_classic's prompts demand it."""
    if "YES if the context is relevant" in prompt:
        return "YES" if len(prompt) % 2 else "NO"
    if "Extract any parts" in prompt and len(prompt) % 3 == 0:
        return "NO_OUTPUT"
    if "as JSON with the key" in prompt:
        return json.dumps({"answer": answer(prompt, tokens)})
    return answer(prompt, tokens)


def flat(messages: Sequence[BaseMessage]) -> str:
    return "\n".join(f"{m.type}: {m.content}" for m in messages)


def count(text: str) -> list[int]:
    """Return token ids. Without it, chains that count tokens download a tokenizer."""
    return list(range(len(text) // 4))


# ------------------------------------------------------------ models


class OwnChat(BaseChatModel):
    """A model of the user's own, with code for both paths."""

    tokens: int
    ledger: Any

    @property
    def _llm_type(self) -> str:
        return "own"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        prompt = flat(messages)
        self.ledger.asked(prompt)
        return ChatResult(generations=[ChatGeneration(message=AIMessage(says(prompt, self.tokens)))])

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        return self._generate(messages, stop)


class ToolChat(BaseChatModel):
    """Calls each of its tools once, one after the other, or the one that it must; then it answers.

    It asks the model below, which may be pool-backed: the way of people whose model has no tool calling.
    """

    llm: Any

    @property
    def _llm_type(self) -> str:
        return "tooled"

    def bind_tools(self, tools: Sequence[Any], *, tool_choice: Any = None, **kwargs: Any) -> Any:
        shown = [convert_to_openai_tool(tool) for tool in tools]
        return self.bind(tools=shown, **({"tool_choice": tool_choice} if tool_choice else {}), **kwargs)

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        text = self.llm._generate([HumanMessage(flat(messages))], stop, run_manager).generations[0].text
        return self._reply(messages, text, kwargs)

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        result = await self.llm._agenerate([HumanMessage(flat(messages))], stop, run_manager)
        return self._reply(messages, result.generations[0].text, kwargs)

    def _reply(self, messages: Any, text: str, kwargs: dict[str, Any]) -> ChatResult:
        tools = kwargs.get("tools") or []
        done = sum(isinstance(m, ToolMessage) for m in messages)
        calls = []
        if done < len(tools):
            function = tools[-1 if kwargs.get("tool_choice") else done]["function"]
            given = _json_value(function["parameters"], text)
            calls = [{"name": function["name"], "args": given, "id": f"call-{done}"}]
        return ChatResult(generations=[ChatGeneration(message=AIMessage("" if calls else text, tool_calls=calls))])


class OwnEmbeddings(Embeddings):
    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def embed_documents(self, texts: list[str]) -> list[list[float]]:
        self._ledger.embedded("document", texts)
        return [list(embed_words(text, "document")) for text in texts]

    def embed_query(self, text: str) -> list[float]:
        self._ledger.embedded("query", [text])
        return list(embed_words(text))


class OwnReranker(BaseDocumentCompressor):
    def compress_documents(self, documents: Sequence[Document], query: str, callbacks: Any = None) -> list[Document]:
        query_words = bag_of_words(query)
        return sorted(documents, key=lambda d: -len(query_words.keys() & bag_of_words(d.page_content).keys()))[:2]


# ------------------------------------------------------------ the three


def own_bench(ledger: Ledger | None = None) -> Bench:
    """Return a kit without a pool."""
    ledger = ledger or Ledger()
    embeddings = OwnEmbeddings(ledger)
    uploads = InMemoryVectorStore(embeddings)
    kit = Kit(
        "own",
        lambda tokens: OwnChat(tokens=tokens, ledger=ledger, custom_get_token_ids=count),
        _filled(InMemoryVectorStore(embeddings)),
        uploads,
        Keywords(documents=DOCUMENTS, seconds=0, k=2),
        OwnReranker(),
        None,
        uploads.store.clear,
        Keywords(documents=DOCUMENTS[3:], seconds=0, k=1),
    )
    made = ToolChat(llm=OwnChat(tokens=9, ledger=ledger))
    return Bench(kit, made, embeddings, ledger, lambda name: InMemoryVectorStore(embeddings))


def pool_bench(ledger: Ledger | None = None) -> Bench:
    """Return a kit on one pool of fake engines, except the keyword search. The caller closes the pool."""
    ledger = ledger or Ledger()

    def answer(prompt: Prompt, sampling: Sampling) -> str:
        text = "\n".join(f"{m.role}: {m.content}" for m in prompt.messages)
        with ledger.lock:
            ledger.prompts.append(text)
        return (
            json.dumps(_json_value(json.loads(sampling.json_schema), text))
            if sampling.json_schema
            else says(text, sampling.max_tokens)
        )

    engines = [FakeLLM("llm", answer=answer), RecordingEmbedder(ledger), FakeReranker(), FakeStore()]
    pool = EnginePool.local(engines=engines).start()
    engines[0].faults = Faults(fail_on=lambda request: _breaks(ledger, request), retryable=False)
    embeddings = TeolaEmbeddings(pool=pool)

    def new_store(name: str) -> TeolaVectorStore:
        pool.admin("store", "delete_collection", name).result(5)
        return TeolaVectorStore(pool=pool, embedding=embeddings, collection=name)

    def fresh() -> None:
        pool.reset()
        pool.admin("store", "delete_collection", "uploads").result(5)

    kit = Kit(
        "pool",
        lambda tokens: ChatTeola(pool=pool, max_tokens=tokens, custom_get_token_ids=count),
        _filled(new_store("docs")),
        new_store("uploads"),
        Keywords(documents=DOCUMENTS, seconds=0, k=2),
        TeolaRerank(pool=pool, top_n=2),
        pool,
        fresh,
        Keywords(documents=DOCUMENTS[3:], seconds=0, k=1),
    )
    return Bench(kit, ToolChat(llm=ChatTeola(pool=pool, max_tokens=9)), embeddings, ledger, new_store)


def mixed_bench() -> Bench:
    """Return a kit with a model of a pool and own objects otherwise. The caller closes the pool."""
    ledger = Ledger()
    pool, own = pool_bench(ledger), own_bench(ledger)

    def fresh() -> None:
        pool.kit.fresh()
        own.kit.fresh()

    kit = replace(own.kit, name="mixed", chat=pool.kit.chat, pool=pool.kit.pool, fresh=fresh)
    return replace(own, kit=kit, tooled=pool.tooled)


class RecordingEmbedder(FakeEmbedder):
    def __init__(self, ledger: Ledger) -> None:
        super().__init__(faults=NO_FAULTS)
        self._ledger = ledger

    def _value(self, request: Request) -> tuple[float, ...]:
        payload: EmbedText = request.payload
        self._ledger.embedded(payload.role, [payload.text])
        return super()._value(request)


def _breaks(ledger: Ledger, request: Request) -> bool:
    prompt = getattr(request.payload, "prompt", None)
    if ledger.broken is None or prompt is None or not hasattr(request.payload, "sampling"):
        return False
    return "\n".join(f"{m.role}: {m.content}" for m in prompt.messages) == ledger.broken


def _filled(store: VectorStore) -> VectorStore:
    store.add_documents(DOCUMENTS)
    return store
