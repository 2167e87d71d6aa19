"""Tests of `accelerate(graph)` without `pool=`: the pools that nodes use are found without running anything."""

from __future__ import annotations

import operator
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import wrap_model_call
from langchain_core.language_models import FakeListChatModel
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_core.tools import StructuredTool, tool
from langgraph.func import entrypoint
from langgraph.graph import END, START, StateGraph
from langgraph.prebuilt import ToolNode

from teola_plugin import EnginePool, RegistrationError, accelerate
from teola_plugin.adapters.langchain.pools import the_pool_of
from teola_plugin.adapters.langgraph.pools import pool_of_graph, pools_by_node
from teola_plugin.adapters.reachable import MAX_OBJECTS
from teola_plugin.engines.fake import fake_engines
from teola_plugin.langchain import ChatTeola, TeolaEmbeddings, TeolaVectorStore


class State(TypedDict, total=False):
    said: Annotated[list[str], operator.add]


@pytest.fixture(scope="module")
def pool() -> Iterator[EnginePool]:
    with EnginePool.local(fake_engines()) as made:
        yield made


@pytest.fixture(scope="module")
def other() -> Iterator[EnginePool]:
    with EnginePool.local(fake_engines()) as made:
        yield made


def graph(**nodes: Any) -> Any:
    made = StateGraph(State)
    for name, node in nodes.items():
        made.add_node(name, node)
        made.add_edge(START, name)
    return made.compile()


# ------------------------------------------------------------ where nodes hold them

_global: dict[str, Any] = {}
_llm: Any = None


def by_global(state: State) -> State:
    return {"said": [_llm.invoke("x").content]}


def by_helper(state: State) -> State:
    return {"said": [_helper()]}


def _helper() -> str:
    return str(by_global({}))


def in_a_table(state: State) -> State:
    return {"said": [_global["models"][0].invoke("x").content]}


class Holder:
    shared: Any = None

    def __init__(self, model: Any) -> None:
        self.inner = {"a": [model]}

    def node(self, state: State) -> State:
        return {"said": [self.inner["a"][0].invoke("x").content]}

    def of_the_class(self, state: State) -> State:
        return {"said": [self.helper()]}

    def helper(self) -> str:
        return str(self.shared.invoke("x").content)

    def again(self, state: State) -> State:
        return self.again(state)


@dataclass(slots=True)
class Slotted:
    model: Any

    def __call__(self, state: State) -> State:
        return {"said": [self.model.invoke("x").content]}


def default(state: State, *, model: Any = None) -> State:
    return {}


def closure(model: Any) -> Callable[[State], State]:
    return lambda state: {"said": [model.invoke("x").content]}


def deep(model: Any) -> Callable[[State], State]:
    def ask() -> str:
        return str(model.invoke("x").content)

    def retried() -> str:
        return ask()

    return lambda state: {"said": [retried()]}


def with_default(model: Any) -> Any:
    def node(state: State, called_model: Any = model) -> State:
        return {}

    return node


def store(pool: EnginePool) -> Any:
    return TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool))


def a_tool(pool: EnginePool) -> Any:
    retriever = store(pool).as_retriever()

    @tool
    def search(query: str) -> str:
        """Finds."""
        return str(retriever.invoke(query))

    return search


HELD: dict[str, Callable[[Any, EnginePool], Any]] = {
    "a chain": lambda model, pool: ChatPromptTemplate.from_template("{said}") | model,
    "a closure": lambda model, pool: closure(model),
    "functions in functions": lambda model, pool: deep(model),
    "an attribute": lambda model, pool: Holder(model).node,
    "slots": lambda model, pool: Slotted(model),
    "an argument of a partial": lambda model, pool: partial(default, model=model),
    "a default": lambda model, pool: with_default(model),
    "a lambda of LangChain": lambda model, pool: RunnableLambda(closure(model)),
    "a tool": lambda model, pool: ToolNode([a_tool(pool)]),
    "a tool that is a bound method": lambda model, pool: ToolNode(
        [StructuredTool.from_function(Holder(model).helper, name="t", description="t")]
    ),
    "a retriever": lambda model, pool: closure(store(pool).as_retriever()),
    "the pool itself": lambda model, pool: closure(pool),
    "a bound model": lambda model, pool: closure(pool.bound(FakeListChatModel(responses=["a"]), "llm")),
    "an accelerated chain": lambda model, pool: closure(
        accelerate(RunnableLambda(str) | FakeListChatModel(responses=["a"]), pool=pool)
    ),
    "an accelerated model": lambda model, pool: closure(accelerate(model)),
    "a graph": lambda model, pool: graph(inner=closure(model)),
    "an accelerated graph": lambda model, pool: accelerate(graph(inner=closure(None)), pool=pool),
}


@pytest.mark.parametrize("where", HELD)
def test_pool_of_a_model_in_any_container_is_found(where: str, pool: EnginePool) -> None:
    made = graph(here=HELD[where](ChatTeola(pool=pool), pool), there=closure(None))
    assert [list(one.values()) for one in pools_by_node(made).values()] == [[pool]] and pool_of_graph(made) is pool
    assert list(pools_by_node(made)) == ["here"]


@pytest.mark.parametrize("node", [by_global, by_helper, in_a_table])
def test_pool_of_a_model_named_in_node_code_is_found(
    node: Any, pool: EnginePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(globals(), "_llm", ChatTeola(pool=pool))
    monkeypatch.setitem(_global, "models", [ChatTeola(pool=pool)])
    assert pool_of_graph(graph(node=node)) is pool
    assert pool_of_graph(graph(node=closure(None))) is None, "names that its code does not use count for nothing"


def test_pool_of_class_attribute_used_by_a_method_is_found(pool: EnginePool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Holder, "shared", ChatTeola(pool=pool))
    assert pool_of_graph(graph(node=Holder(None).of_the_class)) is pool
    assert pool_of_graph(graph(node=Holder(None).again)) is None


def test_pools_of_agent_models_tools_and_middleware_are_found(pool: EnginePool) -> None:
    @wrap_model_call
    def choose(request: Any, handler: Any) -> Any:
        return handler(request.override(model=model))

    model, mine = ChatTeola(pool=pool), FakeListChatModel(responses=["a"])
    assert pool_of_graph(create_agent(model, [a_tool(pool)])) is pool
    assert pool_of_graph(create_agent(mine, [])) is None
    assert set(pools_by_node(create_agent(mine, [a_tool(pool)]))) == {"model", "tools"}, "both hold the tools"
    assert list(pools_by_node(create_agent(mine, middleware=[choose]))) == ["model"]


def test_pools_in_conditional_edges_and_entrypoints_are_found(pool: EnginePool) -> None:
    model = ChatTeola(pool=pool)
    made = StateGraph(State)
    made.add_node("a", closure(None))
    made.add_edge(START, "a")
    made.add_conditional_edges("a", lambda state: model.invoke("end?").content and END)
    assert list(pools_by_node(made.compile())) == ["a"]

    @entrypoint()
    def flow(given: str) -> str:
        return str(model.invoke(given).content)

    assert pool_of_graph(flow) is pool


def test_graph_is_accelerated_with_the_pool_that_was_found(pool: EnginePool) -> None:
    made = graph(here=closure(ChatTeola(pool=pool, max_tokens=4)))
    fast = accelerate(made)
    assert fast.invoke({"said": []}) == made.invoke({"said": []})
    trace = fast.last_trace()
    assert trace is not None and [span.engine for span in trace.spans if span.engine] == ["llm"]


# ------------------------------------------------------------ two of them


def test_graph_with_two_pools_raises_without_pool_option(pool: EnginePool, other: EnginePool) -> None:
    made = graph(a=closure(ChatTeola(pool=pool)), b=closure(ChatTeola(pool=other)), c=closure(ChatTeola(pool=pool)))
    with pytest.raises(RegistrationError) as raised:
        accelerate(made)
    assert str(raised.value) == (
        "the graph uses 2 different engine pools: one in the nodes 'a', 'c', one in the node 'b'. "
        "Next: say which one plans it: accelerate(..., pool=...)"
    )
    assert accelerate(made, pool=pool) is not None


# ------------------------------------------------------------ nothing of the user's runs, and it ends


class Touchy:
    """Whatever is asked of it runs code."""

    ran: list[str] = []

    def __getattribute__(self, name: str) -> Any:
        Touchy.ran.append(name)
        raise RuntimeError("touched")

    def __iter__(self) -> Iterator[Any]:
        Touchy.ran.append("iter")
        return iter(())

    def __eq__(self, one: object) -> bool:
        Touchy.ran.append("eq")
        return True

    def __hash__(self) -> int:
        Touchy.ran.append("hash")
        return 1

    def __bool__(self) -> bool:
        Touchy.ran.append("bool")
        return True


class Lazy(dict[str, Any]):
    """A dictionary whose values are made when they are asked for."""

    def values(self) -> Any:
        raise RuntimeError("touched")


class Properties:
    @property
    def pool(self) -> Any:
        raise RuntimeError("touched")


def test_pool_search_runs_no_user_code(pool: EnginePool) -> None:
    class Own(ChatTeola):
        @property
        def secret(self) -> Any:
            raise RuntimeError("touched")

    objects = [Touchy(), Lazy(a=1), Properties(), Own(pool=pool)]
    made = graph(node=closure(objects))
    Touchy.ran.clear()
    assert pool_of_graph(made) is pool
    assert not Touchy.ran


def test_pool_search_is_bounded(pool: EnginePool) -> None:
    endless: list[Any] = []
    endless.append(endless)
    wide = [[object() for _ in range(2000)] for _ in range(200)]
    made = graph(node=closure([endless, wide, ChatTeola(pool=pool)]))
    before = time.perf_counter()
    assert pool_of_graph(made) is pool
    assert time.perf_counter() - before < 5 and MAX_OBJECTS < 200 * 2000


def test_pool_of_a_retriever_is_found(pool: EnginePool) -> None:
    """The retriever may be in a chain or behind a tool."""
    retriever = store(pool).as_retriever()
    assert the_pool_of(retriever) is pool and the_pool_of(retriever | RunnableLambda(len)) is pool
    assert accelerate(retriever | RunnableLambda(len)).plan("x") is not None
