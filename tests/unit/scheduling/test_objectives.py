"""Tests of the objectives of graphs, and of how schedulers use them."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest

from teola_plugin.graph import Batching, EngineProfile, Fragment, Graph, Primitive, PrimitiveKind, Ref, named
from teola_plugin.scheduling import EngineScheduler, GraphScheduler
from teola_plugin.scheduling.engine_queue import Enqueue, QueuedRequest, RequestsEnded, RunBatch
from teola_plugin.scheduling.events import Admit, Expanded, Finished
from teola_plugin.scheduling.live_query import Objective, deduce_objectives

K = PrimitiveKind
ENGINES = {K.EMBEDDING: "embedder", K.SEARCHING: "store", K.PREFILLING: "llm", K.DECODING: "llm", K.RERANKING: "judge"}
ENGINES[K.PARTIAL_PREFILLING] = ENGINES[K.FULL_PREFILLING] = "llm"


def p(name: str, kind: PrimitiveKind, *reads: str, **more: Any) -> Primitive:
    return Primitive(name, kind, ENGINES.get(kind, ""), tuple((f"i{n}", Ref(r)) for n, r in enumerate(reads)), **more)


def ask(name: str, *reads: str) -> list[Primitive]:
    """Return the primitives of an LLM call whose value is that of `name`."""
    return [p(f"{name}.prefilling", K.PREFILLING, *reads), p(name, K.DECODING, f"{name}.prefilling")]


def objectives(*primitives: Primitive, output: str) -> dict[str, str]:
    """Return `latency`, `background` or the gang of each primitive."""
    found = deduce_objectives(Graph(primitives, Ref(output)))
    return {
        name: f"gang {w.gang}" if w.objective is Objective.THROUGHPUT else w.objective.value
        for name, w in found.items()
    }


def test_all_primitives_of_a_chain_are_latency_bound() -> None:
    found = objectives(p("e", K.EMBEDDING, "$input"), p("s", K.SEARCHING, "e"), *ask("a", "s"), output="a")
    assert set(found.values()) == {"latency"}


def test_maps_before_a_reduce_form_a_gang_with_their_inputs() -> None:
    maps = [made for i in range(3) for made in (p(f"e{i}", K.EMBEDDING, "split"), *ask(f"m{i}", f"e{i}"))]
    calls = [p(f"parse{i}", K.CALL, f"m{i}") for i in range(3)]
    reads = [f"parse{i}" for i in range(3)]
    found = objectives(*ask("split", "$input"), *maps, *calls, *ask("reduce", *reads), output="reduce")
    gang = {name for name, objective in found.items() if objective == "gang reduce.prefilling"}
    assert gang == {f"{name}{i}{more}" for i in range(3) for name, more in
                    [("e", ""), ("m", ""), ("m", ".prefilling"), ("parse", "")]}  # fmt: skip
    assert {found["split"], found["split.prefilling"], found["reduce"]} == {"latency"}


def test_branches_of_different_kinds_form_no_gang() -> None:
    found = objectives(p("e", K.EMBEDDING, "$input"), p("s", K.SEARCHING, "e"), *ask("rewrite", "$input"),
                       p("found", K.CALL, "s"), p("text", K.CALL, "rewrite"), *ask("a", "found", "text"),
                       output="a")  # fmt: skip
    assert set(found.values()) == {"latency"}


def test_value_needed_outside_the_gang_is_latency_bound() -> None:
    found = objectives(p("e0", K.EMBEDDING, "$input"), p("e1", K.EMBEDDING, "$input"),
                       p("s0", K.SEARCHING, "e0"), p("s1", K.SEARCHING, "e1"),
                       p("both", K.AGGREGATE, "s0", "s1"), p("check", K.CALL, "both", "e1"),
                       output="check")  # fmt: skip
    assert found["s0"] == found["s1"] == found["e0"] == "gang both"
    assert found["e1"] == "latency"


def test_nested_gangs_are_separate_and_shared_input_is_latency_bound() -> None:
    """Two summaries, each of two searches; all four searches start from one embedding."""
    searches = [p(f"s{i}{j}", K.SEARCHING, "e") for i in range(2) for j in range(2)]
    found = objectives(p("e", K.EMBEDDING, "$input"), *searches, *ask("a0", "s00", "s01"), *ask("a1", "s10", "s11"),
                       p("end", K.AGGREGATE, "a0", "a1"), output="end")  # fmt: skip
    assert found["s00"] == "gang a0.prefilling" and found["s11"] == "gang a1.prefilling"
    assert found["a0"] == found["a1.prefilling"] == "gang end"
    assert found["e"] == "latency"


@pytest.mark.parametrize(("more", "objective"), [({"size": 9}, "gang e"), ({"size": 1}, "latency"), ({}, "gang e")])
def test_requests_of_one_batchable_primitive_form_a_gang(more: dict[str, Any], objective: str) -> None:
    assert objectives(p("e", K.EMBEDDING, "$input", batchable=True, **more), output="e") == {"e": objective}


def test_warm_up_gets_the_background_objective() -> None:
    full = p("full", K.FULL_PREFILLING, "e", after=("part",))
    graph = [p("part", K.PARTIAL_PREFILLING, "$input"), p("e", K.EMBEDDING, "$input"), full]
    found = objectives(*graph, p("a", K.DECODING, "full"), output="a")
    assert found == {"part": "background", "e": "latency", "full": "latency", "a": "latency"}


# ---------------------------------------------------------------- instances of fragments


def spliced(kind: PrimitiveKind, items: int) -> dict[str, tuple[str, str]]:
    """Return the objectives of the instances' primitives for this number of items."""
    body = Graph([p("e", K.EMBEDDING, "$item" if kind is K.MAP else "$carry"), p("s", K.SEARCHING, "e")], Ref("s"))
    inputs = named(items=Ref("list")) if kind is K.MAP else named(items=Ref("list"), init=Ref("$input"))
    holder = Primitive("h", kind, inputs=inputs, fragment=Fragment(body, Ref("s")))
    graph = Graph([p("list", K.CALL, "$input"), holder, *ask("a", "h")], Ref("a"))
    scheduler = GraphScheduler()
    scheduler.handle(Admit(0.0, "q", graph))
    query = scheduler.queries["q"]
    scheduler.handle(Finished(0.0, "q", "list"))
    scheduler.handle(Expanded(0.0, "q", "h", items))
    return {
        live.id: (live.gang_objective.objective.value, live.gang_objective.gang) for live in query if "/" in live.id
    }


def test_map_instances_form_a_gang_but_fold_rounds_do_not() -> None:
    assert spliced(K.MAP, 2) == {f"h[{i}]/{name}": ("throughput", "h") for i in range(2) for name in ("e", "s")}, (
        "instances of a MAP"
    )
    assert set(spliced(K.MAP, 1).values()) == {("latency", "")}, "a single item is waited for"
    assert set(spliced(K.FOLD, 3).values()) == {("latency", "")}, "each round of a FOLD waits for the one before"


# ---------------------------------------------------------------- what the engine scheduler makes of it


def llm(requests: int) -> EngineScheduler:
    return EngineScheduler(EngineProfile(batching=Batching.CONTINUOUS, max_batch=999, max_requests=requests))


def enqueue(query: str, name: str, objective: Objective) -> Enqueue:
    return Enqueue(0.0, query, name, K.PREFILLING, (QueuedRequest(name),), objective=objective)


def run_order(scheduler: EngineScheduler, *, late: int = 0) -> list[str]:
    """Return the order in which requests run one at a time. One of `late` arrives after each."""
    order, numbers = [], count()
    while scheduler.running.by_id:
        first = next(iter(scheduler.running.by_id))
        order.append(first)
        if len(order) <= late:
            scheduler.handle(enqueue(f"late{next(numbers)}", f"late{len(order)}", Objective.LATENCY))
        scheduler.handle(RequestsEnded(1.0, (first,)))
    return order


def test_latency_bound_call_overtakes_the_rest_of_a_gang() -> None:
    scheduler = llm(2)
    for i in range(6):
        scheduler.handle(enqueue("q1", f"map{i}", Objective.THROUGHPUT))
    scheduler.handle(enqueue("q2", "answer", Objective.LATENCY))
    scheduler.handle(enqueue("q3", "warm-up", Objective.BACKGROUND))
    assert run_order(scheduler) == ["map0", "map1", "answer", "map2", "map3", "map4", "map5", "warm-up"]


def test_gang_is_overtaken_a_bounded_number_of_times() -> None:
    scheduler = llm(1)
    scheduler.handle(enqueue("q0", "first", Objective.LATENCY))
    scheduler.handle(enqueue("q1", "map", Objective.THROUGHPUT))
    order = run_order(scheduler, late=60)
    assert 20 <= order.index("map") <= 22


def test_batch_priorities_follow_the_order_of_admission() -> None:
    """Members of a gang keep their place there: to let later ones pass cost a third of the mean latency under load
    (`examples/06_compare_policies.py`), since the oldest queries then ended last."""
    scheduler = llm(9)
    wanted = [Objective.LATENCY, Objective.THROUGHPUT, Objective.LATENCY, Objective.THROUGHPUT]
    instructions = [i for n, o in enumerate(wanted) for i in scheduler.handle(enqueue(f"q{n}", f"r{n}", o))]
    assert [i.priorities for i in instructions if isinstance(i, RunBatch)] == [(0,), (1,), (2,), (3,)]
