"""Tests that planning a wide graph is linear in its width, in time and in memory."""

from __future__ import annotations

from itertools import pairwise

import pytest

from teola_plugin.engines import profiles
from teola_plugin.graph import (
    Attributes,
    Component,
    Effect,
    Graph,
    PromptPart,
    Ref,
    Role,
    WorkflowTemplate,
    build_pgraph,
    named,
)
from teola_plugin.passes import Optimised, PassContext, PassReport, PrefillingSplit, default_pipeline
from teola_plugin.scheduling.live_query import deduce_objectives
from tests.support.steps import growth

LINEAR = 1.3
HEAD = PromptPart.literal("Answer with care and with the context only. " * 8)


def searched(name: str, query: Ref) -> Component:
    docs = (Effect("collection:docs"),)
    attributes = Attributes(collection="docs", k=4)
    return Component(name, Role.RETRIEVAL, named(query=query), "store", "embedder", effects=docs, attributes=attributes)


def generation(name: str, *reads: str, **more: object) -> Component:
    inputs = tuple((f"x{i}", Ref(read)) for i, read in enumerate(reads))
    prompt = (HEAD, *(PromptPart.var(key) for key, _ in inputs))
    return Component(name, Role.GENERATION, inputs, "llm", prompt=prompt, **more)  # type: ignore[arg-type]


def listed(width: int) -> WorkflowTemplate:
    """Return a graph of a list of questions, a search and an answer for each, and a final answer."""
    each = WorkflowTemplate((searched("search", Ref("$item")), generation("answer", "$item", "search")), Ref("answer"))
    parts = (generation("expand", "$input", splittable=True, expected=width, attributes=Attributes(items="json")),
             Component("list", Role.CALL, named(text=Ref("expand"))),
             Component("each", Role.MAP, named(items=Ref("list")), body=each),
             Component("pack", Role.CALL, named(found=Ref("each"))), generation("whole", "$input", "pack"))  # fmt: skip
    return WorkflowTemplate(parts, Ref("whole"), tuple((a.name, b.name) for a, b in pairwise(parts)))


def side_by_side(width: int) -> WorkflowTemplate:
    """Return a graph of many searches and an answer that reads them all."""
    found = [searched(f"s{i}", Ref("$input", (i,))) for i in range(width)]
    shown = [Component(f"c{i}", Role.CALL, named(x=Ref(f"s{i}"))) for i in range(width)]
    order = [pair for i in range(width) for pair in ((f"s{i}", f"c{i}"), (f"c{i}", "whole"))]
    return WorkflowTemplate((*found, *shown, generation("whole", *(c.name for c in shown))), Ref("whole"), tuple(order))


WIDE = {"a list": listed, "side by side": side_by_side}


def planned(template: WorkflowTemplate) -> Optimised:
    return default_pipeline().run(build_pgraph(template), PassContext(profiles.rtx3090()))


@pytest.mark.parametrize("wide", WIDE.values(), ids=WIDE)
def test_planning_cost_is_linear_in_width(wide: object) -> None:
    assert len(planned(wide(20)).graph) > 40  # type: ignore[operator]
    assert growth(lambda n: planned(wide(n)), 40) < LINEAR  # type: ignore[operator]


def test_prefilling_split_cost_is_linear_in_instances() -> None:
    def split(width: int) -> PassReport:
        reports = planned(listed(width)).reports
        return next(r for r in reports if r.pass_name == PrefillingSplit.name and len(r.before) > 2 * width)

    assert split(20).fired
    graphs = {n: split(n).before for n in (2, 40, 160)}
    context = PassContext(profiles.rtx3090())
    assert growth(lambda n: PrefillingSplit().run(graphs[n], context), 40) < LINEAR


@pytest.mark.parametrize("wide", WIDE.values(), ids=WIDE)
def test_objective_deduction_cost_is_linear_in_width(wide: object) -> None:
    graphs = {n: planned(wide(n)).graph for n in (2, 40, 160)}  # type: ignore[operator]
    assert growth(lambda n: deduce_objectives(graphs[n]), 40) < LINEAR


def test_plan_keeps_no_ancestor_sets_of_quadratic_size() -> None:
    made = planned(listed(20))
    graphs: list[Graph] = [made.graph, *(g for report in made.reports for g in (report.before, report.after))]
    assert not any(name in vars(g) for g in graphs for name in ("bits", "above", "ancestors"))
