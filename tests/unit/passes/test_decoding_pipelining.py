"""Tests of the pass that starts work on the first items of a list while the rest is still decoded."""

from __future__ import annotations

from pass_apps import CONTEXT, PROFILES, QUESTION, READS, WRITES, Golden, K, advanced_rag, call, retrieval_body

from teola_plugin.graph import (
    UNKNOWN_EFFECT,
    Attributes,
    Component,
    Effect,
    Graph,
    Primitive,
    Ref,
    Role,
    build_pgraph,
    named,
)
from teola_plugin.graph import WorkflowTemplate as Template
from teola_plugin.passes import DecodingPipelining, PassContext, PruneDependencies

PIPELINE = DecodingPipelining()
VALIDATED = Effect("collection:docs", validated=True)


def decode(size: int | None = 2, *, splittable: bool = True) -> list[Primitive]:
    lead = Primitive("lead", K.PREFILLING, "llm", named(question=QUESTION))
    return [lead, Primitive("d", K.DECODING, "llm", named(p=Ref("lead")), splittable=splittable, size=size)]


def mapped(body: Template | None = None, items: str = "list", **changes: object) -> Primitive:
    holder = Component("m", Role.MAP, named(items=Ref("$input")), body=body or retrieval_body())
    return build_pgraph(Template((holder,), Ref("m")))["m"].with_(inputs=named(items=Ref(items)), **changes)


def graph_of(*more: Primitive, size: int | None = 2, maker: Primitive | None = None) -> Graph:
    return Graph([*decode(size), maker or call("list", "d"), *more], Ref(more[-1].id))


def embedding(**changes: object) -> Primitive:
    return Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("list")), batchable=True).with_(**changes)


def body_with(component: Component) -> Template:
    return Template((component,), Ref(component.name))


def test_advanced_rag_graph_matches_golden_file(golden: Golden) -> None:
    before = PruneDependencies().run(build_pgraph(advanced_rag()), CONTEXT)
    golden("decoding_pipelining/advanced_rag", before, PIPELINE.run(before, CONTEXT))


def test_map_instances_start_as_each_item_is_decoded() -> None:
    after = PIPELINE.run(graph_of(mapped()), CONTEXT)
    assert after["d#0"].inputs == named(p=Ref("lead")) and after["d#0"].item == 0
    assert after["d#1"].inputs == named(previous=Ref("d#0")) and after["d#1"].kind is K.PARTIAL_DECODING
    assert after["d"].inputs == named(previous=Ref("d#1")) and after["d"].kind is K.DECODING
    assert after["m[1]/hits.embedding"].inputs == named(texts=Ref("d#1")) and after["m[1]/hits.embedding"].speculative
    assert after["m"].speculative_refs == (Ref("m[0]/hits.searching"), Ref("m[1]/hits.searching"))
    assert after["m"].inputs == named(items=Ref("m.verify"))
    assert after["m.verify"].inputs == named(actual=Ref("list"), predicted0=Ref("d#0"), predicted1=Ref("d#1"))


def test_prefetched_reads_wait_for_earlier_writers(golden: Golden) -> None:
    write = call("write", effects=(WRITES,))
    before = graph_of(write, mapped(after=("write",)))
    after = PIPELINE.run(before, CONTEXT)
    assert after["m[0]/hits.searching"].after == ("write",)
    assert after["m[0]/hits.embedding"].after == (), "it touches nothing"
    golden("decoding_pipelining/after_a_writer", before, after)


def test_map_instance_waits_only_for_captures_that_it_reads() -> None:
    writer, reader = call("write", effects=(WRITES,)), call("shared", "write")
    inputs = named(items=Ref("list"), shared=Ref("shared"))
    unread = PIPELINE.run(graph_of(writer, reader, mapped(retrieval_body(VALIDATED)).with_(inputs=inputs)), CONTEXT)
    assert unread["m[0]/hits.searching"].after == ("write",), "it does not wait for `shared`, so not for the writer"
    body = Template(
        (
            Component("both", Role.CALL, named(item=Ref("$item"), shared=Ref("$shared"))),
            Component("hits", Role.RETRIEVAL, named(query=Ref("both")), "store", "embedder", effects=(VALIDATED,)),
        ),
        Ref("hits"),
    )
    read = PIPELINE.run(graph_of(writer, reader, mapped(body).with_(inputs=inputs)), CONTEXT)
    assert read["m[0]/hits.searching"].after == (), "it waits for the writer through what it reads"


def test_map_instances_read_captured_inputs() -> None:
    one = Component("s", Role.RERANKING, named(query=Ref("$question"), documents=Ref("$item")), "reranker")
    m = mapped(body_with(one)).with_(inputs=(*named(items=Ref("list")), *named(question=QUESTION)))
    after = PIPELINE.run(graph_of(m), CONTEXT)
    assert after["m[0]/s"].inputs == named(query=QUESTION, documents=Ref("d#0"))


def test_list_from_user_code_pipelines_validated_searches_only() -> None:
    """The prediction is checked against what it makes; only a search must not overtake what it might write."""
    user = call("list", "d", kind=K.OPAQUE, effects=(UNKNOWN_EFFECT,))
    assert "m[0]/hits.searching" in PIPELINE.run(graph_of(mapped(retrieval_body(VALIDATED)), maker=user), CONTEXT)
    unsafe = graph_of(mapped(), maker=user)
    assert PIPELINE.run(unsafe, CONTEXT) is unsafe


def test_prefetched_search_waits_for_writer_before_the_list() -> None:
    """The MAP waits for it through its items; the early instances do not read those."""
    write = call("write", effects=(WRITES,))
    user = call("list", "d", after=("write",), kind=K.OPAQUE, effects=(UNKNOWN_EFFECT,))
    after = PIPELINE.run(graph_of(write, mapped(retrieval_body(VALIDATED)), maker=user), CONTEXT)
    assert after["m"].after == () and after["m[0]/hits.searching"].after == ("write",)


def test_map_of_generations_on_a_pool_model_is_pipelined() -> None:
    asks = mapped(body_with(Component("g", Role.GENERATION, named(x=Ref("$item")), "llm")))
    after = PIPELINE.run(graph_of(asks), CONTEXT)
    assert after["m[1]/g.prefilling"].inputs == named(x=Ref("d#1")) and after["m[1]/g.decoding"].speculative


def test_map_of_unknown_width_grows_at_run_time(golden: Golden) -> None:
    before = graph_of(mapped(), size=None)
    after = PIPELINE.run(before, CONTEXT)
    assert after["d"].attributes.stream_items == ("m",) and after["m"].attributes.grow is True
    assert len(after) == len(before)
    assert PIPELINE.run(after, CONTEXT) is after
    golden("decoding_pipelining/unknown_width", before, after)


def test_batchable_readers_are_split_into_requests_per_item(golden: Golden) -> None:
    search = Primitive(
        "s", K.SEARCHING, "store", named(vectors=Ref("e")), effects=(READS,), batchable=True, attributes=Attributes(k=4)
    )
    before = graph_of(embedding(), search)
    after = PIPELINE.run(before, CONTEXT)
    assert after["e[1]"].inputs == named(texts=Ref("d#1")) and not after["e[1]"].batchable and after["e[1]"].speculative
    assert after["s[1]"].inputs == named(vectors=Ref("e[1]")) and after["s[1]"].speculative
    assert after["e"].inputs == named(texts=Ref("e.verify")) and after["s"] == search
    golden("decoding_pipelining/batchable_readers", before, after)


def test_pass_leaves_ineligible_graphs_unchanged() -> None:
    graph = graph_of(mapped())
    assert PIPELINE.run(graph, PassContext(PROFILES, "off")) is graph
    assert PIPELINE.run(graph, PassContext({"llm": PROFILES["llm"]})) is graph, "the embedder is the user's own"
    assert PIPELINE.run(graph, PassContext({}, "all")) is not graph
    whole = Graph([*decode(splittable=False), call("list", "d"), mapped()], Ref("m"))
    assert PIPELINE.run(whole, CONTEXT) is whole
    no_reader = graph_of(call("end", "list"))
    assert PIPELINE.run(no_reader, CONTEXT) is no_reader
    tools = graph_of(mapped(body_with(Component("t", Role.TOOL, named(x=Ref("$item"))))))
    assert PIPELINE.run(tools, CONTEXT) is tools, "a tool never runs on a prediction"
    asks = graph_of(mapped(body_with(Component("g", Role.GENERATION, named(x=Ref("$item")), "hosted"))))
    assert PIPELINE.run(asks, CONTEXT) is asks, "the user's own model gets no extra call"
    writes = graph_of(mapped(retrieval_body(WRITES)))
    assert PIPELINE.run(writes, CONTEXT) is writes


def test_second_run_of_the_pass_changes_nothing() -> None:
    for graph in (graph_of(mapped()), graph_of(embedding()), graph_of(mapped(), embedding())):
        once = PIPELINE.run(graph, CONTEXT)
        assert once is not graph
        assert PIPELINE.run(once, CONTEXT) is once


def test_result_of_user_code_over_hits_is_not_predicted() -> None:
    """A union lambda reads the whole state, the questions too; what it makes of the hits is not predicted."""
    union = Primitive("union", K.OPAQUE, inputs=named(queries=Ref("list"), hits=Ref("m")), effects=(UNKNOWN_EFFECT,))
    rerank = Primitive("rerank", K.RERANKING, "reranker", named(texts=Ref("union"), query=QUESTION), batchable=True)
    after = PIPELINE.run(graph_of(mapped(), union, rerank), CONTEXT)
    assert after["m"].speculative_refs
    assert "rerank.verify" not in after and "rerank[0]" not in after
