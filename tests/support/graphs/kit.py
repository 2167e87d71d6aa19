"""The parts of graphs: objects on a pool of fake engines, stores, and models of the user's own."""

from __future__ import annotations

import json
import re
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.retrievers import BaseRetriever
from langchain_core.runnables import Runnable
from langgraph.cache.memory import InMemoryCache
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.config import get_config
from langgraph.store.memory import InMemoryStore

from support.request_counts import POISON
from teola_plugin.engines import profiles
from teola_plugin.engines.fake import FakeLLM, fake_engines
from teola_plugin.engines.fake.base import NO_FAULTS, FakeEngine, Faults
from teola_plugin.engines.fake.llm import default_answer
from teola_plugin.langchain import ChatTeola, TeolaEmbeddings, TeolaVectorStore
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Prompt, Sampling

WORDS = ("lambda", "class", "import", "with", "raise")
TEXTS = [f"passage {i} about {word} — {word} again" for i, word in enumerate(WORDS)]

_CALL = re.compile(r"<tool_call>.*?</tool_call>", re.DOTALL)


class Stop(BaseException):
    """An error that user code raises to end the program. It is no `Exception`, so that nothing handles it."""


def called(name: str, **arguments: Any) -> str:
    """Return a text that makes the model call this tool next, if it stands in a question or in a tool's result."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def obedient(prompt: Prompt, sampling: Sampling) -> str:
    """Return the tool calls that the newest message contains, or the usual answer of the fake LLM."""
    newest = prompt.messages[-1].content if prompt.messages else prompt.text
    if POISON in newest:
        raise ValueError("poisoned")
    if prompt.tools and (calls := _CALL.findall(newest)):
        return "\n".join(calls)
    schema = json.loads(sampling.json_schema or "{}")
    if "anyOf" in schema:  # one of several tools must be called: the last of them
        return default_answer(prompt, Sampling(json_schema=json.dumps(schema["anyOf"][-1])))
    return default_answer(prompt, sampling)


def engines(pace: float = 0.0) -> list[FakeEngine]:
    """Return fake engines that take `pace` times as long as those of an RTX 3090, or no time. The LLM is `obedient`."""
    machine, faults = (profiles.rtx3090(), Faults(slow=pace)) if pace else (profiles.noop(), NO_FAULTS)
    made = fake_engines(machine, **dict.fromkeys(machine, faults))
    llm = FakeLLM("llm", machine["llm"], obedient, faults=faults)
    return [llm if engine.name == "llm" else engine for engine in made]


class OwnChat(BaseChatModel):
    """A chat model of the user's own, outside the pool, that makes tool calls like `obedient`."""

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        newest = str(messages[-1].content)
        calls = [json.loads(call[11:-12]) for call in _CALL.findall(newest)] if kwargs.get("tools") else []
        made = [{"name": c["name"], "args": c["arguments"], "id": f"call_{i}"} for i, c in enumerate(calls)]
        message = AIMessage("" if made else f"own({newest})", tool_calls=made)
        return ChatResult(generations=[ChatGeneration(message=message)])

    def bind_tools(self, tools: Sequence[Any], **kwargs: Any) -> Runnable[Any, Any]:
        return self.bind(tools=[getattr(tool, "name", str(tool)) for tool in tools], **kwargs)

    @property
    def _llm_type(self) -> str:
        return "own"


@dataclass
class Kit:
    """The parts for one run of a graph. Only the pool is shared between runs."""

    pool: EnginePool
    fast: Callable[[Any], Any] = lambda made: made
    """Accelerates a part of the graph: `accelerate` for the accelerated side, and no change for the original."""
    saver: InMemorySaver = field(default_factory=InMemorySaver)
    cache: InMemoryCache[Any] = field(default_factory=InMemoryCache)
    side_effects: Counter[str] = field(default_factory=Counter)
    """Side effects of user code, and how often each happened."""

    def __post_init__(self) -> None:
        self._lock = threading.Lock()
        self.llm = ChatTeola(pool=self.pool, max_tokens=12)
        self.streaming = ChatTeola(pool=self.pool, max_tokens=12, streaming=True)
        self.agent = ChatTeola(pool=self.pool, max_tokens=400)
        self.own = OwnChat()
        self.embeddings = TeolaEmbeddings(pool=self.pool)
        self.memory = InMemoryStore(index={"embed": self.embeddings, "dims": 32})

    @property
    def documents(self) -> TeolaVectorStore:
        return TeolaVectorStore(pool=self.pool, embedding=self.embeddings, collection="docs")

    @property
    def retriever(self) -> BaseRetriever:
        return self.documents.as_retriever(search_kwargs={"k": 2})

    def note(self, what: str) -> int:
        """Count a side effect. Return how often it was counted before."""
        with self._lock:
            self.side_effects[what] += 1
            return self.side_effects[what] - 1

    def before(self, what: str) -> int:
        """Count a side effect of this thread of conversation. Return how often it was counted before."""
        return self.note(f"{what} on {get_config()['configurable'].get('thread_id')}")


def joined(documents: Sequence[Any]) -> str:
    """Return the contents of the documents, one on each line."""
    return "\n".join(document.page_content for document in documents)
