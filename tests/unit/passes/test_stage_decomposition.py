"""Tests of the pass that divides large batches into stages."""

from __future__ import annotations

from dataclasses import replace

from pass_apps import CONTEXT, ONE_DEVICE, PROFILES, WRITES, Golden, K, advanced_rag, call

from teola_plugin.graph import Graph, Primitive, Ref, Slice, build_pgraph, named
from teola_plugin.passes import PassContext, PruneDependencies, StageDecomposition

STAGES = StageDecomposition()
CHUNKS = call("chunks", "$input", kind=K.CHUNKING)


def embedding(size: int | None, name: str = "embed") -> Primitive:
    return Primitive(name, K.EMBEDDING, "embedder", named(texts=Ref("chunks")), batchable=True, size=size)


def ingestion(size: int | None = None) -> Primitive:
    inputs = named(chunks=Ref("chunks"), vectors=Ref("embed"))
    return Primitive("ingest", K.INGESTION, "store", inputs, effects=(WRITES,), batchable=True, size=size)


def reranking(size: int) -> Primitive:
    inputs = named(query=Ref("$input"), documents=Ref("chunks"))
    return Primitive("rerank", K.RERANKING, "reranker", inputs, batchable=True, size=size)


def test_advanced_rag_graph_matches_golden_file(golden: Golden) -> None:
    before = PruneDependencies().run(build_pgraph(advanced_rag()), CONTEXT)
    golden("stage_decomposition/advanced_rag", before, STAGES.run(before, CONTEXT))


def test_stages_need_no_aggregate_if_the_whole_is_unread() -> None:
    after = STAGES.run(Graph([CHUNKS, embedding(300), ingestion()], Ref("chunks")), CONTEXT)
    assert [p.id for p in after if p.id.startswith("embed")] == ["embed#0", "embed#1", "embed#2"]
    assert [p.size for p in after if p.id.startswith("ingest")] == [128, 128, 44]
    assert "embed" not in after and "ingest" not in after
    assert after["ingest#1"].inputs == named(chunks=Ref("chunks", (Slice(128, 256),)), vectors=Ref("embed#1"))
    assert after["embed#2"].inputs == named(texts=Ref("chunks", (Slice(256, None),))), "the last takes what is left"
    assert all(after[f"ingest#{i}"].effects == (WRITES,) for i in range(3))


def test_aggregate_is_added_for_readers_and_order_edges(golden: Golden) -> None:
    graph = Graph(
        [CHUNKS, embedding(300), ingestion(), call("reader", "embed"), call("later", "reader", after=("ingest",))],
        Ref("later"),
    )
    after = STAGES.run(graph, CONTEXT)
    assert after["embed"].kind is after["ingest"].kind is K.AGGREGATE
    golden("stage_decomposition/readers_of_the_whole", graph, after)


def test_order_edges_carry_over_to_every_stage() -> None:
    wait = call("wait")
    graph = Graph([wait, CHUNKS, embedding(200).with_(after=("wait",))], Ref("embed"))
    after = STAGES.run(graph, PassContext({"embedder": replace(PROFILES["embedder"], device="")}))
    assert after["embed#0"].after == after["embed#1"].after == ("wait",)


def test_reranking_is_split_by_documents_only(golden: Golden) -> None:
    graph = Graph([CHUNKS, reranking(40)], Ref("rerank"))
    after = STAGES.run(graph, PassContext({"reranker": replace(PROFILES["reranker"], device="")}))
    assert after["rerank#1"].inputs == named(query=Ref("$input"), documents=Ref("chunks", (Slice(32, None),)))
    golden("stage_decomposition/reranking", graph, after)


def test_stage_too_large_for_its_reader_is_split_again() -> None:
    small = PassContext({**PROFILES, "store": replace(PROFILES["store"], max_efficient_batch=100, device="")})
    first = STAGES.run(Graph([CHUNKS, embedding(200), ingestion()], Ref("chunks")), small)
    second = STAGES.run(first, small)
    assert [p.id for p in second if p.kind is K.INGESTION] == ["ingest#0#0", "ingest#0#1", "ingest#1"]
    assert second["ingest#0#1"].inputs == named(
        chunks=Ref("chunks", (Slice(0, 128), Slice(100, None))), vectors=Ref("embed#0", (Slice(100, None),))
    )
    assert STAGES.run(second, small) is second


def test_stages_of_other_sizes_are_read_through_an_aggregate() -> None:
    """Two producers with different cuts: the reader follows the first, and takes its share of the other's whole."""
    other = embedding(300, "other").with_(engine="other", inputs=named(texts=Ref("chunks")))
    both = ingestion().with_(inputs=named(chunks=Ref("embed"), vectors=Ref("other")))
    profiles = {**PROFILES, "other": replace(PROFILES["embedder"], max_efficient_batch=200, device="gpu:7")}
    after = STAGES.run(Graph([CHUNKS, embedding(300), other, both], Ref("ingest")), PassContext(profiles))
    assert after["ingest#1"].inputs == named(chunks=Ref("embed#1"), vectors=Ref("other", (Slice(128, 256),)))
    assert after["other"].kind is K.AGGREGATE and "embed" not in after


def test_pass_leaves_ineligible_graphs_unchanged() -> None:
    fits = Graph([CHUNKS, embedding(128), ingestion()], Ref("ingest"))
    assert STAGES.run(fits, CONTEXT) is fits
    unknown = Graph([CHUNKS, embedding(None), ingestion()], Ref("ingest"))
    assert STAGES.run(unknown, CONTEXT) is unknown
    large = Graph([CHUNKS, embedding(666), ingestion(666)], Ref("ingest"))
    assert STAGES.run(large, ONE_DEVICE) is large, "engines of one device do not overlap"
    assert STAGES.run(large, PassContext()) is large, "nothing is known of the engines"
    alone = Graph([CHUNKS, embedding(666)], Ref("embed"))
    assert STAGES.run(alone, CONTEXT) is alone, "its one device does one stage after the other"


def test_second_run_of_the_pass_changes_nothing() -> None:
    graph = Graph([CHUNKS, embedding(666), ingestion(666)], Ref("ingest"))
    once = STAGES.run(graph, CONTEXT)
    assert once is not graph
    assert STAGES.run(once, CONTEXT) is once


def test_write_made_from_an_earlier_write_is_not_staged() -> None:
    """A second writing that is made of the first (hypothesis found it): its first stage waits for the other's last."""
    again = Primitive("again", K.EMBEDDING, "embedder", named(texts=Ref("ingest")), batchable=True)
    second = ingestion().with_(id="second", inputs=named(chunks=Ref("chunks"), vectors=Ref("again")))
    after = STAGES.run(Graph([CHUNKS, embedding(300), ingestion(), again, second], Ref("second")), CONTEXT)
    assert "second" in after and "second#0" not in after
    assert {f"ingest#{i}" for i in range(3)} <= set(after.ancestors["second"])
