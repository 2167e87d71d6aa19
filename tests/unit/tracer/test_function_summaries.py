"""Tests of summaries of functions: results, changes, and the components that the next function continues with."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from function_resources import Resources, call_prefetched, make_resources
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langgraph.types import Command, Send
from pool_leaves import PoolChat, PoolRetriever

from teola_plugin.engines import profiles
from teola_plugin.graph import INPUT, Ref, Role, build_pgraph
from teola_plugin.graph.graph import format_graph
from teola_plugin.tracer.draft import Draft
from teola_plugin.tracer.functions import (
    UNKNOWN_VALUE,
    Fields,
    FunctionSummary,
    Instance,
    InstancePerItem,
    ItemList,
    KnownValue,
    Spread,
    Symbol,
    materialize,
    summarize_function,
    trace_node,
)

LLM, RETRIEVER = PoolChat(), PoolRetriever()
ANSWER = ChatPromptTemplate.from_template("Answer {question} with {context}")
QUESTION = Ref(INPUT).at("question")


def summarized(func: object, draft: Draft | None = None, **state: Symbol) -> FunctionSummary:
    argument = Fields(state or {"question": QUESTION})
    return summarize_function(func, {"state": argument}, Draft() if draft is None else draft)


def text(draft: Draft) -> str:
    return format_graph(build_pgraph(draft.template(Ref(INPUT), "walk")), depths=False)


# ------------------------------------------------------------ what it returns


def retrieve(state: Any) -> Any:
    return {"documents": RETRIEVER.invoke(state["question"]), "tries": 1}


def answer(state: Any) -> Any:
    reply = (ANSWER | LLM).invoke({"question": state["question"], "context": state["documents"]})
    return {"messages": [AIMessage(content=reply.content, name="writer")], "documents": []}


def commands(state: Any) -> Command[Literal["end"]]:
    return Command(update={"answer": LLM.invoke(state["question"]).content}, goto="end")


def routes(state: Any) -> str:
    return "end"


def routes_to_two(state: Any) -> list[str]:
    return ["one", "two"]


def returns_nothing(state: Any) -> None:
    LLM.invoke(state["question"])


def sends(state: Any) -> list[Send]:
    plan = LLM.with_structured_output(None) if False else LLM
    topics = plan.invoke(state["question"]).content.split(",")
    return [Send("write", {"topic": topic.strip(), "question": state["question"]}) for topic in topics]


def test_summary_lists_state_updates_by_key() -> None:
    summary = summarized(retrieve)
    assert summary.updates is not None and set(summary.updates) == {"documents", "tries"}
    assert summary.updates["documents"] == Ref("retrieve.retrieve.documents")
    tries = summary.updates["tries"]
    assert isinstance(tries, KnownValue) and tries.value == 1
    assert (summary.reached_end, summary.certain, summary.runs_user_code, summary.uses_engines) == (
        True,
        True,
        False,
        True,
    )


def test_a_command_has_updates_and_a_target() -> None:
    summary = summarized(commands)
    assert summary.goto == ("end",) and summary.updates is not None and list(summary.updates) == ["answer"]


@pytest.mark.parametrize(
    ("func", "names"), [(routes, ("end",)), (routes_to_two, ("one", "two")), (returns_nothing, ())]
)
def test_router_summary_lists_the_names_it_returns(func: Any, names: tuple[str, ...]) -> None:
    summary = summarized(func)
    assert summary.goto == names and summary.certain


def test_a_function_that_returns_nothing_updates_nothing() -> None:
    assert summarized(returns_nothing).updates == {}


def test_a_send_for_each_item_keeps_the_values_that_it_reads() -> None:
    draft = Draft()
    summary = summarized(sends, draft)
    assert isinstance(summary.value, InstancePerItem)
    assert materialize(draft, summary.value.items, "items") is not None
    assert {ref.producer for ref in summary.value.captures.values()} <= {INPUT, *draft.components}
    draft.template(Ref(INPUT), "whole")


# ------------------------------------------------------------ one after the other


def test_the_next_function_reads_the_values_of_the_one_before_it() -> None:
    draft = Draft()
    first = summarized(retrieve, draft)
    assert first.updates is not None
    second = summarized(answer, draft, question=QUESTION, **first.updates)
    draft.order += [(a, b) for a in first.span.tails for b in second.span.heads]
    prefilling = build_pgraph(draft.template(Ref(INPUT), "two"))["answer.model.prefilling"]
    assert dict(prefilling.inputs) == {"question": QUESTION, "context": Ref("retrieve.retrieve.documents")}
    assert second.updates is not None
    (message,) = second.updates["messages"].items  # type: ignore[union-attr]
    assert isinstance(message, Instance) and message.kind is AIMessage


def test_components_of_the_same_function_read_twice_have_different_names() -> None:
    draft = Draft()
    summarized(retrieve, draft)
    summarized(retrieve, draft)
    assert {"retrieve.retrieve", "retrieve.retrieve2"} <= set(draft.components)


def grows(state: Any) -> Any:
    return {"messages": [LLM.invoke([SystemMessage("Be brief."), *state["messages"]])]}


def test_a_list_of_messages_is_known_message_by_message() -> None:
    """The beginning of the prompt can be prefilled while its last message is written."""
    draft = Draft()
    first = summarized(returns_nothing, draft)
    messages = ItemList((Spread(Ref(INPUT).at("messages")), KnownValue(HumanMessage("and then?")), UNKNOWN_VALUE))
    second = summarized(grows, draft, messages=messages)
    (generation,) = [c for c in draft.components.values() if c.role is Role.GENERATION and c.name.startswith("grows")]
    assert [part.variable or part.text for part in generation.prompt] == [
        "\nsystem: Be brief.",
        "messages",
        "\nhuman: and then?\nhuman: ".replace("human", "user"),
        "code",
        "\nassistant: ",
    ]
    assert first.uses_engines and second.updates == {"messages": second.updates["messages"]}  # type: ignore[index]


def test_known_state_values_become_constant_components() -> None:
    draft = Draft()
    summarized(retrieve, draft, question=KnownValue("oats"))
    constant, *_ = draft.components.values()
    assert constant.role is Role.CALL and draft.calls[constant.name]() == "oats"


def test_components_that_need_an_unknown_state_are_left_out() -> None:
    draft = Draft()
    summary = summarized(answer, draft, question=UNKNOWN_VALUE)
    assert summary.updates is not None and summary.updates["documents"] is not UNKNOWN_VALUE
    (message,) = summary.updates["messages"].items  # type: ignore[union-attr]
    assert message.fields["content"] is UNKNOWN_VALUE
    assert [c.role for c in draft.components.values()] == [Role.OPAQUE, Role.GENERATION]


# ------------------------------------------------------------ on engines


@pytest.fixture
def resources() -> Any:
    resources = make_resources(profiles.rtx3090()["llm"])
    yield resources
    resources.pool.close()


RULES = (
    "You are a careful farmer who answers in one line, from the notes alone, and who says so when they do not tell. "
    * 6
)


def opaque_code(value: Any) -> Any:
    return globals()["RULES"][: len(value)]


def node_of(resources: Resources) -> Any:
    llm = resources.llm

    def node(state: Any) -> Any:
        first = llm.invoke(f"Which of the notes is about {state['question']}?").content
        return {"answer": llm.invoke(f"{RULES} Question: {state['question']} Note: {opaque_code(first)}").content}

    return node


def test_the_beginning_of_a_prompt_that_waits_for_user_code_is_prefilled(resources: Resources) -> None:
    node, state = node_of(resources), {"question": "oats"}
    result = call_prefetched(resources, trace_node(node, "state"), lambda: node(state), state, 1)
    assert result.prefetched == 1 and result.warmups >= 1
    assert sum(result.requests.values()) == 2


def guarded(resources: Resources) -> Any:
    llm = resources.llm

    def node(state: Any) -> Any:
        check = llm.invoke(f"Is this allowed? {state['question']}").content
        if opaque_code(check) == "no":
            return {"answer": "I may not say."}
        return {"answer": llm.invoke(f"Answer {state['question']}").content}

    return node


def guarded_each(resources: Resources) -> Any:
    one = guarded(resources)

    def node(state: Any) -> Any:
        return {"answers": [one({"question": word}) for word in state["question"].split()]}

    return node


@pytest.mark.parametrize("make", [guarded, guarded_each])
@pytest.mark.parametrize(("speculate", "prefetched"), [("auto", 2), ("off", 1)])
def test_possible_branch_is_prefetched_only_with_speculation(
    resources: Resources, make: Any, speculate: str, prefetched: int
) -> None:
    node, state = make(resources), {"question": "oats"}
    result = call_prefetched(
        resources, trace_node(node, "state"), lambda: node(state), state, prefetched, speculate=speculate
    )
    assert (result.prefetched, result.wasted, sum(result.requests.values())) == (prefetched, 0, 2)
