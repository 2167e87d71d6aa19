"""Nodes that read the messages of the state: certain calls are prefetched, and the messages stay the original's."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable
from itertools import pairwise
from typing import Annotated, Any

import pytest
from langchain_core.messages import AnyMessage, BaseMessage, HumanMessage, RemoveMessage
from langchain_core.prompts import ChatPromptTemplate
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.message import REMOVE_ALL_MESSAGES, add_messages
from langgraph.types import Command, interrupt
from support.hosted_model import LATENCY_S, HostedModel

from teola_plugin import accelerate

NAMES = ("market", "news", "sentiment")
UUID4 = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}")
RUN_ID = re.compile(r"lc_run-[0-9a-f-]+")

Clear = Callable[[Any], dict[str, Any]]


class State(MessagesState, total=False):
    """The state of the analysts."""

    company: str
    market_report: str
    news_report: str
    sentiment_report: str
    decision: str


def clear_messages(state: State) -> dict[str, Any]:
    removals = [RemoveMessage(id=str(message.id)) for message in state["messages"]]
    return {"messages": [*removals, HumanMessage("Continue")]}


def clear_by_sum(state: State) -> dict[str, Any]:
    messages = state["messages"]
    return {"messages": [RemoveMessage(id=m.id) for m in messages] + [HumanMessage(content="Continue")]}


def clear_all(state: State) -> dict[str, Any]:
    return {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), HumanMessage(f"Continue with {state['company']}")]}


def remove_the_answer(state: State) -> dict[str, Any]:
    return {"messages": [RemoveMessage(id=state["messages"][-1].id)]}


def analysts(model: HostedModel, clear: Clear = clear_messages, **options: Any) -> Any:
    """Build a graph of analysts, each of whom clears the messages behind it, and of a trader."""

    def create_analyst(name: str) -> Any:
        prompt = ChatPromptTemplate.from_messages(
            [("system", "You are {name} of {company}"), ("placeholder", "{messages}")]
        )
        chain = prompt | model

        def analyst(state: State) -> dict[str, Any]:
            result = chain.invoke({"name": name, "company": state["company"], "messages": state["messages"]})
            return {"messages": [result], f"{name}_report": result.content}

        return analyst

    def trader(state: State) -> dict[str, Any]:
        reports = "\n".join(str(state[f"{name}_report"]) for name in NAMES)  # type: ignore[literal-required]
        return {"decision": model.invoke(f"Decide on\n{reports}").content}

    builder = StateGraph(State)
    nodes: dict[str, Any] = {}
    for name in NAMES:
        nodes |= {f"{name}_analyst": create_analyst(name), f"clear_{name}": clear}
    nodes["trader"] = trader
    for name, node in nodes.items():
        builder.add_node(name, node)
    for one, other in pairwise([START, *nodes]):
        builder.add_edge(one, other)
    return builder.compile(**options)


def state_input() -> dict[str, Any]:
    return {"company": "ACME", "messages": [HumanMessage("ACME"), HumanMessage("soon", id="1")]}


def without_drawn_ids(value: Any) -> str:
    """Return a value as a text, with the form of each id that the frameworks drew in its place."""
    return UUID4.sub("<drawn>", RUN_ID.sub("<run>", repr(value)))


def called(graph: Any, way: str) -> Any:
    """Return what a graph gives in one way of calling."""
    if way == "invoke":
        return without_drawn_ids(graph.invoke(state_input()))
    if way == "updates":
        return without_drawn_ids(list(graph.stream(state_input(), stream_mode="updates")))
    if way == "ainvoke":
        return without_drawn_ids(asyncio.run(graph.ainvoke(state_input())))

    async def read() -> list[Any]:
        if way == "messages":
            pieces = graph.astream(state_input(), stream_mode="messages")
            return [without_drawn_ids(message) async for message, _ in pieces]
        events = graph.astream_events(state_input(), version="v2")
        return [(event["event"], event["name"], without_drawn_ids(event["data"])) async for event in events]

    return asyncio.run(read())


WAYS = ("invoke", "ainvoke", "updates", "messages", "events")
CLEARING = {clear.__name__: clear for clear in (clear_messages, clear_by_sum, clear_all, remove_the_answer)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("clear", CLEARING.values(), ids=CLEARING)
def test_calls_of_nodes_that_clear_messages_overlap(clear: Clear, way: str) -> None:
    plain, fast = HostedModel(), HostedModel()
    expected = called(analysts(plain, clear), way)

    result = called(accelerate(analysts(fast, clear)), way)

    assert result == expected
    assert fast.prompts == plain.prompts
    assert fast.most_at_once > 1


def test_messages_from_the_state_have_ids() -> None:
    class ReadsIds(HostedModel):
        def _begin(self, messages: list[BaseMessage]) -> str:
            forms = [UUID4.fullmatch(m.id or "") is not None for m in messages if m.type == "human"]
            return super()._begin([HumanMessage(f"{forms} {messages[0].content}")])

    plain, fast = ReadsIds(), ReadsIds()
    analysts(plain).invoke(state_input())

    accelerate(analysts(fast)).invoke(state_input())

    assert fast.prompts == plain.prompts


def test_checkpoints_equal_the_originals() -> None:
    histories = []
    for make in (lambda graph: graph, accelerate):
        graph = make(analysts(HostedModel(), checkpointer=InMemorySaver()))
        config = {"configurable": {"thread_id": "1"}}
        graph.invoke(state_input(), config)
        graph.invoke({"company": "Other", "messages": [HumanMessage("again")]}, config)
        histories.append([without_drawn_ids(snapshot.values) for snapshot in graph.get_state_history(config)])

    assert histories[0] == histories[1]


@pytest.mark.parametrize("way", ["invoke", "ainvoke"])
def test_error_of_an_analyst_is_the_originals(way: str) -> None:
    accelerated = accelerate(analysts(HostedModel(fails_on="news of")))

    with pytest.raises(ValueError, match="refused: You are news of ACME"):
        called(accelerated, way)


def test_interrupted_analysts_resume_as_in_the_original() -> None:
    def clear(state: State) -> dict[str, Any]:
        word = interrupt("go on?")
        return {"messages": [RemoveMessage(id=REMOVE_ALL_MESSAGES), HumanMessage(word)]}

    results = []
    models = HostedModel(), HostedModel()
    for model, make in zip(models, (lambda graph: graph, accelerate), strict=True):
        graph = make(analysts(model, clear, checkpointer=InMemorySaver()))
        config = {"configurable": {"thread_id": "1"}}
        graph.invoke(state_input(), config)
        for word in ("one", "two", "three"):
            result = graph.invoke(Command(resume=word), config)
        results.append((without_drawn_ids(result), model.prompts))

    assert results[0] == results[1]


def test_cancelled_analysts_leave_no_call_running() -> None:
    model = HostedModel()
    graph = accelerate(analysts(model))

    async def cancel() -> None:
        task = asyncio.create_task(graph.ainvoke(state_input()))
        await asyncio.sleep(LATENCY_S / 2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await asyncio.sleep(2 * LATENCY_S)

    asyncio.run(cancel())
    assert model._running == 0


# ------------------------------------------------------------ messages that are not known before


def keep_the_last(state: State) -> dict[str, Any]:
    return {"messages": [RemoveMessage(id=m.id) for m in state["messages"][:-1]]}


def keep_human_messages(state: State) -> dict[str, Any]:
    return {"messages": [RemoveMessage(id=m.id) for m in state["messages"] if m.type == "ai"]}


def replace_a_message(state: State) -> dict[str, Any]:
    return {"messages": [HumanMessage("Another", id="1")]}


UNCERTAIN = {clear.__name__: clear for clear in (keep_the_last, keep_human_messages, replace_a_message)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("clear", UNCERTAIN.values(), ids=UNCERTAIN)
def test_no_call_is_made_that_the_original_does_not_make(clear: Clear, way: str) -> None:
    plain, fast = HostedModel(), HostedModel()
    expected = called(analysts(plain, clear), way)

    result = called(accelerate(analysts(fast, clear)), way)

    assert result == expected
    assert fast.prompts == plain.prompts


def test_removing_an_unknown_message_fails_as_in_the_original() -> None:
    def clear(state: State) -> dict[str, Any]:
        return {"messages": [RemoveMessage(id="nowhere")]}

    with pytest.raises(ValueError, match="nowhere"):
        accelerate(analysts(HostedModel(), clear)).invoke(state_input())


def test_message_channel_of_any_name_is_understood() -> None:
    class Interviews(State, total=False):
        interviews: Annotated[list[AnyMessage], add_messages]

    def build(model: HostedModel) -> Any:
        def ask(state: Interviews) -> dict[str, Any]:
            reply = model.invoke("ask")
            return {"interviews": [HumanMessage("a question")], "decision": reply.content}

        def answer(state: Interviews) -> dict[str, Any]:
            return {"interviews": model.invoke(state["interviews"])}

        builder = StateGraph(Interviews).add_sequence([ask, answer])
        return builder.add_edge(START, "ask").compile()

    plain, fast = HostedModel(), HostedModel()
    given = {"interviews": [HumanMessage("first")]}
    expected = without_drawn_ids(build(plain).invoke(given))

    result = without_drawn_ids(accelerate(build(fast)).invoke({"interviews": [HumanMessage("first")]}))

    assert result == expected
    assert fast.prompts == plain.prompts
    assert fast.most_at_once == 2
