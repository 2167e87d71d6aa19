"""Tests of `explain()` of an accelerated graph: its facts, and the text made of them."""

from __future__ import annotations

import linecache
import time
from collections.abc import Iterator
from typing import Any, TypedDict

import pytest
from langchain.agents import create_agent
from langchain.agents.middleware import HumanInTheLoopMiddleware, InterruptOnConfig
from langchain_core.language_models import FakeListChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RunnableParallel
from langchain_core.tools import create_retriever_tool, tool
from langgraph.func import entrypoint
from langgraph.graph import END, START, StateGraph
from support.own_leaves import Chat

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langgraph.explain import Choice, NodeFacts, explain_graph
from teola_plugin.adapters.plan_report import CallRow, Explanation, Reason, Status
from teola_plugin.engines.fake import fake_engines
from teola_plugin.graph import PromptPart
from teola_plugin.langchain import ChatTeola, TeolaEmbeddings, TeolaVectorStore, read_only

LEGEND = "(optimized: may run ahead; shared: your code, its calls of engines belong to the query; unchanged: as always)"
LONG = PromptPart(text="x", tokens=412)
RULES = PromptPart(text="x", tokens=40)


def var(name: str) -> PromptPart:
    return PromptPart.var(name)


FACTS = (
    NodeFacts(
        "rewrite",
        "rewrite",
        "lowered",
        successors=("retrieve",),
        calls=(
            CallRow(
                "rewrite.model",
                Status.IN_PLACE,
                "llm",
                explanation=Explanation(Reason.FIRST),
                prompt=(RULES, RULES, var("question")),
            ),
        ),
    ),
    NodeFacts(
        "retrieve",
        "retrieve",
        "lowered",
        joins=("grade",),
        calls=(
            CallRow(
                "retrieve.retrieve",
                Status.PREFETCHED,
                "store",
                start="with rewrite, once rewrite.model has answered",
            ),
        ),
    ),
    NodeFacts("web", "search_the_web", "original", "your code: runs once, at its usual time", joins=("grade",)),
    NodeFacts(
        "grade",
        "RunnableSequence",
        "joined",
        choices=(Choice(("answer", "rewrite"), "decide"), Choice((), "grade")),
        calls=(
            CallRow(
                "grade.model",
                Status.IN_PLACE,
                "llm",
                explanation=Explanation(Reason.UNKNOWN_UPDATES, ("web",), "/app/graph.py:7"),
                prompt=(var("docs"), LONG, var("question"), RULES),
            ),
        ),
    ),
    NodeFacts(
        "tools",
        "ToolNode",
        "joined",
        tools=(
            CallRow("search", Status.PREFETCHED, "tool", start="its searches begin when its call is written"),
            CallRow("pay", Status.IN_PLACE, "tool", explanation=Explanation(Reason.NOT_READ_ONLY, ("pay",))),
        ),
    ),
)


def test_explain_text_has_every_section() -> None:
    assert explain_graph(FACTS, ("rewrite", "web")).text(details=True) == (
        f"""Understood:    5 parts: 2 optimized, 2 shared (RunnableSequence and ToolNode), 1 unchanged (search_the_web)
Starts early:  retrieve.retrieve: with rewrite, once rewrite.model has answered; search: its searches begin when its \
call is written
Expect:        not known yet, as a graph decides while it runs: `teola compare` measures it; \
change first: grade.model: docs and question stand before 452 constant tokens: put them last

What was understood
-------------------
optimized  rewrite   rewrite           rewrite.model
optimized  retrieve  retrieve          retrieve.retrieve
unchanged  web       search_the_web    (your code: runs once, at its usual time)
shared     grade     RunnableSequence  grade.model
shared     tools     ToolNode
{LEGEND}

Calls
-----
in place    rewrite.model      llm    nothing stands before it
prefetched  retrieve.retrieve  store  with rewrite, once rewrite.model has answered
in place    grade.model        llm    the updates of web are known only at run time (/app/graph.py:7)
prefetched  search             tool   its searches begin when its call is written
in place    pay                tool   it is neither declared read-only nor a retriever of the pool's alone
    write: accelerate(..., read_only=["pay"])

Edges
-----
start -> rewrite, web
rewrite -> retrieve
retrieve -> grade, when web is done, too
web -> grade, when retrieve is done, too
grade -> answer or rewrite, as decide says
grade -> any node, as grade says

Prompts
-------
rewrite.model: <80 tokens>{{question}}
  its first 80 tokens are always the same; question varies
grade.model: {{docs}}<412 tokens>{{question}}<40 tokens>
  it begins with what varies; docs and question vary

Advice
------
grade.model: docs and question stand before 452 constant tokens: put them last"""
    )


def test_explain_text_omits_empty_sections() -> None:
    alone = (NodeFacts("a", "a", "original", "your code"),)
    note = "no pool was found: nothing runs ahead"
    assert explain_graph(alone, ("a",), note=note).text(details=True) == (
        f"""Understood:    1 part: 1 unchanged (a)
Starts early:  nothing
Expect:        no gain: no pool was found: nothing runs ahead

What was understood
-------------------
unchanged  a  a  (your code)
{LEGEND}

Edges
-----
start -> a"""
    )


def test_prompt_advice_names_varying_parts_before_long_constant_text() -> None:
    def call_with(prompt: tuple[PromptPart, ...]) -> CallRow:
        return CallRow("n.model", Status.IN_PLACE, "llm", explanation=Explanation(Reason.FIRST), prompt=prompt)

    def advice(*prompt: PromptPart) -> str:
        made = explain_graph((NodeFacts("n", "n", "lowered", calls=(call_with(prompt),)),), ())
        return "\n".join(made.advice)

    assert advice(var("question"), LONG) == "n.model: question stands before 412 constant tokens: put it last"
    assert advice(LONG, var("question")) == ""
    assert advice(var("question"), PromptPart(text="x", tokens=9)) == ""
    assert advice(RULES, var("a"), PromptPart(text="x", tokens=9), LONG, var("b")) == (
        "n.model: a stands before 421 constant tokens: put it last"
    )


# ------------------------------------------------------------ of graphs


class State(TypedDict, total=False):
    question: str
    better: str
    docs: list[Any]
    now: str
    ok: bool
    answer: str


RULE = "Only say what the documents say, and name the document that says it. "


@pytest.fixture(scope="module")
def pool() -> Iterator[EnginePool]:
    with EnginePool.local(fake_engines()) as made:
        yield made


def corrective(model: Any, retriever: Any) -> Any:
    """Build a small corrective RAG graph with typical mistakes in its prompts."""

    def rewrite(state: State) -> State:
        return {"better": model.invoke(f"Make a search of this question: {state['question']}").content}

    def retrieve(state: State) -> State:
        return {"docs": retriever.invoke(state["better"])}

    def clock(state: State) -> State:
        return {"now": time.ctime()}

    def check(state: State) -> Any:
        with open("/dev/null") as file:
            return {"ok": not file.read()}

    def decide(state: State) -> str:
        with open("/dev/null") as file:
            return "rewrite" if file.read() else "answer"

    prompt = ChatPromptTemplate.from_template("{now} {question} {docs} " + 3 * RULE)
    made = StateGraph(State)
    made.add_node("rewrite", rewrite)
    made.add_node("retrieve", retrieve)
    made.add_node("clock", clock)
    made.add_node("check", check)
    made.add_node("answer", prompt | model | StrOutputParser() | (lambda text: {"answer": text}))
    made.add_edge(START, "rewrite")
    made.add_edge(START, "clock")
    made.add_edge("rewrite", "retrieve")
    made.add_edge(["retrieve", "clock"], "check")
    made.add_conditional_edges("check", decide, ["answer", "rewrite"])
    made.add_edge("answer", END)
    return made.compile()


def lines_of(row: CallRow) -> list[str]:
    """Return the beginning of the line in this file that a row says it is about, if it does."""
    path, _, line = row.source.rpartition(":")
    code = linecache.getline(path, int(line)).strip() if path == __file__ else ""
    return [code.split('f"')[0].split("state")[0].split("}")[0]] if code else []


def store(pool: EnginePool) -> Any:
    return TeolaVectorStore(pool=pool, embedding=TeolaEmbeddings(pool=pool)).as_retriever()


def test_explain_describes_a_graph(pool: EnginePool) -> None:
    fast = accelerate(corrective(ChatTeola(pool=pool), store(pool)))
    calls = {row.name: (row.status, row.reason, *lines_of(row)) for row in fast.report().calls}
    assert calls == {
        "rewrite.model": (Status.IN_PLACE, Reason.FIRST, 'return {"better": model.invoke('),
        "retrieve.retrieve": (Status.IN_PLACE, Reason.NEEDS_RESULTS, 'return {"docs": retriever.invoke('),
        "check": (Status.NOT_SEEN, Reason.UNKNOWN_CODE, 'with open("/dev/null") as file:'),
        "answer.model": (Status.IN_PLACE, Reason.UNKNOWN_UPDATES),
    }
    rows = fast.explain(details=True).partition("Calls\n-----\n")[2].partition("\n\nEdges")[0]
    assert "in place  answer.model" in rows
    assert fast.explain(details=True) == (
        f"""Understood:    5 parts: 3 optimized, 2 unchanged (clock and check)
Starts early:  nothing
Expect:        no gain: retrieve.retrieve starts at its usual time: it needs what rewrite.model gives; change first: \
answer.model: now, question and docs stand before 57 constant tokens: put them last

What was understood
-------------------
optimized  rewrite   rewrite           rewrite.model
optimized  retrieve  retrieve          retrieve.retrieve
unchanged  clock     clock             (your code: runs once, at its usual time)
unchanged  check     check             (your code: runs once, at its usual time)
optimized  answer    RunnableSequence  answer.model
{LEGEND}

Calls
-----
{rows}

Edges
-----
start -> clock, rewrite
rewrite -> retrieve
retrieve -> check, when clock is done, too
clock -> check, when retrieve is done, too
check -> answer or rewrite, as decide says

Prompts
-------
rewrite.model: <8 tokens>{{question}}
  it begins with what varies; question varies
answer.model: <1 tokens>{{now}}<1 tokens>{{question}}<1 tokens>{{docs}}<55 tokens>
  it begins with what varies; now, question and docs vary

Advice
------
answer.model: now, question and docs stand before 57 constant tokens: put them last"""
    )


def test_explain_lists_prefetched_calls_of_bound_models(pool: EnginePool) -> None:
    """The very same, and the calls of the query begin where the text says."""
    mine = Chat()
    prompt = ChatPromptTemplate.from_template("Answer {question}")
    made = StateGraph(State)
    made.add_node("first", RunnableParallel(better=prompt | mine | StrOutputParser()))
    made.add_node("second", RunnableParallel(answer=prompt | mine | StrOutputParser()))
    made.add_edge(START, "first")
    made.add_edge("first", "second")
    fast = accelerate(made.compile(), pool=pool, bind=[(mine, "llm")])
    assert "prefetched  second.answer.model  llm  when first begins" in fast.explain(details=True)
    fast.invoke({"question": "why"})
    trace = fast.last_trace()
    assert trace is not None
    begun = {span.primitive.partition("/")[2]: span.queued for span in trace.spans}
    assert begun["second.answer.model.prefilling"] < begun["first.better.model.decoding"]
    assert accelerate(made.compile(), pool=pool).explain(details=True).count("llm") == 0


def test_explain_describes_an_agent(pool: EnginePool) -> None:
    @tool
    def pay(amount: int) -> str:
        """Pays."""
        return "paid"

    @read_only
    @tool
    def weather(city: str) -> str:
        """Tells the weather."""
        return "fine"

    tools = [create_retriever_tool(store(pool), "search", "Finds documents."), weather, pay]
    model = ChatTeola(pool=pool)
    text = accelerate(create_agent(model, tools, system_prompt=RULE)).explain(details=True)
    lines = {line for line in text.splitlines() if line.startswith(("prefetched", "in place", "shared", "model"))}
    assert lines == {
        "shared  model  model_node  model (an agent's model)",
        "shared  tools  ToolNode    (each tool runs once; pool-backed objects that it calls join the query)",
        "model -> tools or the end, as model_to_tools says",
        next(line for line in lines if line.startswith("model: <") and line.endswith("tokens>{messages}")),
        f"in place    model    llm   {Reason.PREFILLED.text}",
        "prefetched  search   tool  its engine work begins when the model has written its call",
        "prefetched  weather  tool  it runs when the model has written its call",
        "in place    pay      tool  it is neither declared read-only nor a retriever of the pool's alone",
    }
    asking = HumanInTheLoopMiddleware(interrupt_on={"pay": InterruptOnConfig(allowed_decisions=["approve"])})
    held_back = accelerate(create_agent(model, tools, middleware=[asking])).explain(details=True)
    assert "prefetched  " not in held_back
    by_wrapping = "in place  weather  tool  its calls are handed to middleware, which may hold them back"
    after_the_model = "in place  weather  tool  somebody may decide before it, or nothing runs ahead"  # langchain 1.2
    assert by_wrapping in held_back or after_the_model in held_back


def test_explain_describes_graphs_without_pool_or_edges(pool: EnginePool) -> None:
    note = "no gain: model starts at its usual time: each call of an agent needs what the one before gave"
    plain = accelerate(create_agent(FakeListChatModel(responses=["a"]))).explain(details=True)
    assert note in plain and "unchanged  model  model_node" in plain and "start -> model" in plain
    assert "check -> answer or rewrite, as decide says" in accelerate(corrective(Chat(), None)).explain(details=True)
    model = ChatTeola(pool=pool)

    @entrypoint()
    def flow(given: str) -> Any:
        return model.invoke(f"{time.time()} {given}").content

    text = accelerate(flow).explain(details=True)
    assert "in place  flow.model  llm" in text
    assert "its prompt is known only at run time (" in text


def test_explain_describes_conditional_entry_points(pool: EnginePool) -> None:
    prompt = ChatPromptTemplate.from_template("{now} {question}").partial(now=time.ctime)
    made = StateGraph(State)
    made.add_node("a", prompt | ChatTeola(pool=pool) | StrOutputParser() | (lambda text: {"answer": text}))
    made.add_node("b", lambda state: {"answer": "b"})
    made.add_conditional_edges(START, lambda state: "a" if state["question"] else "b", ["a", "b"])
    text = accelerate(made.compile()).explain(details=True)
    assert "start -> a or b, as <lambda> says" in text


def test_explain_runs_no_user_code(pool: EnginePool) -> None:
    def loud(state: State) -> State:
        raise AssertionError("it runs")

    made = StateGraph(State)
    made.add_node("loud", loud)
    made.add_edge(START, "loud")
    assert "unchanged" in accelerate(made.compile(), pool=pool).explain(details=True)
