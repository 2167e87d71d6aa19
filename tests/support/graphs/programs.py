"""Graphs made at random of small nodes, whose prompts may depend on what other nodes wrote."""

from __future__ import annotations

import asyncio
import operator
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command, Send
from typing_extensions import TypedDict

from support.graphs.case import Case, Turn
from support.graphs.kit import Kit, joined
from support.request_counts import POISON


class State(TypedDict, total=False):
    a: Any
    b: Any
    c: Any
    d: Any
    said: Annotated[list[Any], operator.add]
    found: Annotated[list[Any], operator.add]


KEYS = "abcd"
Node = Callable[[State], Any]


def ask(kit: Kit, key: str, other: str, to: str) -> Node:
    llm = kit.llm

    def node(state: State) -> Any:
        return {to: llm.invoke(f"{to} of {state.get(key)}").content}

    return node


def ask_twice(kit: Kit, key: str, other: str, to: str) -> Node:
    llm = kit.llm

    def node(state: State) -> Any:
        first = llm.invoke(f"first {state.get(key) or 'none'}").content
        return {to: llm.invoke("second " + str(state.get(other)) + " " + first).content, "said": [first]}

    return node


def ask_one_of_two(kit: Kit, key: str, other: str, to: str) -> Node:
    llm = kit.llm

    def node(state: State) -> Any:
        if len(str(state.get(key))) % 2:
            return {to: llm.invoke(f"odd {state.get(key)}").content}
        text = llm.invoke(f"even {state.get(key)}").content
        return {to: text.upper(), "said": [text]}

    return node


def ask_for_each(kit: Kit, key: str, other: str, to: str) -> Node:
    llm = kit.llm

    def node(state: State) -> Any:
        made = []
        for item in state.get("said", []):
            made.append(llm.invoke(f"each {item}").content)
        return {to: "|".join(made)}

    return node


def ask_in_a_list(kit: Kit, key: str, other: str, to: str) -> Node:
    llm = kit.llm

    def node(state: State) -> Any:
        return {"found": [llm.invoke(f"one {item}").content for item in state.get("found", [])[:3]]}

    return node


def ask_in_a_batch(kit: Kit, key: str, other: str, to: str) -> Node:
    llm = kit.llm

    def node(state: State) -> Any:
        return {"said": [m.content for m in llm.batch([f"b {state.get(key)}", f"b {state.get(other)}"])]}

    return node


def ask_a_chain(kit: Kit, key: str, other: str, to: str) -> Node:
    chain = ChatPromptTemplate.from_template("Chain {one} with {two}") | kit.llm | StrOutputParser()

    def node(state: State) -> Any:
        return {to: chain.invoke({"one": state.get(key), "two": state.get("said")})}

    return node


def ask_in_vain(kit: Kit, key: str, other: str, to: str) -> Node:
    llm = kit.llm

    def node(state: State) -> Any:
        try:
            return {to: llm.invoke(f"{POISON} {state.get(key)}").content}
        except Exception as error:
            return {to: type(error).__name__}

    return node


def search(kit: Kit, key: str, other: str, to: str) -> Node:
    retriever = kit.retriever

    def node(state: State) -> Any:
        found = retriever.invoke(str(state.get(key)))
        return {to: joined(found), "found": [document.page_content for document in found]}

    return node


def change_in_place(kit: Kit, key: str, other: str, to: str) -> Node:
    def node(state: State) -> Any:
        said = state.get("said", [])
        said.append("changed")
        return {to: f"{key}{len(said)}"}

    return node


def ask_in_async_code(kit: Kit, key: str, other: str, to: str) -> Node:
    llm = kit.llm

    async def node(state: State) -> Any:
        one, two = await asyncio.gather(llm.ainvoke(f"x {state.get(key)}"), llm.ainvoke(f"y {state.get(other)}"))
        return {to: one.content + two.content}

    return node


KINDS = (ask, ask, ask_twice, ask_one_of_two, ask_for_each, ask_in_a_list, ask_in_a_batch, ask_a_chain, ask_in_vain,
         search, change_in_place)  # fmt: skip


def jump(kit: Kit, key: str, to: str, target: str) -> Node:
    """Return a node that calls the model and goes to `target` by a command."""
    llm = kit.llm

    def node(state: State) -> Any:
        return Command(update={to: llm.invoke(f"jump {state.get(key)}").content}, goto=target)

    return node


def piece(kit: Kit) -> Node:
    """Return the node that `sender` sends items to."""
    llm = kit.llm

    def node(given: Any) -> Any:
        return {"found": [llm.invoke(f"piece {given['item']}").content]}

    return node


def by_length(key: str, targets: list[str]) -> Callable[[State], str]:
    return lambda state: targets[len(str(state.get(key))) % len(targets)]


def sender(state: State) -> Any:
    return [Send("piece", {"item": item}) for item in state.get("said", [])[:3]] or END


@dataclass(frozen=True)
class Step:
    """A node of a random graph, and how the graph continues after it."""

    make: Callable[..., Node] | None
    """Creates the node. If None, the node jumps to the next one."""
    keys: tuple[str, str, str]
    on: str
    targets: tuple[int, ...]


def program(seed: int) -> Case:
    """Return a random graph of up to seven nodes with edges to later ones. It is called twice on one thread."""
    draw = random.Random(seed)
    is_async = draw.random() < 0.3
    kinds = (*KINDS, None, *([ask_in_async_code] * 3 if is_async else []))
    count = draw.randint(2, 7)
    steps = [
        Step(
            draw.choice(kinds) if at < count - 1 else ask,
            (draw.choice(KEYS), draw.choice(KEYS), draw.choice(KEYS)),
            draw.choice(("edge", "edge", "edge", "route", "send")),
            tuple(draw.sample(range(at + 1, count), min(count - at - 1, 2))),
        )
        for at in range(count)
    ]
    first = {"a": "start", "b": draw.choice(["x", "yy", "what is a lambda?"]), "said": ["one", "two"]}
    turns = tuple(Turn(given, options={"durability": "sync"}) for given in (first, {"c": "again"}))
    return Case(lambda kit: _built(kit, steps), turns, races=True, only="async" if is_async else "")


def _built(kit: Kit, steps: list[Step]) -> Any:
    graph = StateGraph(State)
    graph.add_node("piece", piece(kit))
    graph.add_edge(START, "n0")
    for at, step in enumerate(steps):
        name, after = f"n{at}", f"n{at + 1}"
        if step.make is None:
            graph.add_node(name, jump(kit, step.keys[0], step.keys[2], after), destinations=(after,))
            continue
        graph.add_node(name, step.make(kit, *step.keys))
        if not step.targets:
            continue
        if step.on == "route":
            targets = [f"n{target}" for target in step.targets]
            graph.add_conditional_edges(name, by_length(step.keys[0], targets), targets)
            continue
        graph.add_edge(name, after)
        if step.on == "send":
            graph.add_conditional_edges(name, sender, ["piece", END])
    return graph.compile(checkpointer=kit.saver)
