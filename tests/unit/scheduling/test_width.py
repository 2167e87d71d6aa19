"""Tests of the graph scheduler's cost for wide queries: linear in their width."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import pytest

from teola_plugin.graph import Attributes, Fragment, Graph, Primitive, PrimitiveKind, Ref, named
from teola_plugin.scheduling import GraphScheduler
from teola_plugin.scheduling.events import (
    Admit,
    Close,
    Dispatch,
    End,
    Expand,
    Expanded,
    Finished,
    ItemClosed,
    PrimitiveFailed,
    RunCall,
    SubplanBegun,
    SubplanEnded,
    Tick,
    Unused,
    WakeAt,
)
from tests.support.steps import growth

K = PrimitiveKind
LINEAR = 1.3


def body() -> Fragment:
    """Return a body of two primitives. The first one also reads a value from outside."""
    own = (Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("$item"), more=Ref("$pre"))),
           Primitive("d", K.CALL, inputs=named(x=Ref("e"))))  # fmt: skip
    return Fragment(Graph(own, Ref("d")), Ref("d"))


def mapped(*before: Primitive, items: str) -> Graph:
    m = Primitive("m", K.MAP, inputs=named(items=Ref(items), pre=Ref("$input")), fragment=body())
    return Graph([*before, m, Primitive("out", K.CALL, inputs=named(x=Ref("m")))], Ref("out"))


def listed() -> Graph:
    return mapped(Primitive("list", K.CALL, inputs=named(x=Ref("$input"))), items="list")


def streamed() -> Graph:
    decoding = Primitive("d", K.DECODING, "llm", named(p=Ref("p")), attributes=Attributes(stream_items=("m",)))
    return mapped(Primitive("p", K.PREFILLING, "llm"), decoding, items="d")


def planned(width: int) -> Graph:
    """Return the primitives that passes make from a list of known length."""
    partials, previous = [], "p"
    for i in range(width):
        partials.append(Primitive(f"d#{i}", K.PARTIAL_DECODING, "llm", named(previous=Ref(previous)), item=i))
        previous = f"d#{i}"
    predicted = tuple((f"predicted{i}", Ref(p.id)) for i, p in enumerate(partials))
    early = []
    for i, p in enumerate(partials):
        early += body().instantiate(f"m[{i}]", {"$item": Ref(p.id), "$pre": Ref("$input")}, speculative=True)[0]
    m = Primitive("m", K.MAP, inputs=named(items=Ref("verify"), pre=Ref("$input")), fragment=body(),
                  speculative_refs=tuple(Ref(f"m[{i}]/d") for i in range(width)))  # fmt: skip
    return Graph(
        [Primitive("p", K.PREFILLING, "llm"), *partials, *early, m,
         Primitive("d", K.DECODING, "llm", named(previous=Ref(previous))),
         Primitive("list", K.CALL, inputs=named(x=Ref("d"))),
         Primitive("verify", K.VERIFY, inputs=(("actual", Ref("list")), *predicted)),
         Primitive("out", K.CALL, inputs=named(x=Ref("m")))], Ref("out"))  # fmt: skip


def run(graph: Graph, width: int, *, matched: bool = False, items: int = 0, fails: str = "",
        look: Callable[[GraphScheduler], None] | None = None) -> Counter[str]:  # fmt: skip
    """Carry out everything that the scheduler orders, at once and in its order.

    Return the number of orders of each kind.

    `items` is the number of items that a decoding closes. `look` is called after each event.
    """
    scheduler, counts = GraphScheduler(), Counter[str]()
    todo: deque[Any] = deque([Admit(0.0, "q", graph)])
    while todo:
        for order in scheduler.handle(todo.popleft()):
            counts[order.outcome if isinstance(order, End) else type(order).__name__] += 1
            if isinstance(order, Dispatch):
                todo += [Finished(0.0, "q", order.primitive.id)]
                todo += [ItemClosed(0.0, "q", "d", i, f"d#{i}") for i in range(items if order.group else 0)]
                todo += [Finished(0.0, "q", member.id) for member in order.group]
            elif isinstance(order, RunCall):
                ended = PrimitiveFailed if order.primitive.id == fails else Finished
                todo.append(ended(0.0, "q", order.primitive.id))
            elif isinstance(order, Expand):
                found = tuple(range(width)) if matched else ()
                todo.append(Expanded(0.0, "q", order.primitive.id, width, found))
        if look is not None:
            look(scheduler)
    assert not scheduler.queries
    return counts


WIDE: dict[str, Callable[[int], Counter[str]]] = {
    "a list": lambda n: run(listed(), n),
    "a list that grows": lambda n: run(streamed(), n, items=n, matched=True),
    "a list that was foreseen": lambda n: run(planned(n), n, matched=True),
    "a list that was foreseen wrongly": lambda n: run(planned(n), n),
}


@pytest.mark.parametrize("wide", WIDE.values(), ids=WIDE)
def test_map_scheduling_cost_is_linear_in_width(wide: Callable[[int], Counter[str]]) -> None:
    assert wide(20)["done"] == 1
    assert growth(wide, 60) < LINEAR


def folded() -> Graph:
    step = Graph([Primitive("step", K.CALL, inputs=named(i=Ref("$item"), c=Ref("$carry")))], Ref("step"))
    once = Fragment(step, Ref("step"))
    f = Primitive("f", K.FOLD, inputs=named(items=Ref("list"), init=Ref("$input")), fragment=once)
    return Graph([Primitive("list", K.CALL, inputs=named(x=Ref("$input"))), f], Ref("f"))


def test_fold_scheduling_cost_is_linear_in_length() -> None:
    assert growth(lambda n: run(folded(), n), 60) < LINEAR


def test_failure_cancels_a_chain_of_any_length() -> None:
    assert run(folded(), 3000, fails="f[0]/step")["failed"] == 1


def test_unused_predictions_take_linear_time() -> None:
    def unused(width: int) -> None:
        scheduler = GraphScheduler()
        scheduler.handle(Admit(0.0, "q", planned(width)))
        for i in range(width):
            scheduler.handle(Unused(0.0, "q", f"d#{i}"))
        assert all(live.status.has_ended for i in range(width) for live in scheduler.queries["q"].within(f"m[{i}]"))

    assert growth(unused, 60) < LINEAR


PART = Graph([Primitive("a", K.EMBEDDING, "embedder", named(x=Ref("$input"))),
              Primitive("b", K.CALL, inputs=named(x=Ref("a")))], Ref("b"))  # fmt: skip


def one_part(scheduler: GraphScheduler, number: int, graph: Graph = PART) -> list[Any]:
    name = f"part{number}"
    out = scheduler.handle(SubplanBegun(0.0, "q", name, graph, f"${name}"))
    for p in graph:
        out += scheduler.handle(Finished(0.0, "q", f"{name}/{p.id}"))
    return out + scheduler.handle(SubplanEnded(0.0, "q", name))


def opened(*deadline: float) -> GraphScheduler:
    scheduler = GraphScheduler()
    scheduler.handle(Admit(0.0, "q", Graph([Primitive("user", K.OPAQUE)], Ref("user")), *deadline, original_runs=True))
    return scheduler


def test_subplans_take_linear_time_and_leave_nothing_behind() -> None:
    def parts(count: int) -> None:
        scheduler = opened()
        for number in range(count):
            one_part(scheduler, number)

    assert growth(parts, 60) < LINEAR
    scheduler = opened()
    query = scheduler.queries["q"]
    one_part(scheduler, 0)
    before = table_sizes(query)
    for number in range(1, 50):
        one_part(scheduler, number)
    assert table_sizes(query) == before
    assert len(query) == 1


def test_ended_subplan_releases_all_its_values() -> None:
    unread = Graph([Primitive("a", K.CALL), Primitive("b", K.CALL, inputs=named(x=Ref("a")))], Ref("b"))
    instructions = one_part(opened(), 1, unread)
    released = {order.producer for order in instructions if hasattr(order, "producer")}
    assert released == {"$part1", "part1/a", "part1/b"}


def table_sizes(query: Any) -> dict[str, int]:
    """Return the number of entries in every table of a live query."""
    tables = {name: value for name, value in vars(query).items() if isinstance(value, dict | list | set)}
    return {name: len(value) for name, value in tables.items()}


def test_finished_map_leaves_no_state_of_its_items() -> None:
    scheduler = GraphScheduler()
    scheduler.handle(Admit(0.0, "q", listed(), original_runs=True))
    query, before = scheduler.queries["q"], table_sizes(scheduler.queries["q"])
    scheduler.handle(Finished(0.0, "q", "list"))
    scheduler.handle(Expanded(0.0, "q", "m", 50))
    assert len(query) == 103
    for i in range(50):
        for name in ("e", "d"):
            scheduler.handle(Finished(0.0, "q", f"m[{i}]/{name}"))
    scheduler.handle(Finished(0.0, "q", "out"))
    assert len(query) == 3
    after = table_sizes(query)
    assert all(after[name] <= size for name, size in before.items())


def test_deepest_returns_the_depth_of_unfinished_primitives() -> None:
    scheduler = GraphScheduler()
    scheduler.handle(Admit(0.0, "q", listed()))
    query = scheduler.queries["q"]
    depths = [query.deepest()]
    scheduler.handle(Finished(0.0, "q", "list"))
    scheduler.handle(Expanded(0.0, "q", "m", 3))
    depths.append(query.deepest())
    for i in range(3):
        for name in ("e", "d"):
            scheduler.handle(Finished(0.0, "q", f"m[{i}]/{name}"))
    depths.append(query.deepest())
    assert depths == [2, 3, 0]


def wakes(instructions: list[Any]) -> list[float]:
    return [order.at for order in instructions if isinstance(order, WakeAt)]


def test_only_the_earliest_deadline_is_announced_and_only_once() -> None:
    scheduler = GraphScheduler()
    graph = Graph([Primitive("user", K.OPAQUE)], Ref("user"))
    instructions = [
        order for i in range(1000) for order in scheduler.handle(Admit(i / 1000, f"q{i}", graph, 60.0 + i / 1000, True))
    ]
    assert wakes(instructions) == [60.0]
    assert wakes(scheduler.handle(Admit(1.0, "sooner", graph, 5.0, True))) == [5.0]
    for i in range(999):
        assert not wakes(scheduler.handle(Close(1.0, f"q{i}")))
    assert wakes(scheduler.handle(Tick(5.0))) == [60.999]  # of those that are over, none
    assert not wakes(scheduler.handle(Tick(60.0)))
    assert [order.outcome for order in scheduler.handle(Tick(60.999)) if isinstance(order, End)] == ["timeout"]
    assert not scheduler.queries


def test_deadline_already_passed_is_still_announced() -> None:
    scheduler = opened(5.0)
    scheduler.handle(Tick(5.0))
    graph = Graph([Primitive("user", K.OPAQUE)], Ref("user"))
    assert wakes(scheduler.handle(Admit(6.0, "late", graph, 5.5, True))) == [5.5]
    assert [order.outcome for order in scheduler.handle(Tick(6.0)) if isinstance(order, End)] == ["timeout"]


def nested() -> Graph:
    """Return a graph of a list of lists whose inner results are folded."""
    step = Graph([Primitive("s", K.EMBEDDING, "embedder", named(i=Ref("$item"), c=Ref("$carry")))], Ref("s"))
    inner = Graph([Primitive("each", K.MAP, inputs=named(items=Ref("$item"), pre=Ref("$pre")), fragment=body()),
                   Primitive("f", K.FOLD, inputs=named(items=Ref("each"), init=Ref("$pre")),
                             fragment=Fragment(step, Ref("s")))], Ref("f"))  # fmt: skip
    m = Primitive("m", K.MAP, inputs=named(items=Ref("list"), pre=Ref("slow")), fragment=Fragment(inner, Ref("f")))
    return Graph([Primitive("list", K.CALL, inputs=named(x=Ref("$input"))), Primitive("slow", K.CALL),
                  m, Primitive("out", K.CALL, inputs=named(x=Ref("m")))], Ref("out"))  # fmt: skip


def longest(query: Any) -> dict[str, int]:
    """Compute all depths from scratch."""
    known: dict[str, int] = {}

    def depth(name: str) -> int:
        if name not in known:
            known[name] = 1 + max([depth(child.id) for child in query.children(name)], default=-1)
        return known[name]

    return {live.id: depth(live.id) for live in query if not live.status.has_ended}


DEEP: dict[str, Callable[[Callable[[GraphScheduler], None]], Any]] = {
    "a list": lambda look: run(listed(), 4, look=look),
    "a list that grows": lambda look: run(streamed(), 4, items=3, look=look),
    "a list that was foreseen wrongly": lambda look: run(planned(4), 4, look=look),
    "a fold": lambda look: run(folded(), 4, look=look),
    "lists of lists": lambda look: run(nested(), 3, look=look),
}


@pytest.mark.parametrize("grow", DEEP.values(), ids=DEEP)
def test_depths_equal_longest_paths_however_a_query_grows(grow: Callable[[Any], Any]) -> None:
    looked = 0

    def look(scheduler: GraphScheduler) -> None:
        nonlocal looked
        for query in scheduler.queries.values():
            looked += 1
            found = {live.id: live.depth for live in query if not live.status.has_ended}
            assert found == longest(query)
            assert query.deepest() == max(found.values(), default=0)

    grow(look)
    assert looked > 5
