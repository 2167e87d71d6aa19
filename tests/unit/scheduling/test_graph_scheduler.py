"""Tests of the graph scheduler by tables of events and instructions."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from teola_plugin.graph import Attributes, Fragment, Graph, Primitive, PrimitiveKind, Ref, named
from teola_plugin.scheduling import GraphScheduler
from teola_plugin.scheduling.events import (
    Admit,
    Await,
    Cancel,
    CancelQuery,
    Close,
    Collect,
    Dispatch,
    End,
    Expand,
    Expanded,
    Finished,
    ItemClosed,
    PrimitiveFailed,
    Release,
    Reprioritise,
    RunCall,
    Started,
    SubplanBegun,
    SubplanEnded,
    Tick,
    Unused,
    WakeAt,
)

K = PrimitiveKind


def embed(name: str, *reads: str, **more: Any) -> Primitive:
    inputs = tuple((f"i{n}", Ref(r)) for n, r in enumerate(reads))
    return Primitive(name, K.EMBEDDING, "embedder", inputs, **more)


def call(name: str, *reads: str, **more: Any) -> Primitive:
    return Primitive(name, K.CALL, inputs=tuple((f"i{n}", Ref(r)) for n, r in enumerate(reads)), **more)


class Driver:
    """Feeds a scheduler and writes down what it says, one word an instruction."""

    def __init__(self, primitives: list[Primitive], output: str, **admit: Any) -> None:
        self.scheduler = GraphScheduler()
        self.first = self.say(Admit(0.0, "q", Graph(primitives, Ref(output)), **admit))

    def say(self, event: Any) -> list[str]:
        return [word for i in self.scheduler.handle(event) if (word := self._word(i))]

    @staticmethod
    def _word(i: Any) -> str:
        if isinstance(i, Dispatch):
            return f"dispatch {i.primitive.id}@{i.depth}" + "".join(f"+{g.id}" for g in i.group)
        if isinstance(i, (RunCall, Await, Expand)):
            return f"{type(i).__name__.lower()} {i.primitive.id}"
        if isinstance(i, (Cancel, Collect)):
            return f"{type(i).__name__.lower()} {i.primitive}"
        if isinstance(i, Release):
            return f"release {i.producer}"
        if isinstance(i, End):
            return f"end {i.outcome}" + (f" by {i.primitive}" if i.primitive else "")
        if isinstance(i, WakeAt):
            return f"wake {i.at}"
        assert isinstance(i, Reprioritise)
        return ""

    def done(self, name: str) -> list[str]:
        return self.say(Finished(1.0, "q", name))

    def fail(self, name: str) -> list[str]:
        return self.say(PrimitiveFailed(1.0, "q", name))


def test_diamond_runs_in_order_and_releases_values_after_last_reader() -> None:
    d = Driver([embed("a", "$input"), embed("b", "a"), embed("c", "a"), call("d", "b", "c")], "d")
    assert d.first == ["dispatch a@2"]
    assert d.done("a") == ["release $input", "dispatch b@1", "dispatch c@1"]
    assert d.done("b") == []
    assert d.done("c") == ["release a", "runcall d"]
    assert d.done("d") == ["release b", "release c", "end done"]
    assert d.done("d") == []  # the query is over


def test_a_prefilling_is_dispatched_with_its_decodings_as_one_request() -> None:
    llm = [
        Primitive("p", K.PREFILLING, "llm"),
        Primitive("d#0", K.PARTIAL_DECODING, "llm", named(prefilling=Ref("p")), item=0),
        Primitive("d#1", K.PARTIAL_DECODING, "llm", named(previous=Ref("d#0")), item=1),
        Primitive("d", K.DECODING, "llm", named(previous=Ref("d#1"))),
        embed("e0", "d#0", speculative=True),
        embed("e1", "d#1", speculative=True),
        call("list", "d"),
    ]
    d = Driver(llm, "list")
    assert d.first == ["dispatch p@4+d#0+d#1+d"]
    assert d.done("p") == []
    assert d.done("d#0") == ["release p", "dispatch e0@0"]
    assert d.say(Unused(1.0, "q", "d#1")) == []  # one item only: e1 never runs, the rest goes on
    assert d.done("d") == ["release d#1", "runcall list"]
    assert d.done("list") == ["release d", "cancel e0", "end done"]


def test_a_full_prefilling_overtakes_a_warm_up_that_has_not_started() -> None:
    def graph() -> list[Primitive]:
        return [
            Primitive("w", K.PARTIAL_PREFILLING, "llm"),
            embed("slow", "$input"),
            Primitive("f", K.FULL_PREFILLING, "llm", named(x=Ref("slow")), after=("w",)),
        ]

    queued = Driver(graph(), "f")
    assert queued.first == ["dispatch w@1", "dispatch slow@1"]
    assert queued.done("slow") == ["release $input", "cancel w", "dispatch f@0"]
    running = Driver(graph(), "f")
    running.say(Started(0.5, "q", "w"))
    assert running.done("slow") == ["release $input"]
    assert running.done("w") == ["dispatch f@0"]


def test_failed_warm_up_does_not_fail_the_query() -> None:
    d = Driver(
        [Primitive("w", K.PARTIAL_PREFILLING, "llm"), Primitive("f", K.FULL_PREFILLING, "llm", after=("w",))], "f"
    )
    assert d.fail("w") == ["dispatch f@0"]


def test_failure_cancels_dependents_and_ends_the_query() -> None:
    d = Driver([embed("a"), embed("b", "a"), embed("side"), call("out", "b", "side")], "out")
    assert d.fail("a") == ["release a", "release b", "release side", "cancel side", "end failed by a"]


def test_prefetched_failure_stops_only_its_own_branch() -> None:
    d = Driver([embed("a"), embed("b", "a"), embed("c"), call("out", "c")], "out", original_runs=True)
    assert d.fail("a") == ["release a"]
    assert d.done("c") == ["runcall out"]
    assert d.done("out") == ["release c"]  # the plain object ends the query
    assert d.say(Close(2.0, "q")) == ["end closed"]


def test_user_code_is_awaited_and_may_be_observed_before_its_turn() -> None:
    d = Driver(
        [embed("a"), Primitive("user", K.OPAQUE, inputs=named(x=Ref("a"))), call("out", "user")],
        "out",
        original_runs=True,
    )
    assert d.done("user") == ["release a", "runcall out"]
    d = Driver([embed("a"), Primitive("user", K.OPAQUE, inputs=named(x=Ref("a"))), call("out", "user")], "out")
    assert d.done("a") == ["await user"]


def test_deadline_and_cancellation_reach_the_engines() -> None:
    d = Driver([embed("a"), embed("b", "a")], "b", deadline=5.0)
    assert d.first == ["wake 5.0", "dispatch a@1"]
    assert d.say(Tick(4.9)) == []
    assert d.say(Tick(5.0)) == ["cancel a", "end timeout"]
    d = Driver([embed("a"), embed("b", "a")], "b")
    assert d.say(CancelQuery(1.0, "q")) == ["cancel a", "end cancelled"]


BODY = Fragment(Graph([embed("e", "$item"), call("s", "e", "$pre")], Ref("s")), Ref("s"))


def test_map_makes_an_instance_per_item_and_collects() -> None:
    d = Driver(
        [call("list"), Primitive("m", K.MAP, inputs=named(items=Ref("list"), pre=Ref("$input")), fragment=BODY)], "m"
    )
    assert d.done("list") == ["expand m"]
    assert d.say(Expanded(1.0, "q", "m", 2)) == ["dispatch m[0]/e@2", "dispatch m[1]/e@2"]
    d.done("m[0]/e")
    assert d.done("m[0]/s") == ["release m[0]/e"]
    d.done("m[1]/e")
    assert "collect m" in d.done("m[1]/s")


def test_map_over_nothing_is_an_empty_list() -> None:
    d = Driver(
        [call("list"), Primitive("m", K.MAP, inputs=named(items=Ref("list"), pre=Ref("$input")), fragment=BODY)], "m"
    )
    d.done("list")
    assert d.say(Expanded(1.0, "q", "m", 0))[0] == "collect m"
    assert not d.scheduler.queries


def growing() -> Driver:
    primitives = [
        Primitive("p", K.PREFILLING, "llm"),
        Primitive("d", K.DECODING, "llm", named(prefilling=Ref("p")), attributes=Attributes(stream_items=("m",))),
        call("list", "d"),
        Primitive("m", K.MAP, inputs=named(items=Ref("list"), pre=Ref("$input")), fragment=BODY),
    ]
    return Driver(primitives, "m")


def test_closed_items_get_speculative_instances_used_if_right() -> None:
    d = growing()
    d.done("p")
    assert d.say(ItemClosed(1.0, "q", "d", 0, "d#0")) == ["dispatch m[0]/e@2"]
    assert d.say(ItemClosed(1.0, "q", "d", 1, "d#1")) == ["dispatch m[1]/e@2"]
    d.done("m[0]/e"), d.done("m[0]/s")
    d.done("d")
    assert "expand m" in d.done("list")
    out = d.say(Expanded(2.0, "q", "m", 2, (0, None)))  # the second prediction was wrong
    assert "cancel m[1]/e" in out
    assert "dispatch m[1']/e@2" in out
    d.done("m[1']/e")
    assert "collect m" in d.done("m[1']/s")


PART = Graph([embed("a", "$input"), call("b", "a"), embed("c", "b", "$input")], Ref("c"))


def test_subplan_that_begins_later_joins_the_query() -> None:
    d = Driver([Primitive("user", K.OPAQUE)], "user", original_runs=True)
    assert d.say(SubplanBegun(1.0, "q", "part1", PART, "$part1")) == ["dispatch part1/a@2"]
    assert d.say(SubplanBegun(1.0, "q", "part2", PART, "$part2")) == ["dispatch part2/a@2"]
    assert d.done("part1/a") == ["runcall part1/b"]
    assert d.done("part1/b") == ["release part1/a", "dispatch part1/c@0"]
    assert d.done("part1/c") == ["release $part1", "release part1/b"]
    ended = d.say(SubplanEnded(2.0, "q", "part2"))
    assert sorted(ended) == ["cancel part2/a", "release $part2", "release part2/a", "release part2/b"]
    assert d.say(Close(3.0, "q")) == ["cancel user", "end closed"]


def test_subplan_depths_are_raised_by_its_end_depth() -> None:
    each = [
        call("list", "$input"),
        Primitive("m", K.MAP, inputs=named(items=Ref("list"), pre=Ref("$input")), fragment=BODY),
        embed("e", "m"),
        embed("aside", "$input"),
    ]
    d = Driver([Primitive("user", K.OPAQUE)], "user", original_runs=True)
    assert d.say(SubplanBegun(1.0, "q", "part1", Graph(each, Ref("e")), "$part1", depth=4)) == [
        "runcall part1/list",
        "dispatch part1/aside@4",
    ]
    d.done("part1/list")
    assert d.say(Expanded(1.0, "q", "part1/m", 1)) == ["dispatch part1/m[0]/e@7"]
    query = d.scheduler.queries["q"]
    assert {live.id: live.depth for live in query.within("part1")} == {
        "part1/list": 8, "part1/m": 5, "part1/e": 4, "part1/aside": 4, "part1/m[0]/e": 7, "part1/m[0]/s": 6,
    }  # fmt: skip


def test_subplans_of_a_gang_get_gang_objectives() -> None:
    """As with instances of a MAP, a single primitive becomes a member, and inner gangs stay separate."""
    inner = Primitive("m", K.MAP, inputs=named(items=Ref("e"), pre=Ref("$input")), fragment=BODY)
    whole = Graph(
        [embed("e", "$input"), inner, Primitive("w", K.PARTIAL_PREFILLING, "llm"), call("s", "m", "w")], Ref("s")
    )
    d = Driver([Primitive("user", K.OPAQUE)], "user", original_runs=True)
    for name, gang in (("part1", "step1"), ("part2", "")):
        d.say(SubplanBegun(1.0, "q", name, whole, f"${name}", gang=gang))
        d.done(f"{name}/e")
        d.say(Expanded(1.0, "q", f"{name}/m", 2))
    query = d.scheduler.queries["q"]
    found = {
        live.id: (live.gang_objective.objective.value, live.gang_objective.gang) for live in query if "/" in live.id
    }
    assert found == {
        "part1/e": ("throughput", "step1"), "part1/m": ("throughput", "step1"), "part1/s": ("throughput", "step1"),
        "part1/w": ("background", "step1"),
        "part1/m[0]/e": ("throughput", "part1/m"), "part1/m[0]/s": ("throughput", "part1/m"),
        "part1/m[1]/e": ("throughput", "part1/m"), "part1/m[1]/s": ("throughput", "part1/m"),
        "part2/e": ("latency", ""), "part2/m": ("latency", ""), "part2/s": ("latency", ""),
        "part2/w": ("background", ""),
        "part2/m[0]/e": ("throughput", "part2/m"), "part2/m[0]/s": ("throughput", "part2/m"),
        "part2/m[1]/e": ("throughput", "part2/m"), "part2/m[1]/s": ("throughput", "part2/m"),
    }  # fmt: skip


def test_dead_end_of_an_instance_has_its_subplans_depth() -> None:
    aside = Fragment(Graph([embed("e", "$item"), embed("aside", "$item"), call("s", "e")], Ref("s")), Ref("s"))
    d = Driver([Primitive("user", K.OPAQUE)], "user", original_runs=True)
    holder = Primitive("m", K.MAP, inputs=named(items=Ref("$input")), fragment=aside)
    d.say(SubplanBegun(1.0, "q", "part1", Graph([holder], Ref("m")), "$part1", depth=4))
    assert d.say(Expanded(1.0, "q", "part1/m", 1)) == ["dispatch part1/m[0]/e@6", "dispatch part1/m[0]/aside@4"]


def test_subplan_announces_changed_depths_of_the_whole_query() -> None:
    once = Fragment(Graph([embed("e", "$carry")], Ref("e")), Ref("e"))
    fold = Primitive("f", K.FOLD, inputs=named(items=Ref("list"), init=Ref("first")), fragment=once)
    d = Driver([Primitive("user", K.OPAQUE)], "user", original_runs=True)
    graph = Graph([call("list"), embed("first", "$input"), fold], Ref("f"))
    assert "dispatch part1/first@11" in d.say(SubplanBegun(1.0, "q", "part1", graph, "$part1", depth=10))
    d.done("part1/list")
    out = d.scheduler.handle(Expanded(1.0, "q", "part1/f", 3))
    assert [i.depths for i in out if isinstance(i, Reprioritise)] == [{"part1/first": 14}]


def test_streamed_list_grows_inside_a_subplan() -> None:
    primitives = [
        Primitive("p", K.PREFILLING, "llm"),
        Primitive("d", K.DECODING, "llm", named(prefilling=Ref("p")), attributes=Attributes(stream_items=("m",))),
        call("list", "d"),
        Primitive("m", K.MAP, inputs=named(items=Ref("list"), pre=Ref("$input")), fragment=BODY),
    ]
    d = Driver([Primitive("user", K.OPAQUE)], "user", original_runs=True)
    d.say(SubplanBegun(1.0, "q", "part1", Graph(primitives, Ref("m")), "$part1"))
    d.done("part1/p")
    assert d.say(ItemClosed(1.0, "q", "part1/d", 0, "part1/d#0")) == ["dispatch part1/m[0]/e@2"]


def test_fold_chains_its_instances() -> None:
    body = Fragment(Graph([call("step", "$item", "$carry")], Ref("step")), Ref("step"))
    d = Driver(
        [call("list"), Primitive("f", K.FOLD, inputs=named(items=Ref("list"), init=Ref("$input")), fragment=body)], "f"
    )
    d.done("list")
    assert d.say(Expanded(1.0, "q", "f", 2)) == ["runcall f[0]/step"]
    assert d.done("f[0]/step") == ["runcall f[1]/step"]
    assert "collect f" in d.done("f[1]/step")


def test_fold_expands_before_its_initial_value_is_ready() -> None:
    body = Fragment(Graph([call("known", "$item"), call("step", "known", "$carry")], Ref("step")), Ref("step"))
    fold = Primitive("f", K.FOLD, inputs=named(items=Ref("list"), init=Ref("first")), fragment=body)
    d = Driver([call("list"), embed("first", "$input"), fold], "f")
    assert d.done("list") == ["expand f"]
    assert d.say(Expanded(1.0, "q", "f", 2)) == ["runcall f[0]/known", "runcall f[1]/known"]
    assert d.done("f[0]/known") == []
    assert "runcall f[0]/step" in d.done("first")
    assert d.done("f[1]/known") == []
    assert "runcall f[1]/step" in d.done("f[0]/step")
    assert "collect f" in d.done("f[1]/step")


def test_fold_over_nothing_waits_for_its_initial_value() -> None:
    body = Fragment(Graph([call("step", "$item", "$carry")], Ref("step")), Ref("step"))
    fold = Primitive("f", K.FOLD, inputs=named(items=Ref("list"), init=Ref("first")), fragment=body)
    d = Driver([call("list"), embed("first", "$input"), fold], "f")
    d.done("list")
    assert d.say(Expanded(1.0, "q", "f", 0)) == []
    assert "collect f" in d.done("first")


def test_fold_fails_if_its_initial_value_fails() -> None:
    body = Fragment(Graph([call("step", "$item", "$carry")], Ref("step")), Ref("step"))
    fold = Primitive("f", K.FOLD, inputs=named(items=Ref("list"), init=Ref("first")), fragment=body)
    d = Driver([call("list"), embed("first", "$input"), fold], "f")
    d.done("list")
    d.say(Expanded(1.0, "q", "f", 2))
    assert any(word.startswith("end failed") for word in d.say(PrimitiveFailed(1.0, "q", "first")))


def test_failure_after_the_first_piece_ends_the_query() -> None:
    lead = Primitive("lead", K.PREFILLING, "llm", named(question=Ref("$input")))
    d = Driver([lead, Primitive("text", K.DECODING, "llm", named(lead=Ref("lead"))), call("last", "text")], "last")
    d.done("lead")
    assert d.fail("lead")[-1].startswith("end failed")
    assert not d.scheduler.queries


def test_loop_repeats_while_its_body_continues() -> None:
    body = Fragment(Graph([call("step", "$carry")], Ref("step")), Ref("step"))
    d = Driver([Primitive("l", K.LOOP, inputs=named(init=Ref("$input")), fragment=body)], "l")
    assert d.first == ["runcall l[0]/step"]
    assert d.done("l[0]/step") == ["expand l"]
    assert d.say(Expanded(1.0, "q", "l", 1)) == ["runcall l[1]/step"]
    assert d.done("l[1]/step") == ["expand l"]
    assert "collect l" in d.say(Expanded(1.0, "q", "l", 0))


def test_branch_takes_one_arm() -> None:
    yes = Fragment(Graph([call("y", "$x")], Ref("y")), Ref("y"))
    no = Fragment(Graph([call("n", "$x")], Ref("n")), Ref("n"))
    inputs = named(condition=Ref("judge"), x=Ref("$input"))
    for truth, ran in ((1, "b.then/y"), (0, "b.else/n")):
        d = Driver([call("judge"), Primitive("b", K.BRANCH, inputs=inputs, fragment=yes, otherwise=no)], "b")
        assert d.done("judge") == ["expand b"]
        assert d.say(Expanded(1.0, "q", "b", truth)) == [f"runcall {ran}"]
        assert "collect b" in d.done(ran)


@settings(max_examples=200, deadline=None)
@given(st.integers(1, 12), st.data())
def test_every_query_ends_and_no_primitive_starts_before_its_parents(size: int, data: st.DataObject) -> None:
    primitives = []
    for i in range(size):
        reads = data.draw(st.lists(st.sampled_from([f"p{j}" for j in range(i)]), max_size=3, unique=True)) if i else []
        after = data.draw(st.lists(st.sampled_from([f"p{j}" for j in range(i)]), max_size=2, unique=True)) if i else []
        make = data.draw(st.sampled_from([embed, call]))
        primitives.append(make(f"p{i}", *reads, after=tuple(after)))
    graph = Graph(primitives, Ref(f"p{size - 1}"))
    scheduler = GraphScheduler()
    todo = scheduler.handle(Admit(0.0, "q", graph))
    ended: set[str] = set()
    outcomes = []
    started: list[str] = []
    while todo:
        i = todo.pop(data.draw(st.integers(0, len(todo) - 1)))
        if isinstance(i, End):
            outcomes.append(i.outcome)
        elif isinstance(i, (Dispatch, RunCall)):
            started.append(i.primitive.id)
            assert set(graph.parents(i.primitive.id)) <= ended
            if data.draw(st.integers(0, 9)):
                ended.add(i.primitive.id)
                todo += scheduler.handle(Finished(1.0, "q", i.primitive.id))
            else:
                todo += scheduler.handle(PrimitiveFailed(1.0, "q", i.primitive.id))
    assert len(outcomes) == 1
    assert len(started) == len(set(started))
    assert not scheduler.queries
