"""Apps that the settings of test servers name. The functions that have a parameter get the pool."""

from __future__ import annotations

import asyncio
import json
from typing import Any

from typing_extensions import TypedDict

from teola_plugin.pool import EnginePool


def chain(pool: EnginePool) -> Any:
    """Return a chain that writes a title and then a poem about it. Its input and its output are texts."""
    from langchain_core.output_parsers import StrOutputParser
    from langchain_core.prompts import ChatPromptTemplate

    from teola_plugin.langchain import ChatTeola

    llm = ChatTeola(pool=pool, max_tokens=12)
    title = ChatPromptTemplate.from_template("A title about {topic}") | llm | StrOutputParser()
    poem = ChatPromptTemplate.from_template("A poem on {topic}, called {title}") | llm | StrOutputParser()
    return {"title": title, "topic": lambda inputs: inputs["topic"]} | poem


def two_keys(pool: EnginePool) -> Any:
    from langchain_core.prompts import ChatPromptTemplate

    from teola_plugin.langchain import ChatTeola

    return ChatPromptTemplate.from_template("{one} and {other}") | ChatTeola(pool=pool, max_tokens=8)


def model(pool: EnginePool) -> Any:
    from teola_plugin.langchain import ChatTeola

    return ChatTeola(pool=pool, max_tokens=8)


def graph(pool: EnginePool) -> Any:
    """Return a graph of two steps: notes that are not the answer, then the answer."""
    from langgraph.graph import END, START, MessagesState, StateGraph

    from teola_plugin.langchain import ChatTeola

    llm = ChatTeola(pool=pool, max_tokens=8)

    async def think(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await llm.ainvoke([*state["messages"], ("user", "think")])]}

    async def answer(state: MessagesState) -> dict[str, Any]:
        return {"messages": [await llm.ainvoke([*state["messages"], ("user", "answer")])]}

    builder = StateGraph(MessagesState)
    builder.add_node("think", think)
    builder.add_node("answer", answer)
    builder.add_edge(START, "think")
    builder.add_edge("think", "answer")
    builder.add_edge("answer", END)
    return builder.compile()


def query_engine(pool: EnginePool) -> Any:
    from llama_index.core import Document, VectorStoreIndex

    from teola_plugin.llamaindex import TeolaEmbedding, TeolaLLM

    documents = [Document(text="Cows eat grass."), Document(text="Sheep eat clover.")]
    index = VectorStoreIndex.from_documents(documents, embed_model=TeolaEmbedding(pool=pool))
    return index.as_query_engine(llm=TeolaLLM(pool=pool, max_tokens=8), similarity_top_k=1)


def streaming_engine(pool: EnginePool) -> Any:
    from llama_index.core import Document, VectorStoreIndex

    from teola_plugin.llamaindex import TeolaEmbedding, TeolaLLM

    index = VectorStoreIndex.from_documents([Document(text="Cows eat grass.")], embed_model=TeolaEmbedding(pool=pool))
    return index.as_query_engine(llm=TeolaLLM(pool=pool, max_tokens=8), streaming=True)


def chat_engine(pool: EnginePool) -> Any:
    from llama_index.core.chat_engine import SimpleChatEngine
    from llama_index.core.memory import ChatMemoryBuffer

    from teola_plugin.llamaindex import TeolaLLM

    return SimpleChatEngine.from_defaults(
        llm=TeolaLLM(pool=pool, max_tokens=8), memory=ChatMemoryBuffer.from_defaults()
    )


def workflow(pool: EnginePool) -> Any:
    from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step

    from teola_plugin.llamaindex import TeolaLLM

    llm = TeolaLLM(pool=pool, max_tokens=8)

    class Writing(Workflow):
        @step
        async def write(self, event: StartEvent) -> StopEvent:
            return StopEvent(result=str(await llm.acomplete(event.input)))

    return Writing(timeout=20)


def template() -> Any:
    """Return a workflow of this package: a title, then a poem."""
    from teola_plugin.workflow import Generation, Workflow

    return Workflow(
        "poems",
        Generation("title", "A title about {topic}", max_tokens=8) >> Generation("poem", "On {title}", max_tokens=12),
    )


def failing() -> Any:
    from langchain_core.runnables import RunnableLambda

    def fails(inputs: Any) -> Any:
        raise ZeroDivisionError(f"secret of {inputs}")

    return RunnableLambda(fails)


def waiting() -> Any:
    """Return a Runnable that never answers by itself."""
    from langchain_core.runnables import RunnableLambda

    async def wait(inputs: Any) -> str:
        await asyncio.sleep(60)
        return "late"

    def never(inputs: Any) -> str:
        raise NotImplementedError

    return RunnableLambda(never, afunc=wait)


NO_APP = 7


def reads_documents() -> Any:
    """Return a workflow that indexes the documents sent with its query."""
    from teola_plugin.workflow import PER_QUERY, Indexing, Searching, Synthesis, Workflow

    return Workflow(
        "reading",
        Indexing("index", chunk_size=20, chunk_overlap=2, collection=PER_QUERY)
        >> Searching("found", k=2, collection=PER_QUERY)
        >> Synthesis("answer", context="found", mode="compact", max_tokens=60),
    )


def joins_documents() -> Any:
    """Return a Runnable that takes texts together with a question."""
    from langchain_core.runnables import RunnableLambda

    def joined(inputs: Any) -> str:
        return f"{inputs['question']}: {'|'.join(inputs['documents'])}"

    class Question(TypedDict):
        question: str
        documents: list[str]

    return RunnableLambda(joined).with_types(input_type=Question)


def keeps_documents() -> Any:
    """Return a workflow that indexes the documents sent with its query in a collection that later queries search."""
    from teola_plugin.workflow import Indexing, Searching, Synthesis, Workflow

    return Workflow(
        "notes",
        Indexing("index", chunk_size=40, chunk_overlap=2, collection="notes")
        >> Searching("found", k=8, collection="notes")
        >> Synthesis("answer", context="found", mode="compact", max_tokens=200),
    )


def remembers(pool: EnginePool) -> Any:
    """Return a graph that answers with all messages of its thread."""
    from langchain_core.messages import AIMessage
    from langgraph.checkpoint.memory import InMemorySaver
    from langgraph.graph import END, START, MessagesState, StateGraph

    async def answer(state: MessagesState) -> dict[str, Any]:
        texts = [str(one.content) for one in state["messages"] if one.type == "human"]
        return {"messages": [AIMessage(" ".join(texts))]}

    builder = StateGraph(MessagesState)
    builder.add_node("answer", answer)
    builder.add_edge(START, "answer")
    builder.add_edge("answer", END)
    return builder.compile(checkpointer=InMemorySaver())


VALUES: dict[str, Any] = {
    "dictionary": {"b": [1, 2], "a": {"c": None}},
    "answer": {"output": "an answer", "more": 1},
    "list": ["a", 1, None, [True]],
    "empty list": [],
    "number": 7,
    "zero": 0,
    "fraction": 0.5,
    "not a number": float("nan"),
    "true": True,
    "false": False,
    "none": None,
    "text": "  a text\n",
    "empty text": "",
    "half a character": "a\ud800b",
}
"""Values that apps may return, by the name that the query gives."""


def value_runnable() -> Any:
    from langchain_core.runnables import RunnableLambda

    return RunnableLambda(lambda text: VALUES[text])


def parallel_runnable() -> Any:
    """Return a RunnableParallel whose parts end in another order than they are listed."""
    from langchain_core.runnables import RunnableLambda, RunnableParallel

    async def late(text: str) -> str:
        await asyncio.sleep(0.02)
        return text

    def never(text: str) -> str:
        raise NotImplementedError

    return RunnableParallel(late=RunnableLambda(never, afunc=late), early=RunnableLambda(lambda text: [text]))


def json_runnable() -> Any:
    """Return a parser whose chunks repeat all that was parsed so far, after a model that echoes its input."""
    from langchain_core.messages import AIMessageChunk
    from langchain_core.output_parsers import JsonOutputParser
    from langchain_core.runnables import RunnableGenerator

    async def write(texts: Any) -> Any:
        async for text in texts:
            for letter in text:
                yield AIMessageChunk(letter)

    return RunnableGenerator(write) | JsonOutputParser()


def pieces_runnable() -> Any:
    """Return a Runnable that streams lists which add up."""
    from langchain_core.runnables import RunnableGenerator

    async def pieces(texts: Any) -> Any:
        async for text in texts:
            for letter in text:
                yield [letter]

    return RunnableGenerator(pieces)


def silent_runnable() -> Any:
    """Return a Runnable that streams nothing."""
    from langchain_core.runnables import RunnableGenerator

    async def silent(texts: Any) -> Any:
        async for _ in texts:
            if False:
                yield

    return RunnableGenerator(silent)


def state_graph() -> Any:
    """Return a graph whose state has no messages."""
    from langgraph.graph import END, START, StateGraph

    class State(TypedDict):
        question: str
        found: Any

    def look(state: State) -> dict[str, Any]:
        return {"found": VALUES[state["question"]]}

    builder = StateGraph(State)
    builder.add_node("look", look)
    builder.add_edge(START, "look")
    builder.add_edge("look", END)
    return builder.compile()


def value_workflow() -> Any:
    from llama_index.core.workflow import StartEvent, StopEvent, Workflow, step

    class Looking(Workflow):
        @step
        async def look(self, event: StartEvent) -> StopEvent:
            return StopEvent(result=VALUES[event.input])

    return Looking(timeout=20)


def listing_template() -> Any:
    """Return a workflow of this package whose answer is a list."""
    from teola_plugin.workflow import QueryExpansion, Workflow

    return Workflow("listing", QueryExpansion("queries", n=2))


def echoing_graph() -> Any:
    """Return a graph that answers with the type, text and tool calls of each message it received."""
    from langgraph.graph import END, START, MessagesState, StateGraph

    def echo(state: MessagesState) -> dict[str, Any]:
        messages = [
            [one.type, one.text, one.name, getattr(one, "tool_call_id", None), getattr(one, "tool_calls", None)]
            for one in state["messages"]
        ]
        return {"messages": [("ai", json.dumps(messages))]}

    builder = StateGraph(MessagesState)
    builder.add_node("echo", echo)
    builder.add_edge(START, "echo")
    builder.add_edge("echo", END)
    return builder.compile()
