"""Functions' sources -> templates (golden files); run early, they ask for what the plain function asks for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from function_cases import Case, every
from function_world import World, alike, beside, called, world

from teola_plugin.graph import build_pgraph
from teola_plugin.graph.text import format_graph
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.functions import trace_function, trace_node

GOLDEN = Path(__file__).parents[2] / "golden" / "tracer" / "functions"


def _names() -> list[str]:
    made = world()
    try:
        return list(every(made))
    finally:
        made.pool.close()


NAMES = _names()


@pytest.fixture(scope="module")
def farm() -> Iterator[World]:
    made = world()
    yield made
    made.pool.close()


def traced(case: Case, name: str) -> TraceResult:
    return trace_function(case.func, case.given, name) if case.arguments else trace_node(case.func, "state", name)


@pytest.mark.parametrize("name", NAMES)
def test_template(farm: World, name: str, request: pytest.FixtureRequest) -> None:
    made = traced(every(farm)[name], name)
    text = f"{format_graph(build_pgraph(made.template), depths=False)}\n"
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-golden", default=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_what_is_asked_early_is_claimed(farm: World, name: str) -> None:
    case = every(farm)[name]
    given = case.given if case.model is None else case.model(**case.given)
    farm.asked()
    plain = called(case.func, given, spread=case.arguments)
    asked = farm.asked()
    assert sum(asked.values()) == case.plain
    made = beside(
        farm, traced(case, name), lambda: called(case.func, given, spread=case.arguments), case.given, case.early
    )
    assert alike(made.value) == alike(plain)
    assert (made.early, made.wasted) == (case.early, 0)
    assert made.asked == asked
