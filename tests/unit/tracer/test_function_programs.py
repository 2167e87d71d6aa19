"""Functions that nobody wrote: what is asked for them early is what they ask for, and none of it is in vain."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from function_cases import ANSWER, GRADE, RULES, STATE, Grade, Plan, formatted
from function_programs import Program
from function_world import World, alike, beside, called, world
from langchain_core.messages import HumanMessage, SystemMessage
from langchain_core.output_parsers import StrOutputParser

from teola_plugin.tracer.functions import trace_node

SEEDS = range(40)


@pytest.fixture(scope="module")
def farm() -> Iterator[World]:
    made = world()
    yield made
    made.pool.close()


def compiled(farm: World, source: str, name: str) -> Callable[..., Any]:
    linecache.cache[name] = (len(source), None, source.splitlines(keepends=True), name)
    names: dict[str, Any] = {
        "llm": farm.llm,
        "retriever": farm.retriever,
        "chain": ANSWER | farm.llm | StrOutputParser(),
        "grader": GRADE | farm.llm.with_structured_output(Grade),
        "planner": farm.llm.with_structured_output(Plan),
        "formatted": formatted,
        "RULES": RULES,
        "SystemMessage": SystemMessage,
        "HumanMessage": HumanMessage,
    }
    exec(compile(source, name, "exec", dont_inherit=True), names)
    node: Callable[..., Any] = names["node"]
    return node


@pytest.mark.parametrize("seed", SEEDS)
def test_what_is_asked_early_is_what_is_asked(farm: World, seed: int) -> None:
    source = Program(seed).source()
    node = compiled(farm, source, f"<program {seed}>")
    farm.asked()
    plain = called(node, STATE)
    asked = farm.asked()
    traced = trace_node(node, "state", "node")
    most = sum(asked.values())
    made = beside(farm, traced, lambda: called(node, STATE), STATE, most, speculate="off", patience=0.2)
    assert alike(made.value) == alike(plain), source
    assert made.asked - asked == {} and made.wasted == 0, source  # equal searches are made once
    EARLY.append((made.early, most))


EARLY: list[tuple[int, int]] = []


def test_most_of_it_is_asked_early() -> None:
    if len(EARLY) < len(SEEDS):
        pytest.skip("not all programs ran")
    early, all_of_it = map(sum, zip(*EARLY, strict=True))
    assert early >= 0.8 * all_of_it
