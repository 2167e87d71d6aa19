"""Tests of the pass that prefills the known part of a prompt before the rest is known."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pass_apps import CONTEXT, LITERAL, ONE_DEVICE, PROFILES, QUESTION, UNMEASURED, Golden, K, advanced_rag, call

from teola_plugin.graph import (
    Attributes,
    Fragment,
    Graph,
    Primitive,
    PrimitiveKind,
    PromptPart,
    Ref,
    build_pgraph,
    growths,
    named,
)
from teola_plugin.passes import DecodingPipelining, PassContext, PassPipeline, PrefillingSplit, PruneDependencies

SPLIT = PrefillingSplit()
SHORT = PromptPart.literal("Answer: ")
V = PromptPart.var
EMBED = Primitive("embed", K.EMBEDDING, "embedder", named(texts=QUESTION), size=1)
SEARCH = Primitive("search", K.SEARCHING, "store", named(vectors=Ref("embed")), size=1)


def graph_of(*prompt: PromptPart, **reads: Ref) -> Graph:
    p = Primitive("p", K.PREFILLING, "llm", named(**reads), call="p", prompt=prompt, options=(("tenant", "t"),))
    return Graph([EMBED, SEARCH, p, Primitive("d", K.DECODING, "llm", named(prefilling=Ref("p")))], Ref("d"))


def partials(graph: Graph) -> list[int]:
    """Return the number of prompt parts of each partial prefilling."""
    return [len(p.prompt) for p in graph if p.kind is K.PARTIAL_PREFILLING]


def test_advanced_rag_graph_matches_golden_file(golden: Golden) -> None:
    before = PruneDependencies().run(build_pgraph(advanced_rag()), CONTEXT)
    golden("prefilling_split/advanced_rag", before, SPLIT.run(before, CONTEXT))


@pytest.mark.parametrize("context", [CONTEXT, UNMEASURED], ids=["measured", "unmeasured"])
def test_ready_prompt_prefix_becomes_a_partial_prefilling(context: PassContext) -> None:
    after = SPLIT.run(graph_of(LITERAL, V("question"), V("context"), question=QUESTION, context=Ref("search")), context)
    partial, full = after["p.partial#0"], after["p"]
    assert partial.prompt == (LITERAL, V("question")) and partial.inputs == named(question=QUESTION)
    assert (partial.engine, partial.call, partial.option("tenant")) == ("llm", "p", "t")
    assert partial.after == () and full.after == (partial.id,)
    assert full.kind is K.FULL_PREFILLING and len(full.prompt) == 3 and len(full.inputs) == 2


def test_warm_up_waits_for_idle_only_where_idle_is_expected() -> None:
    """Before a retrieval's end the LLM has nothing to do; between two refine calls it never pauses."""
    after = SPLIT.run(
        graph_of(LITERAL, V("question"), V("context"), question=QUESTION, context=Ref("search")), UNMEASURED
    )
    assert after["p.partial#0"].attributes.when == "idle"
    refine = Primitive(
        "r",
        K.PREFILLING,
        "llm",
        named(question=QUESTION, answer=Ref("d")),
        prompt=(LITERAL, V("question"), V("answer")),
    )
    after = SPLIT.run(Graph([*graph_of(LITERAL, question=QUESTION), refine], Ref("r")), CONTEXT)
    assert after["r.partial#0"].attributes.when == ""


def test_leading_literal_is_prefilled_at_once() -> None:
    after = SPLIT.run(graph_of(LITERAL, V("context"), V("question"), question=QUESTION, context=Ref("search")), CONTEXT)
    assert partials(after) == [1], "the question stands behind the context"


def test_prompt_has_one_partial_prefilling_per_ready_time() -> None:
    prompt = (LITERAL, V("vector"), LITERAL, V("hits", 99), V("question"))
    after = SPLIT.run(graph_of(*prompt, vector=Ref("embed"), hits=Ref("search"), question=QUESTION), CONTEXT)
    assert partials(after) == [1, 3]
    assert after["p.partial#1"].after == ("p.partial#0",)
    assert after["p"].after == ("p.partial#1",)


def test_short_prompt_run_joins_the_next_partial() -> None:
    prompt = (SHORT, V("vector", 60), V("hits", 99))
    after = SPLIT.run(graph_of(*prompt, vector=Ref("embed"), hits=Ref("search")), CONTEXT)
    assert partials(after) == [2]


def test_refine_prompt_is_split_on_the_same_engine() -> None:
    """A refine call: the engine prefills beside the decoding of the previous answer."""
    first = graph_of(LITERAL, V("question"), question=QUESTION)
    refine = Primitive(
        "r",
        K.PREFILLING,
        "llm",
        named(answer=Ref("d"), question=QUESTION),
        prompt=(LITERAL, V("question"), V("answer")),
    )
    after = SPLIT.run(Graph([*first, refine], Ref("r")), ONE_DEVICE)
    assert partials(after) == [2]


def test_pass_leaves_ineligible_graphs_unchanged() -> None:
    good = (LITERAL, V("question"), V("context"))
    graph = graph_of(*good, question=QUESTION, context=Ref("search"))
    without = PassContext({**PROFILES, "llm": replace(PROFILES["llm"], prefix_caching=False)})
    assert SPLIT.run(graph, without) is graph, "no prefix caching"
    assert SPLIT.run(graph, PassContext()) is graph, "nothing is known of the engine"
    assert SPLIT.run(graph, ONE_DEVICE) is graph, "everything the rest waits for keeps the LLM's device busy"
    short = graph_of(SHORT, V("question", 8), V("context"), question=QUESTION, context=Ref("search"))
    assert SPLIT.run(short, CONTEXT) is short, "too few tokens, as far as anybody knows"
    ready = graph_of(LITERAL, V("question"), question=QUESTION)
    assert SPLIT.run(ready, CONTEXT) is ready, "the whole prompt is ready at once"
    last = graph_of(V("context"), LITERAL, context=Ref("search"))
    assert SPLIT.run(last, CONTEXT) is last, "the latest part comes first"


def test_prompt_that_waits_for_client_code_only_is_not_split() -> None:
    p = Primitive("p", K.PREFILLING, "llm", named(x=Ref("f")), prompt=(LITERAL, V("x")))
    graph = Graph([call("f", "$input"), p], Ref("p"))
    assert SPLIT.run(graph, CONTEXT) is graph


def test_prefix_with_its_own_dependency_is_split_only_if_measured() -> None:
    other = Primitive("other", K.EMBEDDING, "embedder", named(texts=QUESTION), size=1)
    p = Primitive("p", K.PREFILLING, "llm", named(a=Ref("other"), hits=Ref("search")), prompt=(V("a", 99), V("hits")))
    graph = Graph([EMBED, SEARCH, other, p], Ref("p"))
    assert SPLIT.run(graph, UNMEASURED) is graph
    assert partials(SPLIT.run(graph, CONTEXT)) == [1], "measured, one is known to be ready before the other"


def test_prefix_that_pure_code_makes_of_the_input_is_split() -> None:
    """Such code takes no time, so the prefix waits for no more than the input."""
    joined = call("joined", "$input")
    p = Primitive("p", K.PREFILLING, "llm", named(a=Ref("joined"), hits=Ref("search")), prompt=(V("a", 99), V("hits")))
    graph = Graph([EMBED, SEARCH, joined, p], Ref("p"))
    assert partials(SPLIT.run(graph, UNMEASURED)) == [1]


def test_second_run_of_the_pass_changes_nothing() -> None:
    graph = graph_of(LITERAL, V("question"), V("context"), question=QUESTION, context=Ref("search"))
    once = SPLIT.run(graph, CONTEXT)
    assert once is not graph
    assert SPLIT.run(once, CONTEXT) is once


def test_fold_prompt_is_prefilled_up_to_the_carried_value() -> None:
    """A refine over passages: each prompt is prefilled up to the previous answer while that is being decoded."""
    refine = Primitive(
        "r",
        K.PREFILLING,
        "llm",
        named(text=Ref("$item"), answer=Ref("$carry")),
        prompt=(LITERAL, V("text"), V("answer")),
    )
    body = Graph([refine, Primitive("d", K.DECODING, "llm", named(prefilling=Ref("r")))], Ref("d"))
    inputs = named(items=Ref("$input", ("passages",)), init=Ref("$input", ("first",)))
    fold = Primitive("f", K.FOLD, inputs=inputs, fragment=Fragment(body, body.output))
    optimised = PassPipeline((SPLIT,)).run(Graph([fold], Ref("f")), CONTEXT)
    inner = optimised.graph["f"].fragment
    assert inner is not None and optimised.fired == ("prefilling-split",)
    assert inner.graph["r.partial#0"].inputs == named(text=Ref("$item"))
    assert inner.graph["r"].kind is K.FULL_PREFILLING and inner.graph["r"].after == ("r.partial#0",)
    assert PassPipeline((SPLIT,)).run(optimised.graph, CONTEXT).graph is optimised.graph


def growing_graph(between: PrimitiveKind = K.CALL) -> Graph:
    """Return a graph that writes a list, embeds each item, and joins them to the context of a prompt."""
    body = Graph([Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("$item")), size=1)], Ref("e"))
    write = Primitive("w", K.PREFILLING, "llm", named(question=QUESTION), prompt=(LITERAL, V("question")))
    lines = Primitive(
        "l", K.DECODING, "llm", named(prefilling=Ref("w")), splittable=True, attributes=Attributes(items="lines")
    )
    each = Primitive("m", K.MAP, inputs=named(items=Ref("c")), fragment=Fragment(body, body.output))
    made = [
        Primitive("c", K.CALL, inputs=named(text=Ref("l"))),
        each,
        Primitive("j", between, inputs=named(found=Ref("m"))),
        Primitive("p", K.PREFILLING, "llm", named(context=Ref("j"), question=QUESTION), prompt=(LITERAL, V("context"))),
        Primitive("d", K.DECODING, "llm", named(prefilling=Ref("p"))),
    ]
    return Graph([write, lines, *made], Ref("d"))


def graded_graph() -> Graph:
    """Return a graph that grades documents. Those that are kept are the context of a prompt."""
    grade = [
        Primitive("g", K.PREFILLING, "llm", named(document=Ref("$item")), prompt=(LITERAL, V("document"))),
        Primitive("y", K.DECODING, "llm", named(prefilling=Ref("g"))),
    ]
    return Graph(
        [
            Primitive(
                "m", K.MAP, inputs=named(items=Ref("$documents")), fragment=Fragment(Graph(grade, Ref("y")), Ref("y"))
            ),
            Primitive("j", K.CALL, inputs=named(found=Ref("m"))),
            Primitive(
                "p",
                K.PREFILLING,
                "llm",
                named(question=QUESTION, context=Ref("j")),
                prompt=(LITERAL, V("question"), V("context")),
            ),
        ],
        Ref("p"),
    )


def test_warm_up_of_a_busy_list_engine_does_not_wait() -> None:
    after = PassPipeline((SPLIT,)).run(graded_graph(), CONTEXT).graph
    assert after["p.partial#0"].attributes.when == ""
    assert after["p"].attributes.grows_with == "m"


def test_prompt_names_the_list_it_grows_with() -> None:
    after = PassPipeline((SPLIT, DecodingPipelining())).run(growing_graph(), CONTEXT).graph
    assert after["p"].attributes.grows_with == "m" and after["w"].attributes.grows_with == ""
    (found,) = growths(after)
    assert (found.holder, [call.id for call in found.calls], found.variable, found.end) == ("m", ["j"], "context", 2)


@pytest.mark.parametrize("why", ["user code lies between", "the engine takes turns", "no prefixes are kept", "no list"])
def test_prompt_does_not_grow_in_unsuitable_cases(why: str) -> None:
    changes = {"the engine takes turns": {"interference": 1.0}, "no prefixes are kept": {"prefix_caching": False}}
    context = PassContext({**PROFILES, "llm": replace(PROFILES["llm"], **changes.get(why, {}))})  # type: ignore[arg-type]
    before = growing_graph(K.OPAQUE if why.startswith("user code") else K.CALL)
    passes = (SPLIT,) if why == "no list" else (SPLIT, DecodingPipelining())
    assert growths(PassPipeline(passes).run(before, context).graph) == ()
