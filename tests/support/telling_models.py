"""Apps with models of the user's own that report token usage, for tests of the usage that a server reports."""

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
"""Tokens of every call: in the prompt, of these found in a cache, and in the answer."""


def took() -> UsageMetadata:
    """Return the usage of a call."""
    prompt, cached, answer = TOOK
    return UsageMetadata(
        input_tokens=prompt,
        output_tokens=answer,
        total_tokens=prompt + answer,
        input_token_details=InputTokenDetails(cache_read=cached),
    )


class Telling(BaseChatModel):
    """A chat model that answers with its name and reports its usage, unless `tells` is False."""

    says: str = "own"
    tells: bool = True

    @property
    def _llm_type(self) -> str:
        return "telling"

    def _generate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        message = AIMessage(content=self.says, usage_metadata=took() if self.tells else None)
        return ChatResult(generations=[ChatGeneration(message=message)])


class Streaming(Telling):
    """A `Telling` that streams. Its last chunk reports the usage."""

    def _stream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> Iterator[ChatGenerationChunk]:
        yield ChatGenerationChunk(message=AIMessageChunk(content=self.says))
        last = AIMessageChunk(content="", usage_metadata=took() if self.tells else None)
        yield ChatGenerationChunk(message=last)


class Passing(Telling):
    """A `Telling` that calls another model and passes on the usage which that reports."""

    inner: Any

    async def _agenerate(self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any) -> ChatResult:
        return ChatResult(generations=[ChatGeneration(message=await self.inner.ainvoke(messages))])

    async def _astream(
        self, messages: Any, stop: Any = None, run_manager: Any = None, **kwargs: Any
    ) -> AsyncIterator[ChatGenerationChunk]:
        message = (await self._agenerate(messages, stop, run_manager)).generations[0].message
        chunk = AIMessageChunk(content=message.content, usage_metadata=message.usage_metadata)  # type: ignore[attr-defined]
        yield ChatGenerationChunk(message=chunk)


def _asks(text: str, model: Any) -> Any:
    return ChatPromptTemplate.from_template(text) | model | StrOutputParser()


def two_own(pool: EnginePool) -> Any:
    """Return a chain of two prefetched calls of the user's own models, and an answer by a model of the pool."""
    first, second = _asks("One of {topic}", Telling(says="one")), _asks("Two of {topic}", Streaming(says="two"))
    return {"one": first, "two": second} | _asks("{one} and {two}", ChatTeola(pool=pool, max_tokens=6))


def streams_own() -> Any:
    """Return a chain whose answer is streamed by the user's own model."""
    return _asks("On {topic}", Streaming())


def silent() -> Any:
    """Return a chain whose model reports no usage."""
    return _asks("On {topic}", Streaming(tells=False))


def passes_on(pool: EnginePool) -> Any:
    """Return a chain whose model calls a model of the pool in its own code."""
    return _asks("On {topic}", Passing(inner=ChatTeola(pool=pool, max_tokens=6)))


def passes_on_own() -> Any:
    """Return a chain whose model calls another model of the user's own."""
    return _asks("On {topic}", Passing(inner=Telling()))


def fails_first() -> Any:
    """Return a chain whose first model fails, and whose fallback answers."""

    class Broken(Telling):
        def _generate(self, *args: Any, **kwargs: Any) -> ChatResult:
            raise ValueError("broken")

    return _asks("On {topic}", Broken().with_fallbacks([Telling()]))


def two_prompts() -> Any:
    """Return a Runnable that sends two prompts to its model in one call."""
    from langchain_core.messages import HumanMessage
    from langchain_core.runnables import RunnableLambda

    async def both(text: str) -> str:
        result = await Telling().agenerate([[HumanMessage(text)], [HumanMessage(text)]])
        return " ".join(one[0].text for one in result.generations)

    def never(text: str) -> str:
        raise NotImplementedError

    return RunnableLambda(never, afunc=both)


def in_a_graph(pool: EnginePool) -> Any:
    """Return a graph whose nodes call the user's own model on a thread and on the loop, then a model of the pool."""
    from langgraph.graph import END, START, MessagesState, StateGraph

    own_model, pool_model = Telling(), ChatTeola(pool=pool, max_tokens=6)

    def thread(state: MessagesState) -> dict[str, Any]:
        return {"messages": [own_model.invoke(state["messages"])]}

    async def loop(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await own_model.ainvoke(state["messages"])]}

    async def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await pool_model.ainvoke(state["messages"])]}

    builder = StateGraph(MessagesState)
    before = START
    for name, node in {"thread": thread, "loop": loop, "answer": answer}.items():
        builder.add_node(name, node)
        builder.add_edge(before, name)
        before = name
    builder.add_edge(before, END)
    return builder.compile()
