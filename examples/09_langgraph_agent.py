"""A RAG agent of `create_agent`, accelerated by one line. It stays a graph: streams, checkpoints, `get_state`.

    python examples/09_langgraph_agent.py

prints, with fake engines::

    plain        2.05 s
    accelerated  2.05 s
    same messages: True
    stays a CompiledStateGraph: True
    streamed:    ['model', 'tools', 'model']
"""

import time
from typing import Any

from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.tools import create_retriever_tool
from langgraph.graph.state import CompiledStateGraph

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines.fake import fake_engines
from teola_plugin.engines.profiles import rtx3090
from teola_plugin.langchain import ChatTeola, TeolaEmbeddings, TeolaVectorStore


@wrap_model_call
def look_it_up_first(request: Any, handler: Any) -> Any:
    """The fake model calls a tool where it must, and only there."""
    looked = any(message.type == "tool" for message in request.messages)
    return handler(request.override(tool_choice="none" if looked else "search_farm"))


def agent(pool: EnginePool) -> CompiledStateGraph:
    """Nothing in here knows of `accelerate`."""
    store = TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool), collection="farm")
    store.add_texts(["Oats are sown in spring.", "Ivy climbs walls.", "Lambs eat oats and ivy."])
    search = create_retriever_tool(store.as_retriever(), "search_farm", "Search what is known of the farm.")
    rules = "Answer with the passages that you find, and with nothing else. " * 30
    return create_agent(ChatTeola(pool=pool), [search], system_prompt=rules, middleware=[look_it_up_first])


def timed(label: str, graph: CompiledStateGraph, given: dict[str, Any]) -> list[tuple[str, str]]:
    begun = time.perf_counter()
    messages = graph.invoke(given)["messages"]
    print(f"{label:12} {time.perf_counter() - begun:.2f} s")
    return [(message.type, message.text) for message in messages]


with EnginePool.local(fake_engines(rtx3090())) as pool:
    graph = agent(pool)
    fast = accelerate(graph)  # the one line
    given = {"messages": [("user", "What do lambs eat?")]}
    for one in (graph, fast):
        one.invoke({"messages": [("user", "warm up")]})  # a first call imports, and reads source
    pool.reset()
    plain = timed("plain", graph, given)
    pool.reset()
    print("same messages:", timed("accelerated", fast, given) == plain)
    print("stays a CompiledStateGraph:", isinstance(fast, CompiledStateGraph))
    print("streamed:   ", [node for update in fast.stream(given, stream_mode="updates") for node in update])
