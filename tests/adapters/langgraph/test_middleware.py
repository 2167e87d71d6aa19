"""`EngineMiddleware`: an engine does the work of an agent's model, whatever model the agent was made with."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import AgentMiddleware, wrap_model_call
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from langchain_openai import ChatOpenAI
from support.openai_stub import MODEL, Stub, openai_stub
from support.own_leaves import Chat, Ledger
from support.recording import arrivals
from support.scripted_llm import ScriptedLLM

from teola_plugin import EnginePool, RegistrationError, accelerate
from teola_plugin.engines.fake import fake_engines
from teola_plugin.engines.openai import OpenAIServer
from teola_plugin.langchain import ChatTeola, EngineMiddleware

pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning", "ignore::ResourceWarning")
GIVEN = {"messages": [("user", "1 + 2?")]}
CALL = '{"name": "add", "arguments": {"a": 1, "b": 2}}'


@tool
def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


class Provider(Chat):
    """Its answers are another's."""

    max_tokens: int | None = 8

    def bind_tools(self, tools: Any, **kwargs: Any) -> Any:
        return self.bind(tools=[convert_to_openai_tool(tool) for tool in tools], **kwargs)


@pytest.fixture
def llm() -> ScriptedLLM:
    made = ScriptedLLM()
    made.answer = lambda asked: "it is 3" if asked.prompt.messages[-1].role == "tool" else CALL
    return made


@pytest.fixture
def pool(llm: ScriptedLLM) -> Iterator[EnginePool]:
    with EnginePool.local(llm=llm) as made:
        yield made


@pytest.fixture(scope="module")
def fakes() -> Iterator[EnginePool]:
    with EnginePool.local(fake_engines()) as made:
        yield made


def said(agent: Any, way: str = "invoke") -> list[Any]:
    made = agent.invoke(GIVEN) if way == "invoke" else asyncio.run(agent.ainvoke(GIVEN))
    return [(m.type, m.content, [call["args"] for call in getattr(m, "tool_calls", [])]) for m in made["messages"]]


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_the_agents_model_is_served(pool: EnginePool, llm: ScriptedLLM, way: str) -> None:
    mine = Provider(ledger=Ledger())
    agent = create_agent(mine, [add], middleware=[EngineMiddleware(pool, "llm")])
    found = said(agent, way)
    assert found == said(create_agent(ChatTeola(pool=pool, max_tokens=8), [add]), way)
    assert found[1][2] == [{"a": 1, "b": 2}] and found[-1][1] == "it is 3"
    assert not mine.ledger.calls and len(llm.asked) == 4


def test_a_model_of_its_server_asks_the_same(pool: EnginePool) -> None:
    with openai_stub() as stub:
        engine = OpenAIServer(base_url=stub.base_url, api_key="e", prefix_caching=True, calibrate=False)
        with EnginePool.local(llm=engine) as own_pool:
            mine = ChatOpenAI(base_url=stub.base_url, api_key="k", model=MODEL, temperature=0.0)  # type: ignore[arg-type]
            plain = said(create_agent(mine, [add]))
            seen = arrivals(own_pool)
            assert said(create_agent(mine, [add], middleware=[EngineMiddleware(own_pool)])) == plain
            first, second = _tools(stub)
            assert len(seen) == 1 and first == second and first[0]["function"]["name"] == "add"


def _tools(stub: Stub) -> list[Any]:
    return [body["tools"] for _, body in stub.asked if "tools" in body]


def test_its_calls_join_the_query_of_the_agent(pool: EnginePool) -> None:
    agent = create_agent(Provider(), [add], middleware=[EngineMiddleware(pool)])
    fast = accelerate(agent, pool=pool)
    assert said(fast) == said(agent)
    trace = fast.last_trace()
    assert trace is not None and [span.engine for span in trace.spans if span.engine] == ["llm", "llm"]


def test_what_other_middleware_chooses_is_served_too(pool: EnginePool, llm: ScriptedLLM) -> None:
    other = Provider(ledger=Ledger(), max_tokens=3)

    @wrap_model_call
    def choose(request: Any, handler: Any) -> Any:
        return handler(request.override(model=other))

    said(create_agent(Provider(), [add], middleware=[choose, EngineMiddleware(pool)]))
    assert [asked.sampling.max_tokens for asked in llm.asked] == [3, 3] and not other.ledger.calls


def test_only_the_models_that_bind_names(pool: EnginePool, llm: ScriptedLLM) -> None:
    mine, other = Provider(ledger=Ledger()), Provider(ledger=Ledger())
    agent = create_agent(other, [add], middleware=[EngineMiddleware(pool, bind=[(mine, "llm")])])
    said(agent)
    assert other.ledger.calls and not llm.asked
    said(create_agent(mine, [add], middleware=[EngineMiddleware(pool, bind=[(mine, "llm")])]))
    assert not mine.ledger.calls and len(llm.asked) == 2


def test_a_pool_backed_model_is_called_as_it_is(pool: EnginePool) -> None:
    model = ChatTeola(pool=pool)
    middleware = EngineMiddleware(pool)
    assert middleware.pool_model_of(model) is model
    made = pool.bound(Provider(), "llm")
    assert middleware.pool_model_of(made) is made


def test_one_object_serves_a_model_until_that_changes(pool: EnginePool, llm: ScriptedLLM) -> None:
    middleware, mine = EngineMiddleware(pool), Provider()
    made: Any = middleware.pool_model_of(mine)
    assert middleware.pool_model_of(mine) is made
    mine.max_tokens = 2
    assert middleware.pool_model_of(mine).max_tokens == 2  # type: ignore[attr-defined]
    for _ in range(100):
        middleware.pool_model_of(Provider())
    assert len(middleware._replacements) <= 16


def test_what_cannot_be_served(fakes: EnginePool) -> None:
    class Many(Provider):
        n: int = 3

    with pytest.raises(RegistrationError, match=r"unknown engine 'lm'"):
        EngineMiddleware(fakes, "lm")
    with pytest.raises(RegistrationError, match="n=3"):
        EngineMiddleware(fakes, bind=[(Many(), "llm")])
    with pytest.raises(RegistrationError, match="n=3"):
        create_agent(Many(), [add], middleware=[EngineMiddleware(fakes)]).invoke(GIVEN)


def test_it_is_a_middleware_like_others(pool: EnginePool) -> None:
    made = EngineMiddleware(pool)
    assert isinstance(made, AgentMiddleware) and made.name == "EngineMiddleware"
    nodes = create_agent(Provider(), [add], middleware=[made]).nodes
    assert set(nodes) == set(create_agent(Provider(), [add]).nodes), "it adds no node"


def test_without_langchain(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "teola_plugin.adapters.langgraph.middleware"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "langchain.agents.middleware", None)
    with pytest.raises(RegistrationError, match=r"langchain 1, which is not installed.*pip install 'langchain"):
        importlib.import_module(name)
