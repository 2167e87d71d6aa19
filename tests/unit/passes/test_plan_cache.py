"""Tests that a plan is made again only when needed, by counting the runs of the pipeline."""

from __future__ import annotations

from typing import Any

import pytest
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnableBranch, RunnableLambda

from teola_plugin import EnginePool, accelerate
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.engines import profiles
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.graph import Attributes, Component, Graph, Ref, Role, WorkflowTemplate, named
from teola_plugin.passes import GraphCache, Optimised, PassContext, PassPipeline, default_pipeline
from teola_plugin.requests.payloads import OneOf


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Count the graphs on which pipelines run, fragments included."""
    count, plain = [0], PassPipeline.run

    def run(self: PassPipeline, graph: Graph, context: PassContext) -> Optimised:
        count[0] += 1
        return plain(self, graph, context)

    monkeypatch.setattr(PassPipeline, "run", run)
    return count


def engines() -> dict[str, FakeLLM]:
    return {"llm": FakeLLM("llm", profiles.noop()["llm"], lambda prompt, sampling: "yes")}


def asking(pool: EnginePool, what: str) -> Runnable[Any, Any]:
    return ChatPromptTemplate.from_template(what + " {q}") | ChatTeola(pool=pool, engine="llm", max_tokens=4)


def choosing(pool: EnginePool) -> Runnable[Any, Any]:
    """Return a chain with a choice. One choice's request is known before the choice is made."""
    return RunnableBranch((lambda x: len(x["q"]) > 3, asking(pool, "long")), RunnableLambda(lambda x: x["q"]))


@pytest.mark.parametrize("how", [{}, {"speculate": "off"}, {"passes": ()}], ids=str)
def test_a_chain_with_lookahead_is_planned_once(runs: list[int], how: dict[str, Any]) -> None:
    with EnginePool.local(engines=engines()) as pool:
        fast = accelerate(choosing(pool), pool=pool, **how)
        fast.invoke({"q": "first"})
        before = runs[0]
        for i in range(5):
            fast.invoke({"q": f"question {i}"})
        assert runs[0] == before


def test_a_function_that_returns_a_new_chain_each_time_is_planned_once(runs: list[int]) -> None:
    with EnginePool.local(engines=engines()) as pool:
        fast = accelerate(RunnableLambda(lambda x: asking(pool, "new")), pool=pool)
        fast.invoke({"q": "first"})
        before = runs[0]
        for i in range(5):
            fast.invoke({"q": f"question {i}"})
        assert runs[0] == before


def template(*options: tuple[str, Any], filter: Any = ()) -> WorkflowTemplate:
    attributes = Attributes(filter=filter)
    one = Component("s", Role.SEARCHING, named(vectors=Ref("$input")), "store", attributes=attributes, options=options)
    return WorkflowTemplate((one,), Ref("s"))


def test_equal_options_of_different_types_are_planned_apart() -> None:
    cache = GraphCache(default_pipeline())
    filters: list[Any] = [True, 1, 1.0, (True,), (1,), OneOf((1,)), OneOf((True,))]
    filters += [frozenset({1}), frozenset({True})]
    for value in filters:
        found = cache.optimised(template(filter=value), None, PassContext()).graph["s"].attributes.filter
        assert repr(found) == repr(value)
        found = cache.optimised(template(("mine", value)), None, PassContext()).graph["s"].option("mine")
        assert repr(found) == repr(value)
    assert cache.misses == 2 * len(filters)


def test_templates_with_incomparable_options_share_no_plan() -> None:
    class Odd:
        def __eq__(self, other: object) -> bool:
            return True

        def __hash__(self) -> int:
            return 0

    cache = GraphCache(default_pipeline())
    for value in (Odd(), [1]):
        one, other = template(("odd", value)), template(("odd", value))
        assert cache.optimised(one, None, PassContext()) is cache.optimised(one, None, PassContext())
        assert cache.optimised(one, None, PassContext()) is not cache.optimised(other, None, PassContext())


def test_plan_cache_holds_fewer_plans_if_they_are_large() -> None:
    parts = tuple(Component(f"c{i}", Role.CALL) for i in range(10))
    cache = GraphCache(PassPipeline(), max_primitives=25)
    for i in range(9):
        cache.optimised(WorkflowTemplate(parts, Ref(f"c{i}")), None, PassContext())
    assert len(cache) == 2
    cache.clear()
    assert len(cache) == 0


def test_pool_keeps_plan_caches_of_a_few_pipelines_only() -> None:
    with EnginePool.local(engines=engines()) as pool:
        for i in range(40):
            pool.plan(template(), passes=("stage-decomposition",) * i)
        assert len(pool._caches) <= 16
