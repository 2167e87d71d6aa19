"""Tests of the pass that removes order edges which data does not need."""

from __future__ import annotations

from pass_apps import CONTEXT, READS, WRITES, Golden, K, advanced_rag, call, retrieval_body

from teola_plugin.graph import (
    UNKNOWN_EFFECT,
    Component,
    Effect,
    Graph,
    Primitive,
    PromptPart,
    Ref,
    Role,
    WorkflowTemplate,
    build_pgraph,
    named,
)
from teola_plugin.passes import PruneDependencies

PRUNE = PruneDependencies()


def prune(*primitives: Primitive) -> Graph:
    return PRUNE.run(Graph(primitives, Ref(primitives[-1].id)), CONTEXT)


def test_advanced_rag_graph_matches_golden_file(golden: Golden) -> None:
    before = build_pgraph(advanced_rag())
    golden("prune_dependencies/advanced_rag", before, PRUNE.run(before, CONTEXT))


def test_order_edges_without_effects_are_removed() -> None:
    after = prune(call("a"), call("b", after=("a",)), call("c", "b", after=("b",)))
    assert after["b"].after == after["c"].after == ()


def test_conflicting_effects_keep_their_order() -> None:
    after = prune(
        call("write", effects=(WRITES,)),
        call("read", after=("write",), effects=(READS,)),
        call("other", after=("read",), effects=(Effect("collection:other"),)),
        call("again", after=("other",), effects=(READS,)),
    )
    assert after["read"].after == ("write",)
    assert after["other"].after == ()
    assert after["again"].after == ("write",), "two reads need no order, and the way to the writer is drawn directly"


def test_edge_implied_by_data_is_removed_despite_conflicts() -> None:
    after = prune(call("write", effects=(WRITES,)), call("read", "write", after=("write",), effects=(READS,)))
    assert after["read"].after == ()


def test_kept_order_edges_are_transitively_reduced() -> None:
    first, second = call("w1", effects=(WRITES,)), call("w2", after=("w1",), effects=(WRITES,))
    after = prune(first, second, call("read", after=("w1", "w2"), effects=(READS,)))
    assert after["read"].after == ("w2",)


def test_user_code_keeps_all_its_predecessors() -> None:
    opaque = call("user", after=("b",), kind=K.OPAQUE, effects=(UNKNOWN_EFFECT,))
    after = prune(call("a"), call("b", after=("a",)), opaque)
    assert after["b"].after == ()
    assert after["user"].after == ("b", "a"), "the edge from a to b is gone, the wait for a is not"


def test_holder_of_user_code_keeps_its_order_edges() -> None:
    body = WorkflowTemplate((Component("user", Role.TOOL, named(x=Ref("$item"))),), Ref("user"))
    template = WorkflowTemplate(
        (Component("a", Role.CALL), Component("each", Role.MAP, named(items=Ref("$input")), body=body)),
        Ref("each"),
        (("a", "each"),),
    )
    graph = build_pgraph(template)
    assert PRUNE.run(graph, CONTEXT) is graph


def test_only_pure_or_validated_work_overtakes_user_code() -> None:
    opaque = call("user", kind=K.OPAQUE, effects=(UNKNOWN_EFFECT,))
    after = prune(
        opaque,
        call("embed", after=("user",), kind=K.EMBEDDING),
        call("search", "embed", after=("user",), kind=K.SEARCHING, effects=(READS,)),
        call(
            "checked", "embed", after=("user",), kind=K.SEARCHING, effects=(Effect("collection:docs", validated=True),)
        ),
    )
    assert after["embed"].after == ()
    assert after["search"].after == ("user",)
    assert after["checked"].after == (), "its result is checked against the collection's version"


def test_aggregate_of_stages_carries_their_effects() -> None:
    stages = [call(f"ingest#{i}", kind=K.INGESTION, effects=(WRITES,)) for i in range(2)]
    end = Primitive("ingest", K.AGGREGATE, inputs=named(part0=Ref("ingest#0"), part1=Ref("ingest#1")), call="concat")
    graph = Graph([*stages, end, call("search", after=("ingest",), effects=(READS,))], Ref("search"))
    assert PRUNE.run(graph, CONTEXT) is graph


def test_speculative_values_imply_no_order() -> None:
    """Early instances may be dropped at run time, and their order edges with them."""
    body = build_pgraph(retrieval_body())
    holder = build_pgraph(
        WorkflowTemplate((Component("m", Role.MAP, named(items=Ref("$input")), body=retrieval_body()),), Ref("m"))
    )["m"]
    write = call("write", effects=(WRITES,))
    made = [p.with_(id=f"m[0]/{p.id}", after=("write",), inputs=()) for p in body if p.effects]
    m = holder.with_(after=("write",), speculative_refs=(Ref(made[0].id),))
    graph = Graph([write, *made, m], Ref("m"))
    assert PRUNE.run(graph, CONTEXT) is graph


def test_partial_prefilling_keeps_its_order_edge() -> None:
    prompt = (PromptPart.literal("x" * 400), PromptPart.var("v"))
    graph = Graph(
        [
            Primitive("p.partial#0", K.PARTIAL_PREFILLING, "llm", prompt=prompt[:1]),
            Primitive("p", K.FULL_PREFILLING, "llm", named(v=Ref("$input")), ("p.partial#0",), prompt=prompt),
        ],
        Ref("p"),
    )
    assert PRUNE.run(graph, CONTEXT) is graph


def test_pass_returns_same_graph_if_nothing_is_redundant() -> None:
    free = Graph([call("a"), call("b", "a")], Ref("b"))
    assert PRUNE.run(free, CONTEXT) is free
    needed = Graph([call("w", effects=(WRITES,)), call("r", after=("w",), effects=(READS,))], Ref("r"))
    assert PRUNE.run(needed, CONTEXT) is needed
