"""Documents that are graded in a node: the answer's prompt grows with those that are kept, while it still runs."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from langgraph.graph import END, START, StateGraph
from typing_extensions import TypedDict

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines import profiles
from teola_plugin.engines.fake import FakeLLM, Faults
from teola_plugin.langchain import ChatTeola


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
    return f"of {text.count('passage')} passages" if "Passages:" in text else "rewritten"


@pytest.fixture
def pool() -> Iterator[EnginePool]:
    llm = FakeLLM("llm", profiles.rtx3090()["llm"], respond, faults=Faults(slow=0.4))
    with EnginePool.local(engines=[llm]) as made:
        yield made


def graded(pool: EnginePool, *, rewrites: bool = False) -> Any:
    """With `rewrites`, the question is written anew where a document was refused."""
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


def test_the_prompt_grows_with_the_documents_that_are_kept(pool: EnginePool) -> None:
    plain = graded(pool)
    fast = accelerate(plain)
    for _ in range(2):
        assert fast.invoke(GIVEN) == plain.invoke(GIVEN)
    spans = {span.primitive: span for span in fast.last_trace().spans}
    grown, last = spans["part1/answer.model.prefilling.grown#0"], spans["part1/grade.each[5]/grade.model.decoding"]
    assert grown.started is not None and grown.started < last.done
    assert not [name for name in spans if ".call#" in name], "the plain nodes' own calls were served by these"


def test_of_two_ways_the_one_that_waits_for_nothing_has_the_llm_write(pool: EnginePool) -> None:
    plain = graded(pool, rewrites=True)
    fast = accelerate(plain)
    for given in (GIVEN, {**GIVEN, "documents": USEFUL}):
        assert fast.invoke(given) == plain.invoke(given)
        spans = {span.primitive for span in fast.last_trace().spans}
        assert "part1/rewrite.model.decoding" in spans
        assert not [name for name in spans if name.startswith("part1/answer") and "decoding" in name]
