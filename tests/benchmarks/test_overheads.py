"""Tests that each figure about the cost of orchestration measures what its name says."""

from __future__ import annotations

import argparse

from benchmarks import overheads
from examples.apps.workflows import WORKFLOWS


def test_costs_are_measured_for_graphs_queries_and_replicas() -> None:
    plans = overheads.planning(1)
    assert [one["primitives"] for one in plans] == sorted(one["primitives"] for one in plans)
    assert all(one["kept_ms"]["median"] < one["plan_ms"]["median"] for one in plans)
    found = overheads.decisions(argparse.Namespace(requests=30))
    assert {one["waiting"] for one in found} == set(overheads.WAITING)
    assert {one["replicas"] for one in found} == set(overheads.REPLICAS) and all(one["us"]["min"] > 0 for one in found)


def test_rows_name_application_and_ground() -> None:
    options = argparse.Namespace(queries=1, only="agent", here=True)
    result = overheads.orchestration(options)
    assert set(result) == {"clock", "path"} and set(result["clock"]["process"]) == {"agent"} < set(WORKFLOWS)
    rows = overheads.rows({"shares": result})
    assert [row["on"] for row in rows] == ["process, clock", "process, path"]
    assert rows[0]["seconds"] > 1
