"""Answers that begin on what the question itself finds, while an LLM writes what else is searched for."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from pass_apps import CONTEXT, LITERAL, LLM, PROFILES, QUESTION, READS, RERANKER, Golden, generation, retrieval_body

from teola_plugin.graph import (
    Attributes,
    Component,
    Curve,
    Effect,
    Graph,
    PrimitiveKind,
    PromptPart,
    Ref,
    Role,
    WorkflowTemplate,
    build_pgraph,
    named,
)
from teola_plugin.passes import PassContext, ProvisionalAnswers, PruneDependencies, default_pipeline
from teola_plugin.passes.question_hits import QUESTION as ALONE
from teola_plugin.scheduling.objectives import Objective, deduce

K = PrimitiveKind
PASS = ProvisionalAnswers()
PROXY = {**PROFILES, "proxy": replace(LLM, device="gpu:3")}
"""With an LLM on a card of its own."""
READ_FIRST = "answer.prefilling.provisional.partial#0"


def expanded(
    *more: Component,
    writer: str = "llm",
    union: Role = Role.CALL,
    read: Effect = READS,
    reranked: bool = True,
    own: bool = False,
    query: Ref = QUESTION,
) -> Graph:
    """Questions are written, each is searched, the hits are put together, with those of the question itself if `own`,
    reranked, answered."""
    joined = named(found=Ref("found")) + (named(own=Ref("own")) if own else ())
    after = [
        Component("rerank", Role.RERANKING, named(texts=Ref("union"), query=query), "reranker", batchable=True),
        Component("select", Role.CALL, named(documents=Ref("union"), scores=Ref("rerank"))),
    ]
    search = Component("own", Role.RETRIEVAL, named(query=QUESTION), "store", "embedder", effects=(READS,),
                       attributes=Attributes(k=16))  # fmt: skip
    components = [
        *([search] if own else []),
        Component("expand", Role.GENERATION, named(question=QUESTION), writer, splittable=True, expected=3,
                  prompt=(LITERAL, PromptPart.var("question"))),
        Component("queries", Role.CALL, named(text=Ref("expand"))),
        Component("found", Role.MAP, named(items=Ref("queries")), body=retrieval_body(read)),
        Component("union", union, joined),
        *(after if reranked else []),
        *(more or (generation("answer", Ref("select" if reranked else "union")),)),
    ]  # fmt: skip
    names = [c.name for c in components]
    template = WorkflowTemplate(tuple(components), Ref(names[-1]), tuple(pairwise(names)))
    return PruneDependencies().run(build_pgraph(template), CONTEXT)


def provisional(graph: Graph) -> list[str]:
    return [p.id for p in graph if p.attributes.provisional]


BRANCH = [
    f"{name}.provisional" for name in ("queries", "found", "union", "rerank", "select", "answer.prefilling")
]  # fmt: skip


def test_the_question_is_searched_and_reranked_while_others_are_written(golden: Golden) -> None:
    before = expanded()
    after = PASS.run(before, CONTEXT)
    golden("provisional_answers/question", before, after)
    assert sorted(provisional(after)) == sorted(BRANCH)
    assert after["queries.provisional"].call == ALONE
    assert after["answer.prefilling.provisional"].after == ("queries",), "written once the questions are"
    assert all(after[name].tentative for name in BRANCH)
    assert [after[p.id] for p in before] == list(before), "nothing that was there has changed"


def test_by_another_llm_than_the_questions_the_prompt_is_read_as_soon_as_it_is_there(golden: Golden) -> None:
    before = expanded(writer="proxy")
    after = PASS.run(before, PassContext(PROXY))
    golden("provisional_answers/question_proxy", before, after)
    assert sorted(provisional(after)) == sorted([*BRANCH, READ_FIRST])
    assert not after[READ_FIRST].after and after[READ_FIRST].kind is K.PARTIAL_PREFILLING
    assert after[READ_FIRST].inputs == after["answer.prefilling.provisional"].inputs


def test_a_question_that_is_searched_anyway_is_not_searched_again(golden: Golden) -> None:
    before = expanded(own=True)
    after = PASS.run(before, CONTEXT)
    golden("provisional_answers/question_fused", before, after)
    assert after["queries.provisional"].inputs == (), "no questions but the one"


def test_hits_that_are_put_together_are_guessed_without_a_reranker_only_where_the_question_is_searched() -> None:
    assert provisional(PASS.run(expanded(own=True, reranked=False), CONTEXT))
    graph = expanded(reranked=False)
    assert PASS.run(graph, CONTEXT) is graph, "the context is that of other questions"


def test_once_is_enough() -> None:
    for context in (CONTEXT, PassContext(PROXY)):
        made = default_pipeline().run(expanded(), context).graph
        assert set(BRANCH) <= set(provisional(made)) and PASS.run(made, context) is made
        assert default_pipeline().run(made, context).graph is made


def test_all_of_it_is_the_least_urgent_and_changes_nothing_of_others() -> None:
    before = expanded(writer="proxy")
    after = PASS.run(before, PassContext(PROXY))
    wanted = deduce(after)
    guessed = [p.id for p in after if p.attributes.provisional and p.on_engine]
    assert sorted(guessed) == sorted(["rerank.provisional", READ_FIRST, "answer.prefilling.provisional"])
    assert {wanted[name].objective for name in guessed} == {Objective.PROVISIONAL}
    assert {name: wanted[name] for name in deduce(before)} == deduce(before)
    assert {p.id: after.depths[p.id] for p in before} == dict(before.depths)
    held = after["found.provisional"].fragment
    assert held is not None and {deduce(held.graph)[p.id].objective for p in held.graph if p.on_engine} == {
        Objective.PROVISIONAL
    }


def changed(name: str, **changes: object) -> PassContext:
    return PassContext({**PROFILES, name: replace(PROFILES[name], **changes)})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "context",
    [
        PassContext(PROFILES, "off"),
        changed("llm", dedicated=False),
        changed("llm", device="gpu:1"),
        PassContext({name: one for name, one in PROFILES.items() if name != "llm"}, "all"),
    ],
    ids=["off", "not own", "on the embedder's device", "the user's own model"],
)
def test_no_guess(context: PassContext) -> None:
    graph = expanded(own=False)
    names = provisional(PASS.run(graph, context))
    assert "queries.provisional" not in names


@pytest.mark.parametrize("name", ["embedder", "store", "reranker"])
def test_an_engine_of_somebody_elses_is_asked_nothing_for_a_guess(name: str) -> None:
    made = PASS.run(expanded(), changed(name, dedicated=False))
    assert "queries.provisional" not in provisional(made)
    assert "rerank.provisional" in provisional(made), "the order before the reranker is there anyway"


def test_a_reranker_that_would_still_be_at_it_is_left_to_the_real_hits() -> None:
    slow = changed("reranker", curves={K.RERANKING: Curve.linear(9.0, 0.0)})
    made = PASS.run(expanded(), slow)
    assert "queries.provisional" not in provisional(made) and "rerank.provisional" in provisional(made)


@pytest.mark.parametrize(
    "graph",
    [
        expanded(union=Role.OPAQUE),
        expanded(read=Effect("collection:docs", writes=True)),
        expanded(query=Ref("queries", (0,))),
    ],
    ids=["the user's code", "a search that writes", "reranked for what is written"],
)
def test_what_may_not_be_repeated_is_not(graph: Graph) -> None:
    assert "queries.provisional" not in provisional(PASS.run(graph, CONTEXT))


def test_a_prompt_that_holds_the_questions_is_not_guessed() -> None:
    prompt = (LITERAL, PromptPart.var("context"), PromptPart.var("queries"))
    inputs = named(context=Ref("select"), queries=Ref("queries"))
    made = PASS.run(expanded(Component("answer", Role.GENERATION, inputs, "llm", prompt=prompt)), CONTEXT)
    assert "queries.provisional" not in provisional(made)


def test_of_refinements_the_first_begins() -> None:
    graph = expanded(generation("answer", Ref("select", (0,))), generation("better", Ref("select", (1,)), "answer"))
    assert sorted(provisional(PASS.run(graph, CONTEXT))) == sorted(BRANCH)


def test_two_answers_share_what_is_repeated() -> None:
    join = Component("join", Role.CALL, named(a=Ref("answer"), b=Ref("other")))
    graph = expanded(generation("answer", Ref("select")), generation("other", Ref("select")), join)
    assert sorted(provisional(PASS.run(graph, CONTEXT))) == sorted([*BRANCH, "other.prefilling.provisional"])


def test_beside_it_another_reranker_is_guessed_by_the_order_before_it() -> None:
    texts = Component("texts", Role.CALL, named(question=QUESTION))
    again = Component("again", Role.RERANKING, named(texts=Ref("texts"), query=QUESTION), "reranker", batchable=True)
    kept = Component("kept", Role.CALL, named(documents=Ref("texts"), scores=Ref("again")))
    join = Component("join", Role.CALL, named(a=Ref("answer"), b=Ref("other")))
    graph = expanded(generation("answer", Ref("select")), texts, again, kept, generation("other", Ref("kept")), join)
    made = set(provisional(PASS.run(graph, CONTEXT)))
    assert made == {*BRANCH, "again.provisional", "kept.provisional", "other.prefilling.provisional"}


def test_a_reranker_on_the_writers_card_waits_for_its_place() -> None:
    same = PassContext({**PROXY, "reranker": replace(RERANKER, device="gpu:3")})
    assert "queries.provisional" not in provisional(PASS.run(expanded(writer="proxy"), same))
