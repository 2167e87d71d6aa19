"""A RAG agent of `create_agent`, accelerated by one line. It stays a graph: streams, checkpoints, `get_state`.

While the model still writes, what it has asked for already is looked up: by engines of the pool, and by tools that are
declared to change nothing.

    python examples/09_langgraph_agent.py

prints, with fake engines::

    plain        2.44 s
    accelerated  1.95 s
    same messages: True
    stays a CompiledStateGraph: True
    streamed:    ['model', 'tools', 'tools', 'model']
"""

import json
import time
from typing import Any

from langchain.agents import create_agent
from langchain_core.tools import create_retriever_tool, tool
from langgraph.graph.state import CompiledStateGraph

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeStore
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.langchain import ChatTeola, TeolaEmbeddings, TeolaVectorStore, read_only


def says(prompt: Any, sampling: Any) -> str:
    """The fake model: two calls of tools, then an answer."""
    if any(message.role == "tool" for message in prompt.messages):
        return "Lambs eat oats and ivy. It rains, so they eat them under a roof."
    weather = {"name": "weather", "arguments": {"place": "the farm"}}
    search = {"name": "search_farm", "arguments": {"query": "what lambs eat when it rains"}}
    return "\n".join(f"<tool_call>{json.dumps(call)}</tool_call>" for call in (weather, search))


@read_only
@tool
def weather(place: str) -> str:
    """The weather at a place."""
    time.sleep(0.5)
    return f"It rains at {place}."


def agent(pool: EnginePool) -> CompiledStateGraph[Any]:
    """Nothing in here knows of `accelerate`."""
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="farm")
    store.add_texts(["Oats are sown in spring.", "Ivy climbs walls.", "Lambs eat oats and ivy."])
    search = create_retriever_tool(store.as_retriever(), "search_farm", "Search what is known of the farm.")
    return create_agent(ChatTeola(pool=pool), [weather, search], system_prompt="Look things up before you answer.")


def timed(label: str, graph: CompiledStateGraph[Any], given: dict[str, Any]) -> list[tuple[str, str]]:
    begun = time.perf_counter()
    messages = graph.invoke(given)["messages"]
    print(f"{label:12} {time.perf_counter() - begun:.2f} s")
    return [(message.type, message.text) for message in messages]


machine = rtx3090()
llm, embedder = FakeLLM("llm", machine["llm"], says), FakeEmbedder("embedder", machine["embedder"])
with EnginePool.local([llm, embedder, FakeStore("store", machine["store"])]) as pool:
    graph = agent(pool)
    fast = accelerate(graph)  # the one line
    given = {"messages": [("user", "What do lambs eat today?")]}
    for one in (graph, fast):
        one.invoke({"messages": [("user", "warm up")]})
    pool.reset()
    plain = timed("plain", graph, given)
    pool.reset()
    print("same messages:", timed("accelerated", fast, given) == plain)
    print("stays a CompiledStateGraph:", isinstance(fast, CompiledStateGraph))
    print("streamed:   ", [node for update in fast.stream(given, stream_mode="updates") for node in update])
