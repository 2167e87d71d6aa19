"""Tests of the benchmark of graphs on engines without latency: every graph runs, and all ways give the same answer."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from benchmarks.graphs import FIRST, Row, table, top
from benchmarks.langchain.bounds import Costs
from benchmarks.langgraph.answers import Size
from benchmarks.langgraph.apps import APPS
from benchmarks.langgraph.bounds import BOUNDS, Known
from benchmarks.langgraph.kits import Kit, arguments_end, make_kit
from teola_plugin.engines import profiles
from teola_plugin.engines.fake import split_tokens
from teola_plugin.graph import PrimitiveKind

MACHINE = profiles.rtx3090()


@pytest.fixture(scope="module")
def rows() -> dict[str, dict[str, Any]]:
    """Return the benchmark's row of each graph, for a small size."""
    made = {}
    with asyncio.Runner() as runner, make_kit(profiles.noop(), Size(4, 10), 0.0) as kit:
        for name, app in APPS.items():
            row = Row(app, kit)
            row.measure(runner, 1)
            made[name] = row.figures(name, MACHINE, 0.0)
    return made


@pytest.mark.parametrize("name", APPS)
def test_every_graph_of_the_benchmark_is_measured(name: str, rows: dict[str, dict[str, Any]]) -> None:
    row = rows[name]
    assert row["answers_equal"]
    assert row["bound_s"] > 0
    assert set(row["seconds"]) >= {"plain sync", "plain async", "fast sync", "fast async"}
    assert (FIRST[1] in row["seconds"]) == ("first_token_later_ms" in row) == bool(APPS[name].answer_node)


def test_summary_covers_all_graphs(rows: dict[str, dict[str, Any]]) -> None:
    summary = top(list(rows.values()))
    assert summary["answers_equal"]
    assert summary["worst_behind_ms"] == max(row["behind_ms"] for row in rows.values())
    assert len(table(list(rows.values()))) == len(APPS)


def called(kit: Kit, name: str) -> Known:
    """Return the calls of a run of the original."""
    app = APPS[name]
    kit.calls.clear()
    app.make(kit).invoke(app.given)
    return Known(Costs(MACHINE), kit.calls, 1.0)


def test_lower_bounds_follow_the_recorded_calls() -> None:
    """One call takes what it takes; of graders side by side, the last one counts."""
    with make_kit(profiles.noop(), Size(4, 10), 0.0) as kit:
        single = called(kit, "nothing to gain")
        (call,) = single.calls
        prompt = len(split_tokens(call.shown))
        llm = MACHINE["llm"]
        alone = llm.seconds(PrimitiveKind.PREFILLING, prompt) + llm.seconds(PrimitiveKind.DECODING, 10)
        assert BOUNDS["nothing to gain"](single) == pytest.approx(alone)
        looped = called(kit, "corrective RAG")
        assert len(looped.of("Retrieved document: ")) == 4
        assert len(looped.of("improved question")) == 1, "a document was refused, so the web is searched"
        decoding = sum(looped.decode(one.text) for one in looped.calls)
        assert BOUNDS["corrective RAG"](looped) < decoding
        assert BOUNDS["corrective RAG, batch"](called(kit, "corrective RAG, batch")) == pytest.approx(
            BOUNDS["corrective RAG"](looped)
        )


def test_tool_call_ends_at_the_end_of_its_arguments() -> None:
    one = '<tool_call>{"name": "a", "arguments": {"query": "b } c"}}</tool_call>'
    ends = arguments_end(f"{one}\n{one}")
    assert [f"{one}\n{one}"[:end] for end in ends] == [one[:-13], f"{one}\n{one[:-13]}"]
