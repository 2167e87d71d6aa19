"""Tests of templates of functions (golden files). Their plans make the requests of the original functions."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from function_cases import Case, all_cases
from function_resources import Resources, call, call_prefetched, comparable, make_resources

from teola_plugin.graph import build_pgraph
from teola_plugin.graph.graph import format_graph
from teola_plugin.tracer.draft import TraceResult
from teola_plugin.tracer.functions import trace_function, trace_node

GOLDEN = Path(__file__).parents[2] / "golden" / "tracer" / "functions"


def _names() -> list[str]:
    resources = make_resources()
    try:
        return list(all_cases(resources))
    finally:
        resources.pool.close()


NAMES = _names()


@pytest.fixture(scope="module")
def resources() -> Iterator[Resources]:
    resources = make_resources()
    yield resources
    resources.pool.close()


def traced(case: Case, name: str) -> TraceResult:
    return trace_function(case.func, case.inputs, name) if case.arguments else trace_node(case.func, "state", name)


@pytest.mark.parametrize("name", NAMES)
def test_function_template_matches_golden_file(resources: Resources, name: str, request: pytest.FixtureRequest) -> None:
    result = traced(all_cases(resources)[name], name)
    text = f"{format_graph(build_pgraph(result.template), depths=False)}\n"
    path = GOLDEN / f"{name}.txt"
    if request.config.getoption("--update-golden", default=False):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_prefetched_requests_are_claimed(resources: Resources, name: str) -> None:
    case = all_cases(resources)[name]
    inputs = case.inputs if case.model is None else case.model(**case.inputs)
    resources.take_requests()
    original = call(case.func, inputs, as_keywords=case.arguments)
    requests = resources.take_requests()
    assert sum(requests.values()) == case.requests
    result = call_prefetched(
        resources,
        traced(case, name),
        lambda: call(case.func, inputs, as_keywords=case.arguments),
        case.inputs,
        case.prefetched,
    )
    assert comparable(result.value) == comparable(original)
    assert (result.prefetched, result.wasted) == (case.prefetched, 0)
    assert result.requests == requests
