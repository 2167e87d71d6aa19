"""Tests that engines which are not declared dedicated get no speculative requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from test_lookahead import CHOICES, QUESTIONS, begun_early, judged

from benchmarks.langchain.kits import pool_kit, scaled
from teola_plugin import accelerate
from teola_plugin.engines import profiles
from teola_plugin.passes import PassContext


@pytest.fixture(scope="module")
def kit() -> Iterator[Any]:
    machine = scaled(profiles.rtx3090(), 0.05)
    made = pool_kit({**machine, "llm": replace(machine["llm"], dedicated=False)})
    yield made
    made.pool.close()


@pytest.mark.parametrize("name", ["one arm asks", "router"])
def test_arm_on_a_shared_engine_is_called_only_if_chosen(kit: Any, name: str) -> None:
    chain = judged(kit, CHOICES[name](kit))
    fast = accelerate(chain)
    for given in QUESTIONS:
        kit.fresh()
        plain = chain.invoke(given)
        kit.fresh()
        assert fast.invoke(given) == plain
        trace = fast.last_trace()
        assert trace is not None and not begun_early(trace) and trace.wasted() == (0, 0)


def test_speculate_all_allows_speculative_calls_to_a_shared_engine(kit: Any) -> None:
    fast = accelerate(judged(kit, CHOICES["one arm asks"](kit)), speculate="all")
    kit.fresh()
    fast.invoke(QUESTIONS[0])
    assert begun_early(fast.last_trace())


def test_certain_call_to_a_shared_engine_is_prefetched(kit: Any) -> None:
    fast = accelerate(judged(kit, CHOICES["primary"](kit)))
    kit.fresh()
    fast.invoke(QUESTIONS[0])
    assert begun_early(fast.last_trace())


def test_pass_context_permits_speculation_by_engine_and_option() -> None:
    machine = profiles.rtx3090()
    context = PassContext({**machine, "llm": replace(machine["llm"], dedicated=False)})
    assert context.may_read("llm") and not context.may_predict("llm") and context.may_predict("embedder", "store")
    assert not context.may_predict("embedder", "llm") and not context.may_ask("llm") and context.may_ask("nobody's")
    assert not context.may_predict("nobody's") and not context.may_read("nobody's")
    everything = replace(context, speculate="all")
    assert everything.may_predict("llm", "nobody's") and everything.may_ask("llm")
    assert not replace(context, speculate="off").may_predict("embedder")
