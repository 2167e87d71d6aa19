"""Tests of `TeolaLLM` with tools: the requests, and the calls parsed from whole and streamed answers."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
from typing import Any

import pytest
from llama_index.core.agent.workflow import FunctionAgent
from llama_index.core.base.llms.types import ToolCallBlock
from llama_index.core.llms import ChatMessage
from llama_index.core.program import FunctionCallingProgram
from llama_index.core.tools import FunctionTool
from pydantic import BaseModel
from support.scripted_llm import ScriptedLLM

from teola_plugin import accelerate
from teola_plugin.adapters.llamaindex import TeolaLLM
from teola_plugin.adapters.tool_calls import certain_text, read
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool


def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


def look(at: str) -> str:
    """What is there."""
    return f"{at} is there"


TOOLS = [FunctionTool.from_defaults(add), FunctionTool.from_defaults(look)]


@pytest.fixture
def model(pool: EnginePool) -> TeolaLLM:
    return TeolaLLM(pool=pool, is_function_calling_model=True)


def call(name: str, **arguments: Any) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def parsed_calls(model: TeolaLLM, response: Any) -> list[tuple[str, Any]]:
    calls = model.get_tool_calls_from_response(response, error_on_no_tool_call=False)
    assert [one.tool_id for one in calls] == [
        one.tool_id for one in model.get_tool_calls_from_response(response, error_on_no_tool_call=False)
    ]
    assert len({one.tool_id for one in calls}) == len(calls)
    return [(one.tool_name, one.tool_kwargs) for one in calls]


def test_tools_are_sent_to_the_engine(model: TeolaLLM, llm: ScriptedLLM) -> None:
    model.chat_with_tools(TOOLS, "what is 1 + 2?", chat_history=[ChatMessage(role="system", content="be brief")])
    [request] = llm.requests
    assert [one["function"]["name"] for one in json.loads(request.prompt.tools)] == ["add", "look"]
    assert [(m.role, m.content) for m in request.prompt.messages] == [
        ("system", "be brief"),
        ("user", "what is 1 + 2?"),
    ]
    assert not request.sampling.json_schema
    model.chat_with_tools([], "hi")
    model.chat([ChatMessage("hi")])
    assert [one.prompt.tools for one in llm.requests[1:]] == ["", ""]


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ({"tool_required": True}, ["add", "look"]),
        ({"tool_choice": "any"}, ["add", "look"]),
        ({"tool_choice": "look"}, ["look"]),
        ({"tool_choice": {"type": "function", "function": {"name": "look"}}}, ["look"]),
    ],
)
def test_required_tool_choice_constrains_the_answer_to_a_call(
    model: TeolaLLM, llm: ScriptedLLM, given: dict[str, Any], names: list[str]
) -> None:
    llm.answer = lambda request: call("look", at="sea")
    made = model.chat_with_tools(TOOLS, "where?", **given)
    assert parsed_calls(model, made) == [("look", {"at": "sea"})] and not made.message.content
    schema = json.loads(llm.requests[0].sampling.json_schema)
    assert [one["properties"]["name"]["enum"] for one in schema.get("anyOf", [schema])] == [[name] for name in names]


ANSWERS = [
    ("just words", "just words", []),
    (call("add", a=1, b=2), "", [("add", {"a": 1, "b": 2})]),
    (f"I add.\n<tool_call>\n{call('add', a=1)}\n</tool_call>", "I add.", [("add", {"a": 1})]),
    (f"<tool_call>{call('add')}</tool_call><tool_call>{call('look')}", "", [("add", {}), ("look", {})]),
    (f"[{call('add')}, {call('look')}]", "", [("add", {}), ("look", {})]),
    (call("other", a=1), call("other", a=1), []),
    ("a <tool_bar> is no call ", "a <tool_bar> is no call ", []),
    ("<tool_call>no JSON</tool_call>", "<tool_call>no JSON</tool_call>", []),
]


@pytest.mark.parametrize(("text", "rest", "calls"), ANSWERS)
async def test_tool_calls_are_parsed_from_free_answers(
    model: TeolaLLM, llm: ScriptedLLM, text: str, rest: str, calls: list[Any]
) -> None:
    llm.answer = lambda request: text
    given: dict[str, Any] = {"chat_history": [ChatMessage("hi")], "allow_parallel_tool_calls": True}
    streamed = list(model.stream_chat_with_tools(TOOLS, **given))
    astreamed = [one async for one in await model.astream_chat_with_tools(TOOLS, **given)]
    whole = [model.chat_with_tools(TOOLS, **given), await model.achat_with_tools(TOOLS, **given)]
    for made in (*whole, streamed[-1], astreamed[-1]):
        assert (made.message.content or "") == rest and parsed_calls(model, made) == calls
        assert made.additional_kwargs["completion_tokens"] and made.raw["finish_reason"] == "stop"
    for pieces in (streamed, astreamed):
        assert "".join(one.delta or "" for one in pieces) == rest
        assert all(rest.startswith(one.message.content or "") for one in pieces)
        assert not any(isinstance(block, ToolCallBlock) for one in pieces[:-1] for block in one.message.blocks)


@pytest.mark.parametrize(("text", "rest", "calls"), ANSWERS)
def test_certain_text_grows_only_by_text_before_calls(text: str, rest: str, calls: list[Any]) -> None:
    prefixes = [certain_text(text[:end]) for end in range(len(text) + 1)]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(prefixes))
    assert read(text, ("add", "look"))[0].startswith(prefixes[-1]) and rest.startswith(prefixes[-1])


def test_text_before_a_tool_call_is_streamed_by_words(model: TeolaLLM, llm: ScriptedLLM) -> None:
    llm.answer = lambda request: f"I will add. <tool_call>{call('add', a=1)}</tool_call>"
    pieces = list(model.stream_chat_with_tools(TOOLS, "hi"))
    assert [one.delta for one in pieces] == ["I", " will", " add.", ""]


def test_only_the_first_call_is_returned_without_parallel_calls(model: TeolaLLM, llm: ScriptedLLM) -> None:
    llm.answer = lambda request: f"[{call('add', a=1)}, {call('look', at='sea')}]"
    assert parsed_calls(model, model.chat_with_tools(TOOLS, "hi")) == [("add", {"a": 1})]
    streamed = list(model.stream_chat_with_tools(TOOLS, "hi"))
    assert parsed_calls(model, streamed[-1]) == [("add", {"a": 1})]


def test_next_prompt_includes_tool_calls_and_results(model: TeolaLLM, llm: ScriptedLLM) -> None:
    llm.answer = lambda request: f"Well. <tool_call>{call('add', a=1, b=2)}</tool_call>"
    message = model.chat_with_tools(TOOLS, "hi").message
    model.chat_with_tools(TOOLS, chat_history=[ChatMessage("hi"), message, ChatMessage(role="tool", content="3")])
    shown = [(m.role, m.content) for m in llm.requests[-1].prompt.messages]
    assert shown == [("user", "hi"), ("assistant", f"Well.\n{call('add', a=1, b=2)}"), ("tool", "3")]


@pytest.mark.parametrize("is_accelerated", [False, True])
def test_agent_runs_the_tools_of_one_answer_side_by_side(
    model: TeolaLLM, llm: ScriptedLLM, is_accelerated: bool
) -> None:
    both = threading.Barrier(2, timeout=10)

    def meet(who: str) -> str:
        """Return the name once the other call is there."""
        both.wait()
        return who

    def answer(request: Any) -> str:
        has_results = request.prompt.messages[-1].role == "tool"
        return "They met." if has_results else f"[{call('meet', who='a')}, {call('meet', who='b')}]"

    async def run() -> tuple[str, list[str]]:
        agent = FunctionAgent(tools=[FunctionTool.from_defaults(meet)], llm=model)
        output = await (accelerate(agent) if is_accelerated else agent).run("Meet!")
        return str(output), sorted(result.tool_output.content for result in output.tool_calls)

    llm.answer = answer

    assert asyncio.run(run()) == ("They met.", ["a", "b"])


def test_agent_refuses_tools_that_are_declared_read_only(model: TeolaLLM) -> None:
    agent = FunctionAgent(tools=TOOLS, llm=model)

    with pytest.raises(RegistrationError, match="run the tool calls of an answer side by side") as error:
        accelerate(agent, read_only=["look"])

    assert "leave read_only= out" in error.value.hint
    assert accelerate(agent, read_only=["look"], strict=False)


def test_missing_tool_call_raises_value_error(model: TeolaLLM, llm: ScriptedLLM) -> None:
    llm.answer = lambda request: "no"
    with pytest.raises(ValueError, match="at least one tool call"):
        model.get_tool_calls_from_response(model.chat_with_tools(TOOLS, "hi"))


def test_unknown_tool_choice_or_text_model_with_tools_raises(model: TeolaLLM, pool: EnginePool) -> None:
    with pytest.raises(RegistrationError, match=r"tool_choice.*'ad'"):
        model.chat_with_tools(TOOLS, "hi", tool_choice="ad")
    text = TeolaLLM(pool=pool, is_chat_model=False, is_function_calling_model=True)
    with pytest.raises(RegistrationError, match="cannot tell its model of tools"):
        text.chat_with_tools(TOOLS, "hi")


def test_llm_is_function_calling_only_if_declared(model: TeolaLLM, pool: EnginePool) -> None:
    """Other objects of LlamaIndex ask in other ways then."""
    assert model.metadata.is_function_calling_model
    assert not TeolaLLM(pool=pool).metadata.is_function_calling_model


class Fact(BaseModel):
    """Something true."""

    of: str


def test_function_calling_program_returns_the_parsed_object(model: TeolaLLM, llm: ScriptedLLM) -> None:
    llm.answer = lambda request: call("Fact", of="sheep")
    program = FunctionCallingProgram.from_defaults(
        output_cls=Fact, llm=model, prompt_template_str="A fact?", tool_required=True
    )
    assert program() == Fact(of="sheep") and json.loads(llm.requests[0].sampling.json_schema)
