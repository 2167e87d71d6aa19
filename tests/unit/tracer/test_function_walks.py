"""What is known of a function after its walk, and what whoever goes on with it can do with that."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from function_world import World, beside, world
from langchain_core.messages import AIMessage, HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langgraph.types import Command, Send
from pool_leaves import PoolChat, PoolRetriever

from teola_plugin.engines import profiles
from teola_plugin.graph import INPUT, Ref, Role, build_pgraph
from teola_plugin.graph.text import format_graph
from teola_plugin.tracer.draft import Draft
from teola_plugin.tracer.functions import (
    UNKNOWN_VALUE,
    Fields,
    FunctionSummary,
    Instance,
    ItemList,
    KnownValue,
    SendPerItem,
    Spread,
    Symbol,
    materialize,
    summarize_function,
    trace_node,
)

LLM, RETRIEVER = PoolChat(), PoolRetriever()
ANSWER = ChatPromptTemplate.from_template("Answer {question} with {context}")
QUESTION = Ref(INPUT).at("question")


def walked(func: object, draft: Draft | None = None, **state: Symbol) -> FunctionSummary:
    given = Fields(state or {"question": QUESTION})
    return summarize_function(func, {"state": given}, Draft() if draft is None else draft)


def text(draft: Draft) -> str:
    return format_graph(build_pgraph(draft.template(Ref(INPUT), "walk")), depths=False)


# ------------------------------------------------------------ what it returns


def retrieve(state: Any) -> Any:
    return {"documents": RETRIEVER.invoke(state["question"]), "tries": 1}


def answer(state: Any) -> Any:
    said = (ANSWER | LLM).invoke({"question": state["question"], "context": state["documents"]})
    return {"messages": [AIMessage(content=said.content, name="writer")], "documents": []}


def commands(state: Any) -> Command[Literal["end"]]:
    return Command(update={"answer": LLM.invoke(state["question"]).content}, goto="end")


def routes(state: Any) -> str:
    return "end"


def routes_to_two(state: Any) -> list[str]:
    return ["one", "two"]


def nothing(state: Any) -> None:
    LLM.invoke(state["question"])


def sends(state: Any) -> list[Send]:
    plan = LLM.with_structured_output(None) if False else LLM
    topics = plan.invoke(state["question"]).content.split(",")
    return [Send("write", {"topic": topic.strip(), "question": state["question"]}) for topic in topics]


def test_updates_by_key() -> None:
    made = walked(retrieve)
    assert made.updates is not None and set(made.updates) == {"documents", "tries"}
    assert made.updates["documents"] == Ref("retrieve.retrieve.documents")
    tries = made.updates["tries"]
    assert isinstance(tries, KnownValue) and tries.value == 1
    assert (made.reached_end, made.certain, made.runs_user_code, made.uses_engines) == (True, True, False, True)


def test_a_command_updates_and_goes() -> None:
    made = walked(commands)
    assert made.goto == ("end",) and made.updates is not None and list(made.updates) == ["answer"]


@pytest.mark.parametrize(("func", "names"), [(routes, ("end",)), (routes_to_two, ("one", "two")), (nothing, ())])
def test_names_that_a_router_returns(func: Any, names: tuple[str, ...]) -> None:
    made = walked(func)
    assert made.goto == names and made.certain


def test_a_function_that_returns_nothing_updates_nothing() -> None:
    assert walked(nothing).updates == {}


def test_what_is_sent_for_each_item_keeps_what_it_reads() -> None:
    draft = Draft()
    made = walked(sends, draft)
    assert isinstance(made.value, SendPerItem)
    assert materialize(draft, made.value.items, "items") is not None
    assert {ref.producer for ref in made.value.captures.values()} <= {INPUT, *draft.components}
    draft.template(Ref(INPUT), "whole")


# ------------------------------------------------------------ one after the other


def test_the_next_function_reads_what_the_one_before_it_makes() -> None:
    draft = Draft()
    first = walked(retrieve, draft)
    assert first.updates is not None
    second = walked(answer, draft, question=QUESTION, **first.updates)
    draft.order += [(a, b) for a in first.span.tails for b in second.span.heads]
    prefilling = build_pgraph(draft.template(Ref(INPUT), "two"))["answer.model.prefilling"]
    assert dict(prefilling.inputs) == {"question": QUESTION, "context": Ref("retrieve.retrieve.documents")}
    assert second.updates is not None
    (message,) = second.updates["messages"].items  # type: ignore[union-attr]
    assert isinstance(message, Instance) and message.kind is AIMessage


def test_the_same_function_twice_has_names_of_its_own() -> None:
    draft = Draft()
    walked(retrieve, draft)
    walked(retrieve, draft)
    assert {"retrieve.retrieve", "retrieve.retrieve2"} <= set(draft.components)


def grows(state: Any) -> Any:
    return {"messages": [LLM.invoke([SystemMessage("Be brief."), *state["messages"]])]}


def test_a_list_of_messages_is_known_message_by_message() -> None:
    """So that its beginning can be prefilled while the last one is written."""
    draft = Draft()
    said = walked(nothing, draft)
    old = ItemList((Spread(Ref(INPUT).at("messages")), KnownValue(HumanMessage("and then?")), UNKNOWN_VALUE))
    made = walked(grows, draft, messages=old)
    (asked,) = [c for c in draft.components.values() if c.role is Role.GENERATION and c.name.startswith("grows")]
    assert [part.variable or part.text for part in asked.prompt] == [
        "\nsystem: Be brief.",
        "messages",
        "\nhuman: and then?\nhuman: ".replace("human", "user"),
        "code",
        "\nassistant: ",
    ]
    assert said.uses_engines and made.updates == {"messages": made.updates["messages"]}  # type: ignore[index]


def test_values_are_written_out_where_the_state_is_known() -> None:
    draft = Draft()
    walked(retrieve, draft, question=KnownValue("oats"))
    constant, *_ = draft.components.values()
    assert constant.role is Role.CALL and draft.calls[constant.name]() == "oats"


def test_an_unknown_state_leaves_nothing_but_what_needs_none_of_it() -> None:
    draft = Draft()
    made = walked(answer, draft, question=UNKNOWN_VALUE)
    assert made.updates is not None and made.updates["documents"] is not UNKNOWN_VALUE
    (message,) = made.updates["messages"].items  # type: ignore[union-attr]
    assert message.fields["content"] is UNKNOWN_VALUE
    assert [c.role for c in draft.components.values()] == [Role.OPAQUE, Role.GENERATION]


# ------------------------------------------------------------ on engines


@pytest.fixture
def farm() -> Any:
    made = world(profiles.rtx3090()["llm"])
    yield made
    made.pool.close()


RULES = (
    "You are a careful farmer who answers in one line, from the notes alone, and who says so when they do not tell. "
    * 6
)


def secret(value: Any) -> Any:
    return globals()["RULES"][: len(value)]


def node_of(farm: World) -> Any:
    llm = farm.llm

    def node(state: Any) -> Any:
        first = llm.invoke(f"Which of the notes is about {state['question']}?").content
        return {"answer": llm.invoke(f"{RULES} Question: {state['question']} Note: {secret(first)}").content}

    return node


def test_the_beginning_of_a_prompt_that_waits_for_user_code_is_prefilled(farm: World) -> None:
    node, state = node_of(farm), {"question": "oats"}
    made = beside(farm, trace_node(node, "state"), lambda: node(state), state, 1)
    assert made.early == 1 and made.warmed >= 1
    assert sum(made.asked.values()) == 2


def guarded(farm: World) -> Any:
    llm = farm.llm

    def node(state: Any) -> Any:
        check = llm.invoke(f"Is this allowed? {state['question']}").content
        if secret(check) == "no":
            return {"answer": "I may not say."}
        return {"answer": llm.invoke(f"Answer {state['question']}").content}

    return node


def guarded_each(farm: World) -> Any:
    one = guarded(farm)

    def node(state: Any) -> Any:
        return {"answers": [one({"question": word}) for word in state["question"].split()]}

    return node


@pytest.mark.parametrize("make", [guarded, guarded_each])
@pytest.mark.parametrize(("speculate", "early"), [("auto", 2), ("off", 1)])
def test_what_may_be_chosen_is_begun_where_that_is_wanted(farm: World, make: Any, speculate: str, early: int) -> None:
    node, state = make(farm), {"question": "oats"}
    made = beside(farm, trace_node(node, "state"), lambda: node(state), state, early, speculate=speculate)
    assert (made.early, made.wasted, sum(made.asked.values())) == (early, 0, 2)
