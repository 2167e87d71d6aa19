"""Apps with models of the user's own, outside the pool, that tell what they took; for tests of what a server tells."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, AIMessageChunk
from langchain_core.messages.ai import InputTokenDetails, UsageMetadata
from langchain_core.output_parsers import StrOutputParser
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.prompts import ChatPromptTemplate

from teola_plugin.langchain import ChatTeola
from teola_plugin.pool import EnginePool

TOOK = (100, 40, 10)
"""Tokens of every call: of the prompt, of those found in a cache, of the answer."""


def took() -> UsageMetadata:
    prompt, cached, answer = TOOK
    return UsageMetadata(
        input_tokens=prompt,
        output_tokens=answer,
        total_tokens=prompt + answer,
        input_token_details=InputTokenDetails(cache_read=cached),
    )


class Telling(BaseChatModel):
    """Says its name; tells what it took, or nothing."""

    says: str = "own"
    tells: bool = True

    @property
    def _llm_type(self) -> str:
        return "telling"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        message = AIMessage(content=self.says, usage_metadata=took() if self.tells else None)
        return ChatResult(generations=[ChatGeneration(message=message)])


class Streaming(Telling):
    """The same in chunks, of which the last one tells."""

    def _stream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        yield ChatGenerationChunk(message=AIMessageChunk(content=self.says))
        last = AIMessageChunk(content="", usage_metadata=took() if self.tells else None)
        yield ChatGenerationChunk(message=last)


class Passing(Telling):
    """Asks another model, and repeats what that tells."""

    inner: Any

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=await self.inner.ainvoke(messages))])

    async def _astream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        found = (await self._agenerate(messages, stop, run_manager)).generations[0].message
        chunk = AIMessageChunk(content=found.content, usage_metadata=found.usage_metadata)  # type: ignore[attr-defined]
        yield ChatGenerationChunk(message=chunk)


def _asks(text: str, model: Any) -> Any:
    return ChatPromptTemplate.from_template(text) | model | StrOutputParser()


def two_own(pool: EnginePool) -> Any:
    """Two calls of models of one's own, side by side and made ahead; an answer of the pool's."""
    first, second = _asks("One of {topic}", Telling(says="one")), _asks("Two of {topic}", Streaming(says="two"))
    return {"one": first, "two": second} | _asks("{one} and {two}", ChatTeola(pool=pool, max_tokens=6))


def streams_own() -> Any:
    """Its answer is its own model's."""
    return _asks("On {topic}", Streaming())


def silent() -> Any:
    return _asks("On {topic}", Streaming(tells=False))


def passes_on(pool: EnginePool) -> Any:
    """A model of one's own whose code asks one of the pool."""
    return _asks("On {topic}", Passing(inner=ChatTeola(pool=pool, max_tokens=6)))


def passes_on_own() -> Any:
    return _asks("On {topic}", Passing(inner=Telling()))


def fails_first() -> Any:
    """A model that breaks, and another in its place."""

    class Broken(Telling):
        def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
            raise ValueError("broken")

    return _asks("On {topic}", Broken().with_fallbacks([Telling()]))


def two_prompts() -> Any:
    """Asks its own model for two prompts in one call."""
    from langchain_core.messages import HumanMessage
    from langchain_core.runnables import RunnableLambda

    async def both(text: str) -> str:
        found = await Telling().agenerate([[HumanMessage(text)], [HumanMessage(text)]])
        return " ".join(one[0].text for one in found.generations)

    def never(text: str) -> str:
        raise NotImplementedError

    return RunnableLambda(never, afunc=both)


def in_a_graph(pool: EnginePool) -> Any:
    """Nodes that ask: one's own model from a thread and on the loop, and the pool's."""
    from langgraph.graph import END, START, MessagesState, StateGraph

    own, ours = Telling(), ChatTeola(pool=pool, max_tokens=6)

    def thread(state: MessagesState) -> dict[str, Any]:
        return {"messages": [own.invoke(state["messages"])]}

    async def loop(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await own.ainvoke(state["messages"])]}

    async def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await ours.ainvoke(state["messages"])]}

    made = StateGraph(MessagesState)
    before = START
    for name, node in {"thread": thread, "loop": loop, "answer": answer}.items():
        made.add_node(name, node)
        made.add_edge(before, name)
        before = name
    made.add_edge(before, END)
    return made.compile()
