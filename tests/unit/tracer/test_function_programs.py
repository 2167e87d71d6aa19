"""Tests of random functions: prefetched requests are those that the functions make, and none is wasted."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from function_cases import ANSWER, GRADE, RULES, STATE, Grade, Plan, formatted
from function_programs import Program
from function_resources import Resources, call, call_prefetched, comparable, make_resources
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser

from teola_plugin.tracer.functions import trace_node

SEEDS = range(40)


@pytest.fixture(scope="module")
def resources() -> Iterator[Resources]:
    resources = make_resources()
    yield resources
    resources.pool.close()


def compiled(resources: Resources, source: str, name: str) -> Callable[..., Any]:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names: dict[str, Any] = {
        "llm": resources.llm,
        "retriever": resources.retriever,
        "chain": ANSWER | resources.llm | StrOutputParser(),
        "grader": GRADE | resources.llm.with_structured_output(Grade),
        "planner": resources.llm.with_structured_output(Plan),
        "formatted": formatted,
        "RULES": RULES,
        "SystemMessage": SystemMessage,
        "HumanMessage": HumanMessage,
    }
    exec(compile(source, name, "exec", dont_inherit=True), names)
    node: Callable[..., Any] = names["node"]
    return node


COUNTS: list[tuple[int, int]] = []
"""For each program: its requests that were prefetched, and all its requests."""


@pytest.mark.parametrize("seed", SEEDS)
def test_prefetched_requests_are_those_of_the_original(resources: Resources, seed: int) -> None:
    source = Program(seed).source()
    node = compiled(resources, source, f"<program {seed}>")
    resources.take_requests()
    original = call(node, STATE)
    requests = resources.take_requests()
    count = sum(requests.values())
    traced = trace_node(node, "state", "node")
    result = call_prefetched(
        resources, traced, lambda: call(node, STATE), STATE, count, speculate="off", patience_s=0.2
    )
    assert comparable(result.value) == comparable(original), source
    assert result.requests - requests == {} and result.wasted == 0, source  # equal searches are made once
    COUNTS.append((result.prefetched, count))


def test_most_requests_are_prefetched() -> None:
    if len(COUNTS) < len(SEEDS):
        pytest.skip("not all programs ran")
    prefetched, all_requests = map(sum, zip(*COUNTS, strict=True))
    assert prefetched >= 0.8 * all_requests
