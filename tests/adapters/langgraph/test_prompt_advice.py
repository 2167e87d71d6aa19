"""What breaks the reuse of a prompt's beginning, found in the source of functions that make prompts."""

from __future__ import annotations

import datetime as dt
import random
import time
import uuid
from datetime import date, datetime
from functools import partial
from typing import Any

import pytest
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.retrievers import BaseRetriever
from langchain_core.tools import tool

from teola_plugin.adapters.langgraph.prompt_advice import Variation, analyse, varying_in_prompts

llm: Any = None
log: Any = None
names = {"b", "a"}
listed = ["a", "b"]


class Finds(BaseRetriever):
    def _get_relevant_documents(self, query: str, *, run_manager: Any) -> Any:
        raise AssertionError("it is not to run")


finds = Finds()


@tool
def adding(a: int) -> int:
    """Adds."""
    return a


tools = {adding.name}


# ------------------------------------------------------------ what is told


def in_an_f_string(state: Any) -> Any:
    return llm.invoke(f"It is {datetime.now()}. {state['question']}")


def in_a_message(state: Any) -> Any:
    return llm.invoke([SystemMessage(f"Now: {dt.datetime.utcnow().isoformat()}"), HumanMessage(state["question"])])


def by_a_name(state: Any) -> Any:
    now = time.time()
    said = "It is " + str(now)
    return llm.invoke([("system", said), ("human", state["question"])])


def by_format(state: Any) -> Any:
    return llm.invoke("{}: {}".format(uuid.uuid4().hex, state["question"]))


def imported_inside(state: Any) -> Any:
    import secrets as safe
    from time import strftime as shown

    return llm.invoke(shown("%H:%M") + safe.token_hex(4))


def of_a_helper(state: Any) -> Any:
    return llm.invoke(_head() + state["question"])


def _head() -> str:
    return f"Session {random.randint(1, 9)}. "


async def asked_in_a_loop(state: Any) -> Any:
    return [await llm.ainvoke([HumanMessage(f"{uuid.uuid1()} {one}")]) for one in state["all"]]


def by_a_template(state: Any) -> Any:
    prompt = ChatPromptTemplate.from_messages([("system", "It is {now}."), ("human", "{q}")])
    return (prompt.partial(now=lambda: datetime.now().isoformat()) | llm).invoke({"q": state["question"]})


def system_prompt(request: Any) -> str:
    return f"You are helpful. It is {time.ctime()}."


def joined_from_a_set(state: Any) -> Any:
    return llm.invoke("Use one of " + ", ".join(names))


def joined_from_a_made_set(state: Any) -> Any:
    words = {word.lower() for word in state["words"]}
    return llm.invoke(f"Use {list(words)}")


def tools_in_a_set(state: Any) -> Any:
    return llm.bind_tools(list(tools)).invoke(state["messages"])


def tools_of_a_set(state: Any) -> Any:
    return llm.bind_tools([*set(listed)]).invoke(state["messages"])


TOLD = [
    (in_an_f_string, Variation.TIME, "datetime.now()"),
    (in_a_message, Variation.TIME, "dt.datetime.utcnow()"),
    (by_a_name, Variation.TIME, "time.time()"),
    (by_format, Variation.RANDOM, "uuid.uuid4()"),
    (imported_inside, Variation.TIME, "shown('%H:%M')"),
    (of_a_helper, Variation.RANDOM, "_head()"),
    (asked_in_a_loop, Variation.RANDOM, "uuid.uuid1()"),
    (by_a_template, Variation.TIME, "datetime.now()"),
    (system_prompt, Variation.TIME, "time.ctime()"),
    (joined_from_a_set, Variation.ORDER, "names"),
    (joined_from_a_made_set, Variation.ORDER, "{word.lower() for word in state['words']}"),
    (tools_in_a_set, Variation.ORDER, "tools"),
    (tools_of_a_set, Variation.ORDER, "set(listed)"),
]


@pytest.mark.parametrize(("function", "kind", "source"), TOLD)
def test_told(function: Any, kind: Variation, source: str) -> None:
    [found, *more] = varying_in_prompts(function)
    assert (found.variation, found.source, found.function) == (kind, source, function.__name__) and not more
    first = function.__code__.co_firstlineno
    assert first < found.line < first + 6


def test_the_words() -> None:
    [found] = varying_in_prompts(in_an_f_string)
    assert str(found) == (
        f"in_an_f_string, line {found.line}: `datetime.now()` is the time, another in every call; "
        "put it last: what stands behind it is computed anew."
    )
    [order] = varying_in_prompts(joined_from_a_set)
    assert str(order).endswith("`names` is a set, whose order is another in every process; sort it.")


# ------------------------------------------------------------ what is not


def measured(state: Any) -> Any:
    began = time.perf_counter()
    answer = llm.invoke(state["question"])
    log.info(f"took {time.perf_counter() - began}")
    return answer


def of_the_day(state: Any) -> Any:
    now = datetime.now()
    return llm.invoke(f"Today is {date.today()}, {now:%Y-%m-%d}, {now.strftime('%d.%m.')}, {now.date()}, {now.year}.")


def constant(state: Any) -> Any:
    return llm.invoke([SystemMessage("You are helpful."), HumanMessage(state["question"])])


def in_its_order(state: Any) -> Any:
    known = set(state["words"])
    if "a" in known:
        return llm.bind_tools(sorted(tools)).invoke(f"{len(known)} of {', '.join(sorted(names))} in {listed}")
    return None


def of_a_search(state: Any) -> Any:
    return finds.invoke(f"news of {datetime.now()}")


def a_file(state: Any) -> Any:
    with open(f"/tmp/{uuid.uuid4()}") as file:
        return file.read()


def decided_by_the_clock(state: Any) -> Any:
    return llm.invoke("Good morning" if datetime.now().hour < 12 else "Good day") if time.time() > 0 else None


@pytest.mark.parametrize("function", [measured, constant, in_its_order, of_a_search, a_file, of_the_day])
def test_not_told(function: Any) -> None:
    assert varying_in_prompts(function) == ()


@pytest.mark.parametrize("function", [len, print, partial(len), Finds, llm, "text", eval("lambda state: 1")])
def test_of_what_has_no_source_nothing_is_said(function: Any) -> None:
    assert varying_in_prompts(function) == ()


# ------------------------------------------------------------ what goes on into the state


def clock(state: Any) -> Any:
    return {"now": datetime.now().isoformat(), "question": state["question"]}


def test_what_a_node_writes_into_the_state() -> None:
    found = analyse(clock)
    assert found.in_prompts == () and list(found.returned) == ["now"]
    assert found.returned["now"].source == "datetime.now()"


def test_methods_and_lambdas() -> None:
    class Node:
        def ask(self, state: Any) -> Any:
            return llm.invoke(f"{time.time()}")

    [found] = varying_in_prompts(Node().ask)
    assert found.function == "Node.ask"
    [other] = varying_in_prompts(lambda state: llm.invoke(f"{time.time()}"))
    assert other.variation is Variation.TIME
