"""Any app that searches for what an LLM writes gives the same output, whether its answer begins on a guess or not."""

from __future__ import annotations

from typing import Any

from hypothesis import find, given
from hypothesis import strategies as st
from pass_interpreter import K
from test_passes import INPUT, check, relaxed

from teola_plugin.graph import Curve, Effect, EngineProfile, Fragment, Graph, Primitive, PromptPart, Ref, named
from teola_plugin.passes import DEFAULT_PASSES, PassContext, ProvisionalAnswers, default_pipeline

READS, WRITES = (Effect("a"),), (Effect("a", writes=True),)


def _search(name: str, text: Ref) -> list[Primitive]:
    vector = Primitive(f"{name}.vector", K.EMBEDDING, "embedder", named(texts=text))
    hits = Primitive(f"{name}.hits", K.SEARCHING, "store", named(vectors=Ref(vector.id)), effects=READS)
    return [vector, hits]


def _writing(draw: Any) -> list[Primitive]:
    prompt = (PromptPart.literal("write others " * 9), PromptPart.var("question"))
    lead = Primitive("ask", K.PREFILLING, "writer", named(question=INPUT), prompt=prompt)
    said = (("yields", draw(st.integers(0, 4))),)
    last = Primitive("written", K.DECODING, "writer", named(prefilling=Ref("ask")), options=said)
    return [lead, last, Primitive("others", K.CALL, inputs=named(x=Ref("written")), call="split")]


@st.composite
def apps(draw: Any) -> Graph:
    """Written to, searched by the question itself, by what is written, reranked, answered: all but the last two may be
    missing, and code in between, some of it the user's."""
    made: list[Primitive] = []
    if draw(st.booleans()):
        made.append(Primitive("chunks", K.CHUNKING, inputs=named(text=INPUT), options=(("length", 2),)))
        vectors = Primitive("vectors", K.EMBEDDING, "embedder", named(texts=Ref("chunks")), batchable=True)
        given = named(chunks=Ref("chunks"), vectors=Ref("vectors"))
        made += [vectors, Primitive("rows", K.INGESTION, "store", given, effects=WRITES, batchable=True)]
    made += _writing(draw)
    own = _search("own", INPUT) if draw(st.booleans()) else []
    inner = _search("each", Ref("$item"))
    held = Fragment(Graph(inner, Ref("each.hits")), Ref("each.hits"))
    made += [*own, Primitive("found", K.MAP, inputs=named(items=Ref("others")), fragment=held, effects=READS)]
    parts = named(found=Ref("found")) + (named(own=Ref("own.hits")) if own else ())
    code = draw(st.sampled_from((K.CALL, K.CALL, K.CALL, K.OPAQUE)))
    made.append(Primitive("union", code, inputs=parts, effects=(Effect("*", writes=True),) if code is K.OPAQUE else ()))
    last = "union"
    if draw(st.booleans()):
        scores = named(texts=Ref("union"), query=INPUT)
        made.append(Primitive("scores", K.RERANKING, "reranker", scores))
        last = "best"
        made.append(Primitive(last, K.CALL, inputs=named(a=Ref("union"), b=Ref("scores"))))
    prompt = (PromptPart.literal("answer " * 9), PromptPart.var("context"), PromptPart.var("question"))
    given = named(context=Ref(last), question=INPUT)
    made.append(Primitive("answer.p", K.PREFILLING, "llm", given, prompt=prompt))
    made.append(Primitive("answer", K.DECODING, "llm", named(prefilling=Ref("answer.p")), options=(("yields", 1),)))
    return Graph(_in_order(made), Ref("answer"))


def _in_order(made: list[Primitive]) -> list[Primitive]:
    """As a developer might have written it: user code behind all before it, all behind rows and user code."""
    ordered: list[Primitive] = []
    for p in made:
        behind = [q.id for q in ordered if p.kind is K.OPAQUE or q.kind is K.OPAQUE or q.id == "rows"]
        ordered.append(p.with_(after=tuple(behind)))
    return ordered


@st.composite
def contexts(draw: Any) -> PassContext:
    def profile(name: str) -> EngineProfile:
        return EngineProfile(
            curves={kind: Curve.linear(0.01, 0.01) for kind in K},
            device=draw(st.sampled_from((name, name, name, "shared"))),
            prefix_caching=draw(st.booleans()),
            dedicated=draw(st.sampled_from((True, True, True, False))),
        )

    profiles = {name: profile(name) for name in ("llm", "writer", "embedder", "reranker", "store")}
    if draw(st.booleans()):
        profiles["writer"] = profiles["llm"]
    return PassContext(profiles, draw(st.sampled_from(("auto", "auto", "all", "off"))))


@relaxed
@given(graph=apps(), context=contexts())
def test_what_begins_on_the_questions_own_hits_changes_no_answer(graph: Graph, context: PassContext) -> None:
    after = ProvisionalAnswers().run(graph, context)
    if after is not graph:
        check(graph, after, range(3))
        guessed = [p for p in after if p.attributes.provisional]
        ids = {p.id for p in guessed}
        assert not any(ref.producer in ids for p in after if p.id not in ids for ref in p.refs), "nobody reads a guess"
        assert not any(set(p.after) & ids for p in after if p.id not in ids), "nobody waits for one"
    made = default_pipeline().run(graph, context).graph
    check(graph, made, range(2))
    assert default_pipeline().run(made, context).graph is made, "a fixed point"


def test_such_apps_are_drawn() -> None:
    find(st.tuples(apps(), contexts()), lambda drawn: "others.provisional" in ProvisionalAnswers().run(*drawn))
    assert ProvisionalAnswers() in DEFAULT_PASSES
