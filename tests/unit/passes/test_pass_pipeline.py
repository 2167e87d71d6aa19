"""Tests of the pass pipeline, the registry of passes, the cache of optimised graphs, and the estimates."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import EntryPoint
from itertools import pairwise
from typing import ClassVar

import pytest
from pass_apps import CONTEXT, ONE_DEVICE, PROFILES, Golden, K, advanced_rag, call

from teola_plugin.errors import GraphError, PassError, RegistrationError
from teola_plugin.graph import INPUT, Effect, EngineProfile, Graph, GraphEdit, Primitive, Ref, build_pgraph, named
from teola_plugin.passes import (
    GraphCache,
    Pass,
    PassContext,
    PassPipeline,
    PassReport,
    PruneDependencies,
    default_pipeline,
    find_pass,
    known_passes,
    ready_times,
    registry,
    resolve_passes,
)


@dataclass(frozen=True, slots=True)
class Restless:
    name: ClassVar[str] = "restless"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        edit = GraphEdit(graph)
        edit.add(call(f"more{len(graph)}"))
        return edit.freeze()


@dataclass(frozen=True, slots=True)
class Broken:
    name: ClassVar[str] = "broken"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        edit = GraphEdit(graph)
        edit.add(call("x", "nowhere"))
        return edit.freeze()


@dataclass(frozen=True, slots=True)
class Copying:
    name: ClassVar[str] = "copying"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        return Graph(graph, graph.output)


@dataclass(frozen=True, slots=True)
class Textual:
    name: ClassVar[str] = "textual"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        return str(graph)  # type: ignore[return-value]


SMALL = Graph([call("a")], Ref("a"))


def test_all_four_passes_fire_on_advanced_rag(golden: Golden) -> None:
    before = build_pgraph(advanced_rag())
    made = default_pipeline().run(before, CONTEXT)
    paper = ("stage-decomposition", "prefilling-split", "decoding-pipelining")
    assert made.fired == ("prune-dependencies", *paper)
    assert made.source is before
    assert {K.PARTIAL_PREFILLING, K.FULL_PREFILLING, K.PARTIAL_DECODING, K.VERIFY} <= {p.kind for p in made.graph}
    golden("pipeline/advanced_rag", before, made.graph)


def test_pipeline_result_is_a_fixed_point() -> None:
    made = default_pipeline().run(build_pgraph(advanced_rag()), CONTEXT).graph
    assert default_pipeline().run(made, CONTEXT).graph is made


def test_later_write_waits_for_the_end_of_nested_stages() -> None:
    """Embedded in twos, stored one by one; a second write waits for the end of the first, which stands for it all."""
    source, write = Ref(INPUT), (Effect("a", writes=True),)
    once = {"kind": K.INGESTION, "engine": "store", "batchable": True, "effects": write}
    graph = Graph(
        (
            Primitive("vectors", K.EMBEDDING, "embedder", inputs=named(texts=source), size=4, batchable=True),
            Primitive("first", inputs=named(chunks=source, vectors=Ref("vectors")), **once),
            Primitive("second", inputs=named(chunks=source, vectors=source), after=("first",), **once),
        ),
        Ref("second"),
    )
    engines = {"embedder": EngineProfile(max_efficient_batch=2), "store": EngineProfile(max_efficient_batch=1)}
    context = PassContext(engines)
    made = default_pipeline().run(graph, context).graph
    assert "first#1#0" in made and made["second"].after == ("first",)
    assert default_pipeline().run(made, context).graph is made


def test_observer_receives_every_pass_report() -> None:
    seen: list[PassReport] = []
    made = default_pipeline(seen.append).run(build_pgraph(advanced_rag()), CONTEXT)
    assert tuple(seen) == made.reports
    assert [r.fired for r in seen] == [True] * 4 + [False] * 4, "drafts; then without what is applied once"
    assert all(a.after is b.before for a, b in pairwise(seen))


def test_one_time_pass_runs_alone_in_a_pipeline() -> None:
    graph = build_pgraph(advanced_rag())
    made = PassPipeline((PruneDependencies(),)).run(graph, CONTEXT)
    assert [r.fired for r in made.reports] == [True]
    assert made.graph == PruneDependencies().run(graph, CONTEXT)


def test_empty_pipeline_returns_the_same_graph() -> None:
    assert PassPipeline().run(SMALL, CONTEXT).graph is SMALL


def test_pass_that_returns_an_equal_copy_changes_nothing() -> None:
    assert PassPipeline((Copying(),)).run(SMALL, CONTEXT).graph is SMALL


def test_failing_pass_raises_pass_error_with_its_name() -> None:
    with pytest.raises(PassError, match=r"'broken'.*nowhere") as caught:
        PassPipeline((PruneDependencies(), Broken())).run(SMALL, CONTEXT)
    assert caught.value.pass_name == "broken" and isinstance(caught.value.__cause__, GraphError)
    with pytest.raises(PassError, match="'textual' returned str"):
        PassPipeline((Textual(),)).run(SMALL, CONTEXT)


def test_passes_that_never_settle_raise_pass_error() -> None:
    with pytest.raises(PassError, match=r"did not settle in 3 rounds.*'restless'"):
        PassPipeline((PruneDependencies(), Restless()), max_rounds=3).run(SMALL, CONTEXT)


def test_pass_names_resolve_and_unknown_names_raise() -> None:
    assert find_pass("prune-dependencies") == PruneDependencies()
    assert resolve_passes([Restless(), "prefilling-split"])[1].name == "prefilling-split"
    assert {"stage-decomposition", "decoding-pipelining"} <= set(known_passes())
    with pytest.raises(RegistrationError, match="did you mean 'prune-dependencies'"):
        find_pass("prune-dependency")
    with pytest.raises(RegistrationError, match="speculate 'maybe'"):
        PassContext(speculate="maybe")
    assert isinstance(Restless(), Pass)


def test_passes_of_entry_points_are_loaded_or_raise(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {name: EntryPoint(name, f"{__name__}:{value}", registry.GROUP) for name, value in
            {"restless": "Restless", "small": "SMALL", "gone": "Gone"}.items()}  # fmt: skip
    monkeypatch.setattr(registry, "_entry_points", lambda: here)
    assert find_pass("restless").name == "restless" and "restless" in known_passes()
    with pytest.raises(RegistrationError, match=r"'gone'.*AttributeError"):
        find_pass("gone")
    with pytest.raises(RegistrationError, match="'small'"):
        find_pass("small")


def test_graph_cache_counts_hits_and_misses() -> None:
    cache, template = GraphCache(default_pipeline()), advanced_rag()
    first = cache.optimised(template, {"index": 300}, CONTEXT)
    assert cache.optimised(template, {"index": 300}, CONTEXT) is first
    assert cache.optimised(template, {"index": 300}, PassContext(dict(PROFILES))) is first, "equal profiles"
    assert cache.optimised(advanced_rag(), {"index": 300}, CONTEXT) is first, "an equal template"
    others = [
        cache.optimised(template, {"index": 600}, CONTEXT),
        cache.optimised(template, {"index": 300}, ONE_DEVICE),
        cache.optimised(template, {"index": 300}, replace(CONTEXT, speculate="off")),
    ]
    assert first not in others and (cache.hits, cache.misses) == (3, 4)
    assert len([p for p in first.graph if p.kind is K.INGESTION]) == 3


def test_graph_cache_evicts_the_least_recently_used_plan() -> None:
    cache, template = GraphCache(default_pipeline(), capacity=2), advanced_rag()
    one, two = (cache.optimised(template, {"index": n}, CONTEXT) for n in (1, 2))
    assert cache.optimised(template, {"index": 1}, CONTEXT) is one
    cache.optimised(template, {"index": 3}, CONTEXT)
    assert len(cache) == 2
    assert cache.optimised(template, {"index": 1}, CONTEXT) is one
    assert cache.optimised(template, {"index": 2}, CONTEXT) is not two


def test_graph_cache_returns_one_graph_to_many_threads() -> None:
    cache, template = GraphCache(default_pipeline()), advanced_rag()
    with ThreadPoolExecutor(8) as threads:
        made = list(threads.map(lambda _: cache.optimised(template, None, CONTEXT), range(64)))
    assert all(one is made[0] for one in made) and cache.hits + cache.misses == 64


def test_ready_times_follow_the_engine_profiles() -> None:
    embed = Primitive("e", K.EMBEDDING, "embedder", named(texts=Ref("$input")), size=15)
    search = Primitive("s", K.SEARCHING, "store", named(vectors=Ref("e")), size=1)
    graph = Graph([embed, search, call("c", "s"), Primitive("u", K.EMBEDDING, "unknown")], Ref("c"))
    times = ready_times(graph, CONTEXT)
    assert times == pytest.approx({"e": 0.02, "s": 0.025, "c": 0.025, "u": 0.01})
    rag = build_pgraph(advanced_rag())
    times = ready_times(rag, CONTEXT)
    assert all(times[p.id] >= times[parent] for p in rag for parent in rag.parents(p.id))
