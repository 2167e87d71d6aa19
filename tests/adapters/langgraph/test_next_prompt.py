"""Tests of agents whose next prompt is prefilled while their tools run, as far as it is known."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from langchain.agents.structured_output import ToolStrategy
from langchain_core.messages import HumanMessage
from langchain_core.tools import create_retriever_tool, tool
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition
from pydantic import BaseModel
from support.agents import INPUT, KINDS, World, agent, run, summarize_messages, world
from support.writing_llm import call

from teola_plugin.langchain import TeolaEmbeddings, TeolaVectorStore
from teola_plugin.requests.payloads import UNKNOWN, Prompt

LONG = "words " * 80
"""More than a prefix that is worth a request."""


@pytest.fixture
def at() -> Iterator[World]:
    with world() as made:
        yield made


class Steps:
    """Tools that end when they are told to, by threads and by loops."""

    def __init__(self, at: World) -> None:
        self.ends = {name: threading.Event() for name in ("one", "two", "three")}
        self._at = at

    def tools(self) -> list[Any]:
        return [self._tool(name) for name in self.ends]

    def _tool(self, name: str) -> Any:
        def step(text: str = LONG) -> str:
            """A step."""
            assert self.ends[name].wait(5)
            self._at.ran.append(name)
            return f"{name}: {text}"

        async def astep(text: str = LONG) -> str:
            """A step."""
            return await asyncio.to_thread(step, text)

        return tool(name)(step).model_copy(update={"coroutine": astep})

    def end(self, *names: str) -> None:
        for name in names:
            self.ends[name].set()


def start_call(fast: Any, way: str = "invoke", config: Any = None) -> threading.Thread:
    """Start a call of the agent in the background."""

    def ask() -> None:
        result.append(fast.invoke(INPUT, config) if way == "invoke" else asyncio.run(fast.ainvoke(INPUT, config)))

    result: list[Any] = []
    thread = threading.Thread(target=ask)
    thread.result = result  # type: ignore[attr-defined]
    thread.start()
    return thread


def until(condition: Any) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.005)
    raise AssertionError("it does not come")


def prefix_of(warmed: Prompt, whole: Prompt) -> bool:
    return whole.tools == warmed.tools and whole.flat().startswith(warmed.known_prefix())


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
@pytest.mark.parametrize("kind", KINDS)
def test_tool_results_are_prefilled_in_prompt_order_as_they_arrive(at: World, kind: str, way: str) -> None:
    steps = Steps(at)
    at.writes(call("one"), call("two"), call("three"))
    fast = at.fast(KINDS[kind](at.model, steps.tools()))
    thread = start_call(fast, way)
    steps.end("two")
    until(lambda: at.ran == ["two"])
    threading.Event().wait(0.05)
    assert at.llm.warmed == [], "the first result is not there"
    steps.end("one")
    until(lambda: len(at.llm.warmed) == 1)
    steps.end("three")
    thread.join(5)
    whole = at.llm.requests[-1].prompt
    (warmed,) = at.llm.warmed
    assert prefix_of(warmed, whole) and "one: words" in warmed.known_prefix() and "two: words" in warmed.known_prefix()
    assert warmed.messages[-1].content == UNKNOWN and "three:" not in warmed.flat()
    spans = [span for span in fast.last_trace().spans if span.kind == "PARTIAL_PREFILLING"]
    assert [span.outcome for span in spans] == ["done"] and spans[0].engine == "llm"


def test_long_answer_is_prefilled_before_any_tool_result(at: World) -> None:
    steps = Steps(at)
    at.writes(LONG, call("one", text="x"))
    thread = start_call(at.fast(agent(at.model, steps.tools())))
    until(lambda: len(at.llm.warmed) == 1)
    steps.end("one")
    thread.join(5)
    assert prefix_of(at.llm.warmed[0], at.llm.requests[-1].prompt) and LONG.strip() in at.llm.warmed[0].known_prefix()


def test_short_tool_results_are_not_prefilled(at: World) -> None:
    steps = Steps(at)
    at.writes(call("one", text="x"), call("two", text="y"))
    steps.end("one", "two")
    run(at.fast(agent(at.model, steps.tools())), "invoke")
    assert at.llm.warmed == []


def test_single_tool_result_is_not_prefilled(at: World) -> None:
    steps = Steps(at)
    at.writes(call("one"))
    steps.end("one")
    run(at.fast(agent(at.model, steps.tools())), "invoke")
    assert at.llm.warmed == []


@pytest.mark.parametrize(
    "profile", [{"prefix_caching": False}, {"max_request_size": 100}, {"min_split_tokens": 10_000}], ids=str
)
def test_engine_without_prefix_cache_or_capacity_gets_no_prefilling(profile: Any) -> None:
    with world() as at:
        at.llm.profile = replace(at.llm.profile, **profile)
        steps = Steps(at)
        at.writes(LONG, call("one"), call("two"))
        steps.end("one", "two")
        made = run(at.fast(agent(at.model, steps.tools())), "invoke")
        assert at.llm.warmed == [] and len(made) == 5


def test_finished_tool_results_are_not_prefilled(at: World) -> None:
    """Searches that are done by the end of the answer leave no time to prefill in; a tool that runs on does."""
    store = TeolaVectorStore(pool=at.pool, embedding=TeolaEmbeddings(pool=at.pool))
    store.add_texts([f"sheep eat {LONG}"])
    search = create_retriever_tool(store.as_retriever(), "search", "Searches.")
    steps = Steps(at)
    fast, asked_before = at.fast(agent(at.model, [search, *steps.tools()])), at.store.batches
    calls = [call("search", query="sheep"), call("search", query="hay")]
    at.writes(*calls, lambda: at.store.batches >= asked_before + 2)
    run(fast, "invoke")
    assert at.llm.warmed == [] and at.llm.fulfilled_waits == [True]
    at.writes(*calls, call("one", text="x"))
    thread = start_call(fast)
    until(lambda: at.llm.warmed and at.llm.warmed[-1].known_prefix().count("sheep eat") == 2)
    steps.end("one")
    thread.join(5)
    assert all(prefix_of(warmed, at.llm.requests[-1].prompt) for warmed in at.llm.warmed)


def test_each_tool_round_prefills_its_own_prompt(at: World) -> None:
    """Each round prefills its own; what an earlier one began is over."""
    steps = Steps(at)
    steps.end("one", "two", "three")
    calls = [call("one", text=LONG), call("two", text=LONG)]

    def writes(prompt: Prompt) -> list[str]:
        return [LONG, *calls] if sum(m.role == "tool" for m in prompt.messages) < 4 else ["done"]

    at.llm.writes = writes
    fast = at.fast(agent(at.model, steps.tools()))
    made = run(fast, "invoke")
    assert len(made) == 8 and len(at.llm.requests) == 3
    for warmed in at.llm.warmed:
        assert any(prefix_of(warmed, one.prompt) for one in at.llm.requests)
    assert fast.last_trace().outcome == "closed"


def test_concurrent_conversations_prefill_their_own_prompts(at: World) -> None:
    steps = Steps(at)
    at.writes(LONG, call("one"), call("two"))
    steps.end("one", "two")
    fast = at.fast(agent(at.model, steps.tools()))

    async def both() -> list[Any]:
        given = [{"messages": [HumanMessage(f"question {i}")]} for i in range(3)]
        return await asyncio.gather(*(fast.ainvoke(one) for one in given))

    made = asyncio.run(both())
    assert [summarize_messages(one["messages"])[1:] for one in made] == [
        summarize_messages(made[0]["messages"])[1:]
    ] * 3
    for warmed in at.llm.warmed:
        assert any(prefix_of(warmed, one.prompt) for one in at.llm.requests)


def test_prefilling_of_the_next_prompt_keeps_the_tenant(at: World) -> None:
    seen: list[Any] = []
    execute = at.llm.execute

    def watched(batch: Any) -> Any:
        seen.extend((request.kind.name, request.tenant, request.background) for request in batch)
        return execute(batch)

    at.llm.execute = watched  # type: ignore[method-assign]
    steps = Steps(at)
    at.writes(LONG, call("one", text="x"))
    thread = start_call(at.fast(agent(at.model, steps.tools())), config={"configurable": {"teola_tenant": "acme"}})
    until(lambda: len(at.llm.warmed) == 1)
    steps.end("one")
    thread.join(5)
    assert ("PARTIAL_PREFILLING", "acme", True) in seen and {tenant for _, tenant, _ in seen} == {"acme"}


def test_unsupported_tool_result_raises_the_error_of_the_original(at: World, caplog: pytest.LogCaptureFixture) -> None:
    @tool
    def picture() -> Any:
        """A picture."""
        return [{"type": "image_url", "image_url": {"url": "https://example.org/x.png"}}]

    @tool
    def words() -> str:
        """Words."""
        return LONG

    at.writes(call("words"), call("picture"), call("words"))
    plain = agent(at.model, [words, picture])
    with pytest.raises(Exception, match="image_url") as raised:
        run(plain, "invoke")
    with pytest.raises(type(raised.value), match="image_url"):
        run(at.fast(plain), "invoke")
    assert "please report it" not in caplog.text


def test_nothing_is_prefilled_if_no_model_call_follows_the_tools(at: World) -> None:
    """A tool that returns directly, a format of the answer, a graph that goes elsewhere."""
    steps = Steps(at)
    steps.end("one", "two", "three")
    one, two, three = steps.tools()
    direct = two.model_copy(update={"return_direct": True})
    graph = agent(at.model, [one, direct, three])
    at.writes(LONG, call("one"), call("two"))
    assert len(run(at.fast(graph), "invoke")) >= 4 and at.llm.warmed == []

    class Answer(BaseModel):
        text: str

    at.writes(LONG, call("Answer", text=LONG))
    made = at.fast(agent(at.model, [one], response_format=ToolStrategy(Answer))).invoke(INPUT)
    assert made["structured_response"] == Answer(text=LONG) and at.llm.warmed == []

    bound = at.model.bind_tools([one, three])
    elsewhere = StateGraph(MessagesState)
    elsewhere.add_node("think", lambda state: {"messages": [bound.invoke(state["messages"])]})
    elsewhere.add_node("act", ToolNode([one, three]))
    elsewhere.add_node("end", lambda state: {"messages": [at.model.invoke("something else")]})
    elsewhere.add_edge(START, "think")
    elsewhere.add_conditional_edges("think", tools_condition, {"tools": "act", "__end__": "end"})
    elsewhere.add_edge("act", "end")
    at.llm.writes = lambda prompt: [LONG, call("one"), call("three")] if prompt.tools else ["done"]
    made = run(at.fast(elsewhere.compile()), "invoke")
    assert len(made) == 5 and at.llm.warmed == []
