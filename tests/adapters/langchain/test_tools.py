"""Tests of tools bound to a `ChatTeola`: the requests, the parsed answers, and agents."""

from __future__ import annotations

import json
import time
from typing import Any, Literal

import pytest
from langchain.agents import create_agent
from langchain_core.language_models import FakeListChatModel
from langchain_core.messages import AIMessage, HumanMessage
from langchain_core.output_parsers import PydanticToolsParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableLambda, RunnablePassthrough
from langchain_core.tools import tool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import BaseModel

from teola_plugin import accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool


@tool
def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


class Fact(BaseModel):
    """Something true."""

    of: str


@pytest.fixture
def model(llm_pool: EnginePool) -> ChatTeola:
    return ChatTeola(pool=llm_pool)


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def calls(message: Any) -> list[tuple[str, Any]]:
    return [(one["name"], one["args"]) for one in message.tool_calls]


def test_bound_tools_are_sent_to_the_engine(model: ChatTeola, llm: Any) -> None:
    model.bind_tools([add, Fact]).invoke("what is 1 + 2?")
    (request,) = llm.requests
    assert [one["function"]["name"] for one in json.loads(request.prompt.tools)] == ["add", "Fact"]
    assert not request.sampling.json_schema and "tools: " in request.prompt.flat()
    model.bind_tools([add], tool_choice="none").invoke("what is 1 + 2?")
    model.invoke("what is 1 + 2?")
    assert [one.prompt.tools for one in llm.requests[1:]] == ["", ""]


@pytest.mark.parametrize(
    ("choice", "names"),
    [("any", ["add", "Fact"]), ("required", ["add", "Fact"]), (True, ["add", "Fact"]), ("add", ["add"])],
)
def test_required_tool_choice_constrains_the_answer_to_a_call(
    model: ChatTeola, llm: Any, choice: Any, names: list[str]
) -> None:
    llm.answer = lambda request: call("add", a=1, b=2)
    made = model.bind_tools([add, Fact], tool_choice=choice).invoke("what is 1 + 2?")
    assert calls(made) == [("add", {"a": 1, "b": 2})] and made.content == ""
    schema = json.loads(llm.requests[0].sampling.json_schema)
    assert [one["properties"]["name"]["enum"] for one in schema.get("anyOf", [schema])] == [[name] for name in names]


@pytest.mark.parametrize(
    ("text", "rest", "found"),
    [
        ("just words", "just words", []),
        (call("add", a=1, b=2), "", [("add", {"a": 1, "b": 2})]),
        ('{"name": "add", "parameters": {"a": 1}}', "", [("add", {"a": 1})]),
        (f"I add.\n<tool_call>\n{call('add', a=1)}\n</tool_call>", "I add.", [("add", {"a": 1})]),
        (f"<tool_call>{call('add')}</tool_call><tool_call>{call('Fact')}", "", [("add", {}), ("Fact", {})]),
        (f"[{call('add')}, {call('Fact')}]", "", [("add", {}), ("Fact", {})]),
        (call("other", a=1), call("other", a=1), []),
        ('{"a": 1}', '{"a": 1}', []),
        ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
    ],
)
async def test_tool_calls_are_parsed_from_free_answers(
    model: ChatTeola, llm: Any, text: str, rest: str, found: list[Any]
) -> None:
    llm.answer = lambda request: text
    bound = model.bind_tools([add, Fact])
    streamed = list(bound.stream("hi"))
    for made in (bound.invoke("hi"), await bound.ainvoke("hi"), sum(streamed[1:], streamed[0])):
        assert made.content == rest and calls(made) == found
        assert made.usage_metadata["total_tokens"] > 0 and len({one["id"] for one in made.tool_calls}) == len(found)


def test_unknown_tool_choice_raises_and_names_it(model: ChatTeola) -> None:
    with pytest.raises(RegistrationError, match=r"tool_choice.*'ad'"):
        model.bind_tools([add], tool_choice="ad")


MALFORMED_CHOICES: list[Any] = [
    *({"type": "function"}, {"type": "function", "function": "add"}, {"type": "function", "function": ["add"]}),
    *({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": []}}, {"type": "custom"}, ["add"], 1.5),
]


@pytest.mark.parametrize("choice", MALFORMED_CHOICES)
def test_malformed_tool_choice_raises_registration_error(model: ChatTeola, choice: Any) -> None:
    with pytest.raises(RegistrationError, match="tool_choice"):
        model.bind_tools([add], tool_choice=choice)


@pytest.mark.parametrize("choice", ["any", "required", True, "add", {"type": "function", "function": {"name": "add"}}])
def test_required_tool_choice_without_tools_raises_registration_error(model: ChatTeola, choice: Any) -> None:
    with pytest.raises(RegistrationError, match="no tools"):
        model.bind_tools([], tool_choice=choice)


@pytest.mark.parametrize(
    "parameters", [{"$defs": "bad"}, {"properties": {"x": {"$ref": "#/$defs/x"}}}, {"type": "array"}]
)
def test_malformed_tool_parameters_raise_registration_error(model: ChatTeola, parameters: Any) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": parameters}}

    with pytest.raises(RegistrationError, match=r"tools\.0\.function\.parameters"):
        model.bind_tools([tool], tool_choice="any")


def test_tool_that_is_no_function_raises_registration_error(model: ChatTeola) -> None:
    with pytest.raises(RegistrationError, match=r"tools\.0: it is no function"):
        model.bind_tools([{"type": "web_search"}])


def test_schema_definitions_are_moved_to_the_root(model: ChatTeola, llm: Any) -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#/$defs/tree"}}}
    grow = {"name": "grow", "description": "", "parameters": {"$ref": "#/$defs/tree", "$defs": {"tree": tree}}}
    model.bind_tools([grow, add], tool_choice="any").invoke("hi")
    schema = json.loads(llm.requests[0].sampling.json_schema)
    assert schema["$defs"] == {"tree": tree} and "$defs" not in json.dumps(schema["anyOf"]).replace("#/$defs", "")


def test_streaming_model_returns_complete_tool_calls(model: ChatTeola, llm: Any) -> None:
    """This also holds if the bound model was set to stream."""
    llm.answer = lambda request: call("add", a=1, b=2)
    eager = ChatTeola(pool=model.pool, disable_streaming=False, streaming=True)
    assert calls(eager.bind_tools([add]).invoke("hi")) == [("add", {"a": 1, "b": 2})]


def test_accelerated_chain_with_tools_sends_one_request(model: ChatTeola, llm: Any, llm_pool: EnginePool) -> None:
    llm.answer = lambda request: call("Fact", of="sheep")
    prompt = ChatPromptTemplate.from_template("{question}")
    chain = prompt | model.bind_tools([Fact], tool_choice="any") | PydanticToolsParser(tools=[Fact])
    fast = accelerate(chain, pool=llm_pool)
    assert fast.invoke({"question": "?"}) == chain.invoke({"question": "?"}) == [Fact(of="sheep")]
    assert len(llm.requests) == 2


async def test_call_with_tools_is_prefetched_and_claimed(model: ChatTeola, llm: Any, llm_pool: EnginePool) -> None:
    """Ahead of user code that it does not depend on; ids are those of the plain object's own calls."""
    llm.answer = lambda request: call("Fact", of="sheep")
    call_with_tools = ChatPromptTemplate.from_template("{question}") | model.bind_tools([Fact], tool_choice="any")
    seen: list[int] = []

    def slow(given: Any) -> int:
        while not llm.requests:  # it has been asked before this function is done
            time.sleep(0.001)
        seen.append(len(llm.requests))
        return len(seen)

    chain = RunnablePassthrough.assign(before=RunnableLambda(slow)) | RunnablePassthrough.assign(first=call_with_tools)
    fast = accelerate(chain | RunnablePassthrough.assign(second=call_with_tools), pool=llm_pool)
    made = fast.invoke({"question": "?"})
    assert seen[0] and len(llm.requests) == 2 and llm.requests[0].prompt.tools and llm.requests[0].sampling.json_schema
    assert calls(made["first"]) == calls(made["second"]) == [("Fact", {"of": "sheep"})]
    assert len({message.tool_calls[0]["id"] for message in (made["first"], made["second"])}) == 2
    again = await fast.ainvoke({"question": "?"})
    assert calls(again["first"]) == [("Fact", {"of": "sheep"})] and len(llm.requests) == 4


def test_agent_runs_a_tool_and_answers(model: ChatTeola, llm: Any, llm_pool: EnginePool) -> None:
    """The agent adds two numbers and then answers."""

    def answer(request: Any) -> str:
        last = request.prompt.messages[-1]
        return f"It is {last.content}." if last.role == "tool" else call("add", a=1, b=2)

    llm.answer = answer
    agent = create_agent(model, [add], system_prompt="Use your tools.")
    for one in (agent, accelerate(agent, pool=llm_pool)):
        messages = one.invoke({"messages": [HumanMessage("what is 1 + 2?")]})["messages"]
        assert [type(m).__name__ for m in messages] == ["HumanMessage", "AIMessage", "ToolMessage", "AIMessage"]
        assert isinstance(messages[-1], AIMessage) and messages[-1].content == "It is 3."


@tool
def feed(animal: Literal["lamb", "cow"], often: bool) -> str:
    """Feeds."""
    return f"fed {animal}"


@pytest.mark.vllm
def test_real_engine_generates_the_required_tool_call(session_llm: Any) -> None:
    """The model is random; what it may write is not."""
    from teola_plugin.adapters.langchain.tools import described, without_tools
    from teola_plugin.graph import PrimitiveKind
    from teola_plugin.requests.payloads import Done, Generate, Prompt, Request, Sampling
    from teola_plugin.requests.payloads import Message as Said

    _, tools = without_tools(described([feed, Fact], "feed"))
    assert tools is not None
    payload = Generate(
        Prompt((Said("user", "Feed the lamb."),), tools=tools.definitions),
        Sampling(max_tokens=64, json_schema=tools.schema),
    )

    async def written() -> str:
        async for result in session_llm.engine.execute([Request("tools", PrimitiveKind.PREFILLING, payload)]):
            if isinstance(result, Done):
                return str(result.value.text)
        raise AssertionError("no answer")

    (made,) = tools.message(AIMessage(session_llm.run(written()))).tool_calls
    assert made["name"] == "feed" and made["args"]["animal"] in ("lamb", "cow") and type(made["args"]["often"]) is bool


def test_chat_template_receives_the_tools() -> None:
    from teola_plugin.engines.vllm.runner import PromptTokens
    from teola_plugin.requests.payloads import Message as Said
    from teola_plugin.requests.payloads import Prompt

    class Tokenizer:
        chat_template = "yes"

        def apply_chat_template(
            self, messages: Any, *, tokenize: bool, add_generation_prompt: bool, **more: Any
        ) -> str:
            return f"{messages} {more}"

    prompt_messages = (Said("user", "hi"),)
    tokens = PromptTokens(Tokenizer())
    assert "'tools': [{'a': 1}]" in tokens.render(Prompt(prompt_messages, tools='[{"a": 1}]'))[0]
    assert "tools" not in tokens.render(Prompt(prompt_messages))[0]


def test_bound_model_sends_its_openai_tools(llm: Any, llm_pool: EnginePool) -> None:
    """The engine answers for a model of the user's own, whose tools have OpenAI's format."""
    llm.answer = lambda request: call("add", a=1, b=2)
    own = FakeListChatModel(responses=["none"])
    bound = own.bind(tools=[convert_to_openai_tool(add)], tool_choice={"type": "function", "function": {"name": "add"}})
    chain = ChatPromptTemplate.from_template("{question}") | bound
    made = accelerate(chain, pool=llm_pool, bind=[(own, "llm")]).invoke({"question": "?"})
    assert calls(made) == [("add", {"a": 1, "b": 2})] and json.loads(llm.requests[0].sampling.json_schema)
