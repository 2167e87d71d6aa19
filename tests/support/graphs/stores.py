"""Graphs with a long-term store, a runtime and its context."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from langchain_core.runnables import RunnableConfig
from langgraph.config import get_config, get_store
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.runtime import Runtime, get_runtime
from langgraph.store.base import BaseStore

from support.graphs.case import Turn, case
from support.graphs.kit import Kit


@case({"messages": "I like lambda"}, {"messages": "I like classes"}, {"messages": "what do I like?"})
def remembers_by_meaning(kit: Kit) -> Any:
    """Build a graph that searches the store by the pool's embeddings, before and after it writes to it."""
    llm = kit.llm

    def remember(state: MessagesState, store: BaseStore, config: RunnableConfig) -> dict[str, Any]:
        text, facts = state["messages"][-1].text, ("facts", config["configurable"]["thread_id"])
        known = [item.value["text"] for item in store.search(facts, query=text, limit=2)]
        store.put(facts, f"fact{len(text)}", {"text": text})
        after = store.search(facts, query=text, limit=1)
        return {"messages": llm.invoke(f"{known} {after[0].value} {text}")}

    graph = StateGraph(MessagesState)
    graph.add_node(remember)
    graph.add_edge(START, "remember")
    return graph.compile(checkpointer=kit.saver, store=kit.memory)


@dataclass
class Context:
    user: str
    language: str = "English"


ANN = {"context": Context("Ann")}
BOB = {"context": {"user": "Bob", "language": "French"}}


@case(Turn({"messages": "hello"}, options=ANN), Turn({"messages": "hello"}, options=BOB), Turn({"messages": "nobody"}))
def runtime_context(kit: Kit) -> Any:
    """Build a graph that reads its context from the runtime argument, from functions and from the config."""
    llm = kit.llm

    def greet(state: MessagesState, runtime: Runtime[Context], config: RunnableConfig) -> dict[str, Any]:
        user = runtime.context.user if runtime.context else "nobody"
        assert runtime.store is get_store()
        assert runtime.store is not None
        runtime.store.put(("users",), user, {"text": user})
        runtime.stream_writer({"user": user})
        return {"messages": llm.invoke(f"Greet {user}, thread {config['configurable']['thread_id'][:4]}")}

    def again(state: MessagesState) -> dict[str, Any]:
        context = get_runtime(Context).context
        step = get_config()["metadata"]["langgraph_step"]
        known = get_store().get(("users",), context.user if context else "nobody")
        return {"messages": llm.invoke(f"{context} {step} {known.value if known else None}")}

    graph = StateGraph(MessagesState, context_schema=Context)
    graph.add_sequence([greet, again])
    graph.add_edge(START, "greet")
    return graph.compile(checkpointer=kit.saver, store=kit.memory)


@case({"messages": "who am I?"})
def execution_info(kit: Kit) -> Any:
    """Build a graph with a node that reads the execution info of its run."""
    llm = kit.llm

    def tell(state: MessagesState, runtime: Runtime[Any]) -> dict[str, Any]:
        info = runtime.execution_info
        assert info is not None
        kit.note(
            f"{info.node_attempt} {info.checkpoint_ns.split(':')[0]} {info.thread_id[:4] if info.thread_id else None}"
        )
        return {"messages": llm.invoke(f"attempt {info.node_attempt}")}

    graph = StateGraph(MessagesState)
    graph.add_node(tell)
    graph.add_edge(START, "tell")
    return graph.compile(checkpointer=kit.saver)
