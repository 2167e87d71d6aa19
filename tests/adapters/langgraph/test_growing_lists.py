"""Tests of lists that tasks and loops build: the next prompt is prefilled with their items before the node ends."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Annotated, Any

import pytest
from langgraph.graph import END, START, StateGraph
from langgraph.types import Send
from typing_extensions import TypedDict

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines import profiles
from teola_plugin.engines.fake import FakeLLM, Faults
from teola_plugin.langchain import ChatTeola
from teola_plugin.observe import Span
from teola_plugin.runtime.virtual_time import run_virtual


class State(TypedDict, total=False):
    question: str
    documents: list[str]
    refused: bool
    answer: str


USEFUL = [f"good passage {i}, " + "which says a lot about it, " * 6 for i in range(4)]
GIVEN: State = {"question": "why?", "documents": [USEFUL[0], "bad", *USEFUL[1:3], "bad too", USEFUL[3]]}


def respond(prompt: Any, *_: Any) -> str:
    text = prompt.flat()
    if "Is it good?" in text:
        return "yes, it says a lot about it" if "good passage" in text else "no, it says nothing about it"
    if "Write a joke" in text:
        return "a joke, " * (2 + len(text) // 30)
    return f"of {text.count('passage')} passages" if "Passages:" in text else "rewritten"


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    llm = FakeLLM("llm", profiles.rtx3090()["llm"], respond, faults=Faults(slow=0.4))
    with EnginePool.local(engines=[llm]) as made:
        yield made


def graded(pool: EnginePool, *, rewrites: bool = False) -> Any:
    """Build a graph that grades documents. With `rewrites` it writes the question again if one was refused."""
    llm = ChatTeola(pool=pool)

    def grade(state: State) -> dict[str, Any]:
        kept, refused = [], False
        for one in state["documents"]:
            if llm.invoke(f"Is it good? {one}").content.startswith("yes"):
                kept.append(one)
            else:
                refused = True
        return {"documents": kept, "refused": refused}

    def rewrite(state: State) -> dict[str, Any]:
        return {"question": llm.invoke(f"Write it anew: {state['question']}").content}

    def answer(state: State) -> dict[str, Any]:
        passages = "\n".join(state["documents"])
        return {"answer": llm.invoke(f"Answer {state['question']} Passages: {passages}").content}

    graph = StateGraph(State).add_node(grade).add_node(rewrite).add_node(answer).add_edge(START, "grade")
    if rewrites:
        graph.add_conditional_edges(
            "grade", lambda state: "rewrite" if state["refused"] else "answer", ["rewrite", "answer"]
        )
        graph.add_edge("rewrite", "answer")
    else:
        graph.add_edge("grade", "answer")
    return graph.add_edge("answer", END).compile()


def graded_async(pool: EnginePool) -> Any:
    """Build `graded` with async code."""
    llm = ChatTeola(pool=pool)

    async def grade(state: State) -> dict[str, Any]:
        kept = []
        for one in state["documents"]:
            reply = await llm.ainvoke(f"Is it good? {one}")
            if reply.content.startswith("yes"):
                kept.append(one)
        return {"documents": kept}

    async def answer(state: State) -> dict[str, Any]:
        passages = "\n".join(state["documents"])
        reply = await llm.ainvoke(f"Answer {state['question']} Passages: {passages}")
        return {"answer": reply.content}

    graph = StateGraph(State).add_node(grade).add_node(answer).add_edge(START, "grade")
    return graph.add_edge("grade", "answer").add_edge("answer", END).compile()


def test_prompt_that_grows_with_graded_documents_is_planned(pool: EnginePool) -> None:
    plain = graded(pool)
    fast = accelerate(plain)
    for _ in range(2):
        assert fast.invoke(GIVEN) == plain.invoke(GIVEN)
    spans = [span.primitive for span in fast.last_trace().spans]
    assert not [name for name in spans if ".call#" in name], "the plain nodes' own calls were served by these"


def test_grown_prompt_is_prefilled_before_the_last_document_is_graded() -> None:
    async def traced() -> dict[str, Span]:
        llm = FakeLLM("llm", profiles.rtx3090()["llm"], respond, faults=Faults(slow=0.4))
        async with EnginePool.on_this_loop([llm]) as pool:
            plain = graded_async(pool)
            fast = accelerate(plain)
            for _ in range(2):
                assert await fast.ainvoke(GIVEN) == await plain.ainvoke(GIVEN)
            return {span.primitive: span for span in fast.last_trace().spans}

    spans = run_virtual(traced())
    grown, last = spans["part1/answer.model.prefilling.grown#0"], spans["part1/grade.each[5]/grade.model.decoding"]
    assert grown.started is not None and last.done is not None and grown.started < last.done


def test_only_the_branch_with_known_inputs_is_decoded_speculatively(pool: EnginePool) -> None:
    plain = graded(pool, rewrites=True)
    fast = accelerate(plain)
    for given in (GIVEN, {**GIVEN, "documents": USEFUL}):
        assert fast.invoke(given) == plain.invoke(given)
        spans = {span.primitive for span in fast.last_trace().spans}
        assert "part1/rewrite.model.decoding" in spans
        assert not [name for name in spans if name.startswith("part1/answer") and "decoding" in name]


class Subjects(TypedDict, total=False):
    subjects: list[str]
    jokes: Annotated[list[str], operator.add]
    best: str


def map_reduce(pool: EnginePool) -> Any:
    llm = ChatTeola(pool=pool)

    def begin(state: Subjects) -> dict[str, Any]:
        return {"jokes": [llm.invoke("Write a first joke").content]}

    def joke(state: Any) -> dict[str, Any]:
        return {"jokes": [llm.invoke(f"Write a joke about {state['subject']}").content]}

    def best(state: Subjects) -> dict[str, Any]:
        return {"best": llm.invoke("Which is the best of these?\n" + "\n".join(state["jokes"])).content}

    def each(state: Subjects) -> list[Send]:
        return [Send("joke", {"subject": one}) for one in state["subjects"]]

    graph = StateGraph(Subjects).add_node(begin).add_node(joke).add_node(best).add_edge(START, "begin")
    graph.add_conditional_edges("begin", each, ["joke"])
    return graph.add_edge("joke", "best").add_edge("best", END).compile()


def test_prompt_with_items_of_tasks_is_prefilled_before_the_barrier(pool: EnginePool) -> None:
    plain = map_reduce(pool)
    fast = accelerate(plain)
    given: Subjects = {"subjects": ["moss", "a very long word, and then some more of them", "ivy"]}
    for _ in range(2):
        assert fast.invoke(given) == plain.invoke(given)
    assert not [span for span in fast.last_trace().spans if ".call#" in span.primitive]
    assert "part1/best.model.prefilling.grown#0" in {span.primitive for span in fast.last_trace().spans}
