"""Tests of `prompt_cache=True`: the bodies that providers get, and that nothing else changes."""

from __future__ import annotations

import asyncio
import copy
import json
from collections.abc import Iterator
from typing import Any, TypedDict

import pytest
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.outputs import ChatGeneration, ChatResult
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from llama_index.core import Document, SummaryIndex
from llama_index.llms.openai import OpenAI
from llama_index.llms.openai_like import OpenAILike
from pydantic import SecretStr
from support.provider_server import ProviderServer

from teola_plugin import accelerate
from teola_plugin.adapters.named_objects import Target
from teola_plugin.adapters.prompt_cache import MAX_MARKERS, PromptCache, cache_form
from teola_plugin.cli.compare.options import accelerate_arguments
from teola_plugin.errors import RegistrationError
from teola_plugin.server.settings import AppSettings

PROMPT = ChatPromptTemplate.from_messages([("system", "You are kind."), ("user", "{q}")])


@pytest.fixture
def server() -> Iterator[ProviderServer]:
    made = ProviderServer()
    yield made
    made.close()


def without_key(bodies: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in body.items() if name != "prompt_cache_key"} for body in bodies]


def keys(bodies: list[dict[str, Any]]) -> list[str]:
    return [body["prompt_cache_key"] for body in bodies]


def sorted_bodies(bodies: list[dict[str, Any]]) -> list[str]:
    return sorted(json.dumps(body, sort_keys=True) for body in bodies)


# ------------------------------------------------------------ OpenAI


def test_openai_gets_a_key_and_otherwise_the_same_request(server: ProviderServer) -> None:
    chain = PROMPT | server.chat_openai()
    expected = chain.invoke({"q": "a"}).content
    original = server.received()
    assert accelerate(chain, prompt_cache=True).invoke({"q": "a"}).content == expected
    bodies = server.received()
    assert without_key(bodies) == original
    assert keys(bodies)[0].startswith("teola-")
    assert len(keys(bodies)[0]) <= 64


def test_requests_without_prompt_cache_option_equal_the_originals(server: ProviderServer) -> None:
    chain = PROMPT | server.chat_openai()
    chain.invoke({"q": "a"})
    original = server.received()
    accelerate(chain, prompt_cache=True).invoke({"q": "a"})
    server.received()
    accelerate(chain).invoke({"q": "a"})
    assert server.received() == original
    chain.invoke({"q": "a"})
    assert server.received() == original


def test_cache_key_depends_on_app_instructions_and_tools(server: ProviderServer) -> None:
    def look(place: str) -> str:
        """Look."""
        return place

    model = server.chat_openai()
    fast = accelerate(PROMPT | model, prompt_cache=True, app="one")
    for question in "ab":
        fast.invoke({"q": question})
    accelerate(PROMPT | model, prompt_cache=True, app="two").invoke({"q": "a"})
    other = ChatPromptTemplate.from_messages([("system", "You are brief."), ("user", "{q}")])
    accelerate(other | model, prompt_cache=True, app="one").invoke({"q": "a"})
    accelerate(PROMPT | model.bind_tools([look]), prompt_cache=True, app="one").invoke({"q": "a"})
    first, second, *others = keys(server.received())
    assert first == second
    assert len({first, *others}) == 4


@pytest.mark.parametrize(
    "options",
    [{"model_kwargs": {"prompt_cache_key": "mine"}}, {"extra_body": {"prompt_cache_key": "mine"}}],
    ids=["model_kwargs", "extra_body"],
)
def test_cache_key_of_the_user_is_kept(server: ProviderServer, options: dict[str, Any]) -> None:
    accelerate(PROMPT | server.chat_openai(**options), prompt_cache=True).invoke({"q": "a"})
    accelerate(PROMPT | server.chat_openai().bind(prompt_cache_key="mine"), prompt_cache=True).invoke({"q": "a"})
    assert keys(server.received()) == ["mine", "mine"]


class State(TypedDict, total=False):
    topics: list[str]
    notes: list[str]


def notes_graph(model: Any, url: str = "") -> Any:
    """Return a graph that calls this model, or one that it makes while it runs."""

    def take_notes(state: State) -> State:
        return {"notes": [model.invoke(f"Take notes on {topic}").text for topic in state["topics"]]}

    def make_model_and_take_notes(state: State) -> State:
        new_model = ChatOpenAI(base_url=url, api_key=SecretStr("key"), model="gpt-5-mini")
        return {"notes": [new_model.invoke(f"Take notes on {topic}").text for topic in state["topics"]]}

    builder = StateGraph(State)
    builder.add_node("take_notes", make_model_and_take_notes if model is None else take_notes)
    builder.add_edge(START, "take_notes")
    return builder.compile()


TOPICS: Any = {"topics": ["a", "b", "c"]}


def run_graph(graph: Any, way: str) -> Any:
    return graph.invoke(TOPICS) if way == "invoke" else asyncio.run(graph.ainvoke(TOPICS))


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_prefetched_calls_have_the_cache_key_and_are_made_once(server: ProviderServer, way: str) -> None:
    graph = notes_graph(server.chat_openai())
    expected = run_graph(graph, way)
    original = server.received()
    fast = accelerate(graph, prompt_cache=True)
    assert run_graph(fast, way) == expected
    bodies = server.received()
    assert sorted_bodies(without_key(bodies)) == sorted_bodies(original)
    assert len(set(keys(bodies))) == 1
    [counts] = [row.counts for row in fast.report().calls]
    assert counts is not None and counts.hits >= 1


def test_model_created_during_a_call_has_the_cache_key(server: ProviderServer) -> None:
    graph = notes_graph(None, f"{server.url}/v1")
    expected = graph.invoke(TOPICS)
    original = server.received()
    assert accelerate(graph, prompt_cache=True).invoke(TOPICS) == expected
    bodies = server.received()
    assert sorted_bodies(without_key(bodies)) == sorted_bodies(original)
    assert len(set(keys(bodies))) == 1


def test_streamed_answers_and_events_are_the_originals(server: ProviderServer) -> None:
    chain = PROMPT | server.chat_openai()
    fast = accelerate(chain, prompt_cache=True)

    async def events(one: Any) -> list[tuple[Any, ...]]:
        stream = one.astream_events({"q": "a"}, version="v2")
        return [(event["event"], event["name"], str(event["data"].get("input"))) async for event in stream]

    assert [one.content for one in fast.stream({"q": "a"})] == [one.content for one in chain.stream({"q": "a"})]
    accelerated, original = server.received()
    assert without_key([accelerated]) == [original]
    assert asyncio.run(events(fast)) == asyncio.run(events(chain))


def test_llamaindex_openai_gets_the_key(server: ProviderServer) -> None:
    llm = OpenAI(api_base=f"{server.url}/v1", api_key="key", model="gpt-4o")
    engine = SummaryIndex.from_documents([Document(text="sheep")]).as_query_engine(llm=llm)
    expected = str(engine.query("what"))
    original = server.received()
    fast = accelerate(engine, prompt_cache=True)
    assert str(fast.query("what")) == expected
    assert str(asyncio.run(fast.aquery("what"))) == expected
    bodies = server.received()
    assert without_key(bodies) == original * 2
    assert len(set(keys(bodies))) == 1
    assert "OpenAI: calls: 2, different instructions: 1" in fast.explain()


def test_other_providers_get_no_cache_key(server: ProviderServer) -> None:
    llm = OpenAILike(api_base=f"{server.url}/v1", api_key="key", model="m", is_chat_model=True)
    engine = SummaryIndex.from_documents([Document(text="sheep")]).as_query_engine(llm=llm)
    engine.query("what")
    accelerate(engine, prompt_cache=True).query("what")
    original, accelerated = server.received()
    assert accelerated == original


def test_user_subclass_has_the_cache_form_of_its_base_class() -> None:
    class Mine(ChatOpenAI):
        pass

    class Other(ChatOpenAI):
        __module__ = "langchain_deepseek.chat_models"

    assert cache_form(Mine) is cache_form(ChatOpenAI) is not None
    assert cache_form(Other) is None


# ------------------------------------------------------------ Anthropic


def markers(body: dict[str, Any]) -> list[str]:
    """Return where the markers of a request stand."""
    found = [f"tool {index}" for index, tool in enumerate(body.get("tools", ())) if "cache_control" in tool]
    if isinstance(body.get("system"), list):
        found += ["system" for block in body["system"] if "cache_control" in block]
    for index, message in enumerate(body["messages"]):
        blocks = message["content"] if isinstance(message["content"], list) else []
        found += [f"message {index}" for block in blocks if "cache_control" in block]
    return found


def test_anthropic_request_gets_a_marker_after_the_instructions(server: ProviderServer) -> None:
    chain = PROMPT | server.chat_anthropic()
    expected = chain.invoke({"q": "a"}).content
    fast = accelerate(chain, prompt_cache=True)
    assert [fast.invoke({"q": question}).content for question in "ab"] == [expected, expected]
    original, *bodies = server.received()
    assert [markers(body) for body in bodies] == [["system"], ["system"]]
    assert bodies[0]["system"] == [{"type": "text", "text": "You are kind.", "cache_control": {"type": "ephemeral"}}]
    assert bodies[0] | {"system": "You are kind."} == original


LOOK = {"name": "look", "description": "Look.", "input_schema": {"type": "object", "properties": {}}}


def turns(count: int) -> list[BaseMessage]:
    """Return the messages of an agent after some calls of its tool."""
    messages: list[BaseMessage] = [SystemMessage("You are kind."), HumanMessage("What is there?")]
    for index in range(count):
        messages.append(AIMessage("", tool_calls=[{"name": "look", "args": {}, "id": f"call_{index}"}]))
        messages.append(ToolMessage(f"nothing {index}", tool_call_id=f"call_{index}"))
    return messages


def test_continued_conversation_is_marked_at_its_end(server: ProviderServer) -> None:
    model = server.chat_anthropic().bind(tools=[LOOK])
    fast = accelerate(model, prompt_cache=True)
    for count in range(3):
        messages = turns(count)
        before = copy.deepcopy(messages)
        fast.invoke(messages)
        assert messages == before
    assert [markers(body) for body in server.received()] == [
        ["system"],
        ["system", "message 0", "message 2"],
        ["system", "message 2", "message 4"],
    ]


def test_changing_instructions_get_no_marker_but_tools_do(server: ProviderServer) -> None:
    prompt = ChatPromptTemplate.from_messages([("system", "Today is {day}. Be kind."), ("user", "{q}")])
    fast = accelerate(prompt | server.chat_anthropic().bind(tools=[LOOK]), prompt_cache=True)
    for day in ("Monday", "Tuesday", "Friday"):
        fast.invoke({"day": day, "q": "a"})
    assert [markers(body) for body in server.received()] == [["system"], ["tool 0"], ["tool 0"]]
    text = fast.explain()
    assert "ChatAnthropic: calls: 3, different instructions: 3" in text
    assert "they differ behind 'Today is '" in text


def test_markers_of_the_user_are_kept_and_counted(server: ProviderServer) -> None:
    block = {"type": "text", "text": "long", "cache_control": {"type": "ephemeral", "ttl": "1h"}}
    own: list[BaseMessage] = [SystemMessage([block, block, block]), HumanMessage("What?")]
    fast = accelerate(server.chat_anthropic(), prompt_cache=True)
    fast.invoke(own)
    fast.invoke([*own, AIMessage("This."), HumanMessage("And?")])
    fast.invoke([*own, AIMessage("This."), HumanMessage("And?"), AIMessage("That."), HumanMessage("So?")])
    bodies = server.received()
    assert [len(markers(body)) for body in bodies] == [3, MAX_MARKERS, MAX_MARKERS]
    assert [body["system"] for body in bodies] == [[block, block, block]] * 3


def test_cache_control_argument_disables_added_markers(server: ProviderServer) -> None:
    own = server.chat_anthropic().bind(cache_control={"type": "ephemeral"})
    (PROMPT | own).invoke({"q": "a"})
    accelerate(PROMPT | own, prompt_cache=True).invoke({"q": "a"})
    original, accelerated = server.received()
    assert accelerated == original


# ------------------------------------------------------------ Bedrock, by the messages that its integration gets


class ChatBedrockConverse(BaseChatModel):
    """Stands for the class of `langchain-aws`, which sends these blocks to Bedrock as they are."""

    calls: list[Any] = []

    @property
    def _llm_type(self) -> str:
        return "bedrock"

    def _generate(self, messages: list[BaseMessage], *args: Any, **kwargs: Any) -> ChatResult:
        self.calls.append((messages, kwargs.get("tools")))
        return ChatResult(generations=[ChatGeneration(message=AIMessage("ok"))])


ChatBedrockConverse.__module__ = "langchain_aws.chat_models.bedrock_converse"


def test_bedrock_gets_cache_points() -> None:
    model = ChatBedrockConverse()
    accelerate(PROMPT | model, prompt_cache=True).invoke({"q": "a"})
    fast = accelerate(RunnableLambda(lambda q: [HumanMessage(q)]) | model.bind(tools=[LOOK]), prompt_cache=True)
    fast.invoke("a")
    (system, _), _ = model.calls[0]
    assert system.content == [{"type": "text", "text": "You are kind."}, {"cachePoint": {"type": "default"}}]
    assert model.calls[1][1] == [LOOK, {"cachePoint": {"type": "default"}}]


# ------------------------------------------------------------ failures, options


def test_failing_prompt_cache_leaves_the_request_unchanged(
    server: ProviderServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = PROMPT | server.chat_openai()
    chain.invoke({"q": "a"})

    def fail(*_: Any) -> Any:
        raise ZeroDivisionError

    monkeypatch.setattr(PromptCache, "_arguments", fail)
    accelerate(chain, prompt_cache=True).invoke({"q": "a"})
    original, accelerated = server.received()
    assert accelerated == original


def test_prompt_cache_option_exists_in_python_cli_and_server(server: ProviderServer) -> None:
    wrong: Any = "yes"
    with pytest.raises(RegistrationError, match="prompt_cache is 'yes'"):
        accelerate(PROMPT | server.chat_openai(), prompt_cache=wrong)
    assert accelerate_arguments(Target(object()), "", [], None, prompt_cache=True)["prompt_cache"] is True
    assert AppSettings(object="my_app:chain", prompt_cache=True).prompt_cache
    fast = accelerate(PROMPT | server.chat_openai(), prompt_cache=True)
    assert "No model with a prompt cache was called so far." in fast.explain()
    assert "Prompt cache" not in accelerate(PROMPT | server.chat_openai()).explain()
