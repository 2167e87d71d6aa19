"""Tests of drafts: which earlier answers serve as drafts for which prompts."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pass_apps import CONTEXT, LITERAL, LLM, PROFILES, QUESTION, Golden, K, advanced_rag

from teola_plugin.graph import GAP, Attributes, DraftText, Graph, Primitive, PromptPart, Ref, build_pgraph, named
from teola_plugin.passes import DEFAULT_PASSES, DraftDecoding, PassContext, PassPipeline

DRAFTS = DraftDecoding()
TAKES = PassContext({**PROFILES, "llm": replace(LLM, drafts=8)})
V = PromptPart.var


def answered(name: str, **reads: Ref) -> list[Primitive]:
    prompt = (LITERAL, V("question"), *map(V, reads))
    lead = Primitive(f"{name}.p", K.PREFILLING, "llm", named(question=QUESTION, **reads), call=name, prompt=prompt)
    return [lead, Primitive(name, K.DECODING, "llm", named(prefilling=Ref(lead.id)))]


def drafts(graph: Graph) -> dict[str, tuple[str, ...]]:
    return {p.id: tuple(map(str, p.attributes.drafts)) for p in graph if p.attributes.drafts}


def test_advanced_rag_graph_matches_golden_file(golden: Golden) -> None:
    before = build_pgraph(advanced_rag())
    golden("draft_decoding/advanced_rag", before, DRAFTS.run(before, TAKES))


def test_refine_prompt_gets_the_previous_answer_as_draft() -> None:
    graph = Graph([*answered("first"), *answered("second", existing=Ref("first"))], Ref("second"))
    assert drafts(DRAFTS.run(graph, TAKES)) == {"second.p": ("existing",)}


def test_parsed_answer_serves_as_a_draft() -> None:
    parsed = Primitive("parsed", K.CALL, inputs=named(text=Ref("first")), call="parse")
    graph = Graph([*answered("first"), parsed, *answered("second", existing=Ref("parsed"))], Ref("second"))
    assert drafts(DRAFTS.run(graph, TAKES)) == {"second.p": ("existing",)}


def test_latest_answer_is_first_among_drafts() -> None:
    three = [*answered("a"), *answered("b"), *answered("c", one=Ref("a"), other=Ref("b"))]
    assert drafts(DRAFTS.run(Graph(three, Ref("c")), TAKES)) == {"c.p": ("other", "one")}


@pytest.mark.parametrize("context", [CONTEXT, PassContext({})], ids=["takes none", "unknown"])
def test_engine_without_draft_support_gets_no_drafts(context: PassContext) -> None:
    graph = Graph([*answered("first"), *answered("second", existing=Ref("first"))], Ref("second"))
    assert DRAFTS.run(graph, context) is graph


def test_search_result_is_not_used_as_a_draft() -> None:
    search = Primitive("search", K.SEARCHING, "store", named(vectors=Ref("$input", ("vector",))), size=1)
    graph = Graph([search, *answered("first", context=Ref("search"))], Ref("first"))
    assert DRAFTS.run(graph, TAKES) is graph


@pytest.mark.parametrize(
    ("items", "first"),
    [("numbered", '"1. …\\n2. …'), ("lines", '"1. …'), ("markdown", '"- …'), ("choices", '"[\\n    {'), ("json", "")],
)
def test_list_format_gives_drafts_of_text_between_items(items: str, first: str) -> None:
    lead, decoding = answered("queries")
    graph = Graph([lead.with_(attributes=Attributes(items=items)), decoding], Ref("queries"))
    [shown] = drafts(DRAFTS.run(graph, TAKES)).values() or [()]
    assert bool(shown) == bool(first) and (not first or shown[0].startswith(first))
    assert all(len(one) <= 60 for one in shown)


def test_known_answer_forms_are_drafts_after_earlier_answers() -> None:
    forms = tuple(DraftText("its labels", text=word + GAP) for word in ("YES", "NO"))
    lead, decoding = answered("second", existing=Ref("first"))
    attributes = Attributes(items="lines", forms=forms)
    graph = Graph([*answered("first"), lead.with_(attributes=attributes), decoding], Ref("second"))
    made = DRAFTS.run(graph, TAKES)
    assert drafts(made) == {"second.p": ("existing", '"YES…"', '"NO…"')}
    assert [one.description for one in made["second.p"].attributes.drafts] == [
        "an earlier answer",
        "its labels",
        "its labels",
    ]


def test_split_prompt_keeps_its_draft_in_the_full_pipeline() -> None:
    found = PassPipeline(DEFAULT_PASSES).run(build_pgraph(advanced_rag()), TAKES)
    named_ = drafts(found.graph)
    assert named_ and set(named_.values()) == {("existing_answer",)}
    assert PassPipeline(DEFAULT_PASSES).run(found.graph, TAKES).graph is found.graph
