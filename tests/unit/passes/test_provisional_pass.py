"""Answers that begin on a guess: which prompts get one, and what is repeated for it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from pass_apps import CONTEXT, LLM, ONE_DEVICE, PROFILES, QUESTION, READS, RERANKER, Golden, generation

from teola_plugin.graph import (
    Attributes,
    Component,
    Curve,
    Graph,
    InstancePath,
    Primitive,
    PrimitiveKind,
    Ref,
    Role,
    WorkflowTemplate,
    build_pgraph,
    named,
)
from teola_plugin.passes import PassContext, ProvisionalAnswers, PruneDependencies, default_pipeline
from teola_plugin.scheduling.objectives import Objective, deduce

K = PrimitiveKind
PASS = ProvisionalAnswers()


def reranked(*more: Component, output: str = "answer", role: Role = Role.CALL) -> Graph:
    """Searched, reranked, selected by code of that role, answered; without order edges of the template."""
    components = [
        Component("retrieve", Role.RETRIEVAL, named(query=QUESTION), "store", "embedder", effects=(READS,),
                  attributes=Attributes(k=16)),
        Component("texts", Role.CALL, named(documents=Ref("retrieve"))),
        Component("rerank", Role.RERANKING, named(texts=Ref("texts"), query=QUESTION), "reranker", batchable=True),
        Component("select", role, named(documents=Ref("retrieve"), scores=Ref("rerank"))),
        *(more or (generation("answer", Ref("select")),)),
    ]  # fmt: skip
    names = [c.name for c in components]
    template = WorkflowTemplate(tuple(components), Ref(output), tuple(pairwise(names)))
    return PruneDependencies().run(build_pgraph(template), CONTEXT)


def provisional(graph: Graph) -> list[str]:
    return [p.id for p in graph if p.attributes.provisional]


BRANCH = ["rerank.provisional", "select.provisional", "answer.prefilling.provisional"]


def test_what_lies_between_a_reranker_and_a_prompt_is_repeated(golden: Golden) -> None:
    before = reranked()
    after = PASS.run(before, CONTEXT)
    golden("provisional_answers/reranked", before, after)
    assert provisional(after) == BRANCH
    assert all(after[name].tentative for name in BRANCH)
    assert [after[p.id] for p in before] == list(before), "nothing that was there has changed"


def test_once_is_enough() -> None:
    made = default_pipeline().run(reranked(), CONTEXT).graph
    assert provisional(made) == BRANCH and PASS.run(made, CONTEXT) is made
    assert default_pipeline().run(made, CONTEXT).graph is made


def test_a_guess_is_the_least_urgent_and_changes_no_objective_of_others() -> None:
    before = reranked()
    after = PASS.run(before, CONTEXT)
    wanted = deduce(after)
    assert wanted["answer.prefilling.provisional"].objective is Objective.PROVISIONAL
    assert {name: wanted[name] for name in deduce(before)} == deduce(before)
    assert {p.id: after.depths[p.id] for p in before} == dict(before.depths)


def without(name: str) -> PassContext:
    return PassContext({key: profile for key, profile in PROFILES.items() if key != name}, "all")


@pytest.mark.parametrize(
    "context",
    [
        PassContext(PROFILES, "off"),
        PassContext({**PROFILES, "llm": replace(LLM, dedicated=False)}),
        PassContext({**PROFILES, "llm": replace(LLM, dedicated=False)}, "all"),
        without("llm"),
        ONE_DEVICE,
        PassContext({**PROFILES, "reranker": replace(RERANKER, curves={K.RERANKING: Curve.linear(0.001, 0.0)})}),
    ],
    ids=["off", "not own", "not own, all", "the user's own model", "one device", "too fast"],
)
def test_no_guess(context: PassContext) -> None:
    graph = reranked()
    assert PASS.run(graph, context) is graph


def test_code_of_the_users_is_not_run_for_a_guess() -> None:
    graph = reranked(role=Role.OPAQUE)
    assert PASS.run(graph, CONTEXT) is graph


def test_of_refinements_the_first_begins() -> None:
    graph = reranked(generation("answer", Ref("select", (0,))), generation("better", Ref("select", (1,)), "answer"),
                     output="better")  # fmt: skip
    assert provisional(PASS.run(graph, CONTEXT)) == BRANCH


def test_two_answers_share_what_is_repeated() -> None:
    join = Component("join", Role.CALL, named(a=Ref("answer"), b=Ref("other")))
    graph = reranked(generation("answer", Ref("select")), generation("other", Ref("select")), join, output="join")
    assert provisional(PASS.run(graph, CONTEXT)) == [*BRANCH, "other.prefilling.provisional"]


def test_two_rerankers_in_a_row_are_not_guessed() -> None:
    again = Component("again", Role.RERANKING, named(texts=Ref("select"), query=QUESTION), "reranker", batchable=True)
    last = Component("last", Role.CALL, named(documents=Ref("select"), scores=Ref("again")))
    graph = reranked(again, last, generation("answer", Ref("last")))
    assert PASS.run(graph, CONTEXT) is graph


def test_what_else_the_prompt_needs_has_to_be_there() -> None:
    slow = generation("slow", QUESTION)
    graph = reranked(slow, generation("answer", Ref("select"), "slow"))
    assert PASS.run(graph, CONTEXT) is graph


def each(kind: PrimitiveKind) -> Graph:
    """A holder that asks for each of what was selected."""
    from teola_plugin.graph import Fragment

    item = Ref("$item" if kind is K.MAP else "$carry")
    lead = Primitive("ask.prefilling", K.PREFILLING, "llm", named(chunk=item), call="ask")
    inner = Graph([lead, Primitive("ask", K.DECODING, "llm", named(prefilling=Ref(lead.id)))], Ref("ask"))
    graph = reranked()
    kept = [p for p in graph if not p.id.startswith("answer")]
    inputs = named(items=Ref("select")) if kind is K.MAP else named(init=Ref("select"))
    return Graph([*kept, Primitive("all", kind, inputs=inputs, fragment=Fragment(inner, Ref("ask")))], Ref("all"))


@pytest.mark.parametrize("kind", [K.MAP, K.LOOP])
def test_a_holder_begins_with_its_first_calls(kind: PrimitiveKind) -> None:
    made = PASS.run(each(kind), CONTEXT)
    assert provisional(made) == [*BRANCH[:2], "all.provisional"]
    held = made["all.provisional"].fragment
    assert held is not None and all(p.attributes.provisional == "rerank" for p in held.graph)
    assert not any(p.attributes.provisional for p in made["all"].fragment.graph)  # type: ignore[union-attr]
    assert made["all.provisional"].tentative


def test_a_guess_knows_what_it_stands_for() -> None:
    assert InstancePath("tree.provisional[0]/each[1]/ask.prefilling").settled == "tree[0]/each[1]/ask.prefilling"
    assert InstancePath(InstancePath("answer.prefilling").provisional()).settled == "answer.prefilling"
