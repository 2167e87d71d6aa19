"""Tests of nodes and helpers that change the state in place: prefetched calls are the original's, or are not made."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, TypedDict

import pytest
from langgraph.graph import END, START, StateGraph
from pydantic import BaseModel

from teola_plugin import EnginePool, accelerate
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.engines.profiles import rtx3090, scaled
from teola_plugin.langchain import ChatTeola
from teola_plugin.requests.payloads import Generate

RULES = "Answer from what is known, and say so where it is not. " * 12


class State(TypedDict, total=False):
    question: str
    tone: str
    items: list[str]
    info: dict[str, str]
    plan: str
    answer: str


class Model(BaseModel):
    question: str = ""
    tone: str = ""
    items: list[str] = []
    info: dict[str, str] = {}
    plan: str = ""
    answer: str = ""


def by_another_name(s: Any) -> str:
    t = s
    t["question"] = "new"
    return str(s["question"])


def by_a_method(s: Any) -> str:
    (t, _) = (s, 1)
    t.update(question="new")
    return str(s["question"])


def writes(s: Any) -> None:
    s["question"] = "new"


def by_a_helper(s: Any) -> str:
    writes(s)
    return str(s["question"])


def handed_back(s: Any) -> str:
    t = itself(s)
    t["question"] = "new"
    return str(s["question"])


def itself(s: Any) -> Any:
    return s


def by_a_closure(s: Any) -> str:
    def put(key: str) -> None:
        s[key] = "new"

    put("question")
    return str(s["question"])


def by_a_lambda(s: Any) -> str:
    list(map(lambda key: s.update({key: "new"}), ["question"]))
    return str(s["question"])


def by_a_method_of_its_own(s: Any) -> str:
    (lambda t: t.__setitem__("question", "new"))(s)
    return str(s["question"])


def in_a_condition(s: Any) -> str:
    t = s
    if len(s["question"]) > 1:
        t["question"] = "new"
    return str(s["question"])


def a_list_of_it(s: Any) -> str:
    items = s["items"]
    items.append("z")
    return ",".join(s["items"])


def in_a_box(s: Any) -> str:
    box = {"items": s["items"]}
    box["items"].append("z")
    return ",".join(s["items"])


def sorted_in_place(s: Any) -> str:
    s["items"].sort()
    return ",".join(s["items"])


def swapped(s: Any) -> str:
    s["items"][0], s["items"][1] = s["items"][1], s["items"][0]
    return ",".join(s["items"])


def longer(s: Any) -> str:
    items = s["items"]
    items += ["z"]
    return ",".join(s["items"])


def in_a_loop(s: Any) -> str:
    for one in s["items"][:1]:
        s["items"].append(one)
    return ",".join(s["items"])


def a_part(s: Any) -> str:
    info = s.get("info") or {}
    info["k"] = "new"
    return str(s["info"])


def deep(s: Any) -> str:
    s["info"]["k"] = "new"
    return str(s["info"])


def counted_elsewhere(s: Any) -> str:
    n = 0

    def more() -> None:
        nonlocal n
        n += 1

    more()
    return f"{s['question']}{n}"


def is_itself(s: Any) -> str:
    t = s
    return str(t is s)


def set_by_name(s: Any) -> str:
    setattr(s, "question", "new")  # noqa: B010
    return str(s.question)


def set_by_another_name(s: Any) -> str:
    t = s
    t.items.append("z")
    t.question = "new"
    return f"{s.question} {s.items}"


DICTIONARIES = [
    by_another_name,
    by_a_method,
    by_a_helper,
    handed_back,
    by_a_closure,
    by_a_lambda,
    by_a_method_of_its_own,
    in_a_condition,
    a_list_of_it,
    in_a_box,
    sorted_in_place,
    swapped,
    longer,
    in_a_loop,
    a_part,
    deep,
    counted_elsewhere,
    is_itself,
]
OBJECTS = [set_by_name, set_by_another_name]
GIVEN = {"question": "why?", "items": ["b", "a"], "info": {"k": "v"}, "plan": "old"}
every = pytest.mark.parametrize("helper", [*DICTIONARIES, *OBJECTS], ids=lambda one: one.__name__)


class Noting(FakeLLM):
    """Knows what it was asked for; of warm-ups their beginnings."""

    def __init__(self, time_scale: float = 0.02) -> None:
        super().__init__("llm", scaled(rtx3090(), time_scale)["llm"])
        self.requests: Counter[str] = Counter()
        self.warmed: list[str] = []

    def _job(self, request: Any, run: Any) -> Any:
        if isinstance(request.payload, Generate):
            self.requests[request.payload.prompt.flat()] += 1
        else:
            self.warmed.append(request.payload.prompt.known_prefix())
        return super()._job(request, run)


@pytest.fixture(scope="module")
def llm() -> Iterator[tuple[Noting, EnginePool]]:
    engine = Noting()
    with EnginePool.local(llm=engine) as pool:
        yield engine, pool


def compiled(pool: EnginePool, helper: Callable[[Any], str]) -> Any:
    model = ChatTeola(pool=pool, max_tokens=8)

    def first(state: Any) -> Any:
        return {"tone": helper(state), "plan": model.invoke("Plan it").text}

    def second(state: Any) -> Any:
        s = state if isinstance(state, dict) else vars(state)
        return {"answer": model.invoke(f"{RULES} {s['question']} {s['tone']} {s['items']} {s['info']}").text}

    def third(state: Any) -> Any:
        made = helper(state)
        return {"answer": model.invoke(f"{RULES} third: {made}").text}

    graph = StateGraph(Model if helper in OBJECTS else State)  # type: ignore[type-var]
    for name, node in (("first", first), ("second", second), ("third", third)):
        graph.add_node(name, node)
    graph.add_edge(START, "first")
    graph.add_edge("first", "second")
    graph.add_edge("second", "third")
    graph.add_edge("third", END)
    return graph.compile()


@every
def test_helper_that_changes_data_in_place_keeps_the_requests(
    llm: tuple[Noting, EnginePool], helper: Callable[[Any], str]
) -> None:
    engine, pool = llm
    graph, seen = compiled(pool, helper), []
    for one in (graph, accelerate(graph)):
        engine.requests.clear()
        engine.warmed.clear()
        given = copy.deepcopy(GIVEN)
        seen.append((one.invoke(given), given, engine.requests.copy()))
    assert seen[0] == seen[1]
    assert all(any(text.startswith(known) for text in seen[0][2]) for known in engine.warmed)


@pytest.fixture
def slow_llm() -> Iterator[tuple[Noting, EnginePool]]:
    """Return an engine slow enough that a warm-up is sent while it answers, even on a busy machine."""
    engine = Noting(time_scale=2.0)
    with EnginePool.local(llm=engine) as pool:
        yield engine, pool


def test_items_appended_to_a_local_list_are_prefilled(slow_llm: tuple[Noting, EnginePool]) -> None:
    """The list and what is added are a prompt's beginning as ever; only other names for it are not believed."""
    engine, pool = slow_llm
    model = ChatTeola(pool=pool, max_tokens=8)

    def plan(state: State) -> State:
        return {"plan": model.invoke("Plan it").text}

    def answer(state: State) -> State:
        lines = [RULES, state["question"]]
        lines.append("in short")
        lines.append(state["plan"])
        return {"answer": model.invoke(" ".join(lines)).text}

    graph = StateGraph(State)
    graph.add_node("plan", plan)
    graph.add_node("answer", answer)
    graph.add_edge(START, "plan")
    graph.add_edge("plan", "answer")
    graph.add_edge("answer", END)
    engine.warmed.clear()
    accelerate(graph.compile()).invoke({"question": "why?"})
    assert any(known.endswith("why? in short ") for known in engine.warmed)
