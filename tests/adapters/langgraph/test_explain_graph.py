"""`explain()` of an accelerated graph: the text for given facts, and the facts of given graphs."""

from __future__ import annotations

from teola_plugin.adapters.langgraph.explain import CallFacts, Choice, NodeFacts, ToolFacts, explain_graph
from teola_plugin.graph import PromptPart

LONG = PromptPart(text="x", tokens=412)
RULES = PromptPart(text="x", tokens=40)


def var(name: str) -> PromptPart:
    return PromptPart.var(name)


FACTS = (
    NodeFacts(
        "rewrite",
        "rewrite",
        "lowered",
        then=("retrieve",),
        calls=(CallFacts("rewrite.model", "llm", (RULES, RULES, var("question")), why="it is first"),),
    ),
    NodeFacts(
        "retrieve",
        "retrieve",
        "lowered",
        joins=("grade",),
        calls=(CallFacts("retrieve.retrieve", "store", early="with rewrite, once rewrite.model has answered"),),
    ),
    NodeFacts("web", "search_the_web", "original", "your code: runs once, in its place", joins=("grade",)),
    NodeFacts(
        "grade",
        "RunnableSequence",
        "joined",
        choices=(Choice(("answer", "rewrite"), "decide"), Choice((), "grade")),
        calls=(
            CallFacts(
                "grade.model", "llm", (var("docs"), LONG, var("question"), RULES), why="it reads what web writes"
            ),
        ),
        advice=("head, line 3: `time.time()` is the time, another in every call; put it last.",),
    ),
    NodeFacts(
        "tools",
        "ToolNode",
        "joined",
        tools=(
            ToolFacts("search", early="its searches begin when its call is written"),
            ToolFacts("pay", why="it is not declared read-only"),
        ),
    ),
)


def test_the_text() -> None:
    assert explain_graph(FACTS, ("rewrite", "web")) == (
        """What was understood
-------------------
lowered   rewrite   rewrite           rewrite.model
lowered   retrieve  retrieve          retrieve.retrieve
original  web       search_the_web    (your code: runs once, in its place)
joined    grade     RunnableSequence  grade.model
joined    tools     ToolNode

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
rewrite.model: <80 tokens>{question}
  its first 80 tokens are always the same; question varies
grade.model: {docs}<412 tokens>{question}<40 tokens>
  it begins with what varies; docs and question vary

Before their place
------------------
in place  rewrite.model      it is first
early     retrieve.retrieve  with rewrite, once rewrite.model has answered
in place  grade.model        it reads what web writes
early     search             its searches begin when its call is written
in place  pay                it is not declared read-only

Advice
------
grade.model: docs and question stand before 452 constant tokens: put them last.
grade: head, line 3: `time.time()` is the time, another in every call; put it last."""
    )


def test_sections_without_anything_are_left_out() -> None:
    alone = (NodeFacts("a", "a", "original", "your code"),)
    assert explain_graph(alone, ("a",), "No pool was found: nothing runs ahead.") == (
        """What was understood
-------------------
original  a  a  (your code)

Edges
-----
start -> a

Before their place
------------------
No pool was found: nothing runs ahead."""
    )


def test_what_is_worth_a_word() -> None:
    def advice(*prompt: PromptPart) -> str:
        text = explain_graph((NodeFacts("n", "n", "lowered", calls=(CallFacts("n.model", "llm", prompt),)),), ())
        return text.partition("Advice\n------\n")[2]

    assert advice(var("question"), LONG) == "n.model: question stands before 412 constant tokens: put it last."
    assert advice(LONG, var("question")) == ""
    assert advice(var("question"), PromptPart(text="x", tokens=9)) == ""
    assert advice(RULES, var("a"), PromptPart(text="x", tokens=9), LONG, var("b")) == (
        "n.model: a stands before 421 constant tokens: put it last."
    )
