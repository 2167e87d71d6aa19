"""Tests of the ablations: runs are repeatable, can be resumed, change one thing at a time, and their shares add up."""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks import ablation
from benchmarks.ablation import FULL, GRAPHS, Study
from benchmarks.apps import shares, studied
from benchmarks.apps.studied import Case, Ground, by_hand, ran, run_all
from teola_plugin import EnginePool
from teola_plugin.requests.payloads import Prompt, Sampling

ONE = Case(("advanced_rag",), 2.0, (), queries=6, paragraphs=10)


def test_run_is_repeatable_and_its_times_add_up() -> None:
    found = ran(ONE)
    assert found == ran(ONE)
    alone = ran(replace(ONE, rate=0.0))
    assert sum(alone["spent"].values()) == pytest.approx(alone["mean"], rel=1e-3)
    assert alone["spent"]["decoding"] > alone["spent"]["prefilling"] > 0 and alone["mean"] < found["mean"]


def test_passes_beat_the_graph_optimized_by_hand() -> None:
    alone = replace(ONE, rate=0.0, paragraphs=150)
    none, full = ran(alone), ran(replace(alone, passes=FULL))
    hand = ran(replace(alone, by_hand=True))
    assert full["mean"] < hand["mean"] < none["mean"]
    assert by_hand("naive_rag").flow["found"].query == "vector"  # type: ignore[attr-defined]
    with pytest.raises(KeyError, match="agent"):
        by_hand("agent")


@pytest.mark.parametrize("app", ["search_engine", "agent", "naive_rag", "contextual_retrieval"])
def test_every_application_runs_in_virtual_time(app: str) -> None:
    assert 1 < ran(Case((app,), queries=2, paragraphs=6))["mean"] < 10


def test_two_apps_share_one_cluster() -> None:
    found = ran(Case(("naive_rag", "agent"), 1.0, queries=6, paragraphs=6))
    assert set(found["by_app"]) == {"naive_rag", "agent"}


def test_drafts_need_an_answer_that_copies_and_change_no_text() -> None:
    ground = Ground(copied=0.6, tokens=64)
    text = "Question: q\n\nPassage:\n" + "one two three four five six seven " * 9 + "\n\nAnswer:"
    prompt, sampling = Prompt(text=text), Sampling(max_tokens=64)
    answer = ground.answer(prompt, sampling)
    assert answer == replace(ground, drafts=16).answer(prompt, sampling) and len(answer.split()) == 64
    copied = [word for word in answer.split() if word in text.split()]
    assert len(copied) == round(0.6 * 64)
    off = replace(ONE, rate=0.0, queries=2, passes=FULL, ground=ground)
    assert ran(replace(off, ground=replace(ground, drafts=16)))["mean"] < 0.8 * ran(off)["mean"]


def test_interrupted_run_resumes_from_its_results(tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    cases = [Case(("agent",), queries=2), Case(("agent",), passes=(), queries=2)]
    first = run_all(cases[:1], 1, kept)
    lines = kept.read_text()
    reports: list[int] = []
    both = run_all(cases, 1, kept, lambda: reports.append(1))
    assert both[cases[0]] == first[cases[0]] and len(reports) == 2
    assert kept.read_text().startswith(lines) and len(kept.read_text().splitlines()) == 2
    kept.write_text(json.dumps({"case": repr(cases[0]), "found": {"mean": 7.0}}) + "\n")
    assert run_all(cases[:1], 1, kept) == {cases[0]: {"mean": 7.0}}


def test_rows_compare_seed_by_seed() -> None:
    options = argparse.Namespace(queries=4, seeds=2, only="agent")
    study = Study(options)
    tables = study.tables()
    assert {row[2]["passes"] for row in tables["graph"]} == set(GRAPHS) and not tables["together"]
    own, base = Case(("agent",), 8.0, FULL), Case(("agent",), 8.0, ())
    figures: dict[str, Any] = {"queued": 0.0, "work": 1.0, "wasted_tokens": 2.0, "by_app": {}, "busiest": "llm"}
    for seed in range(2):
        for case, mean in ((own, 1.0), (base, 1.5 + seed)):
            one = replace(case, queries=4, seed=seed)
            study.found[one] = {**figures, "mean": mean, "p95": mean, "p99": 2 * mean, "spent": {"decoding": mean}}
    row = study.row(own, base, app="agent")
    assert row["speedup"]["median"] == 2.0 and row["speedup"]["min"] == 1.5 and row["wasted_tokens"] == 2.0
    assert ablation.rows([row]) == [
        {"app": "agent", "rate": 8.0, "mean": 1.0, "p99": 2.0, "faster": 2.0, "interval": "[1.5, 2.5]"}
    ]


def test_shares_of_overhead_are_measured_and_add_up() -> None:
    parts = [one for found in shares.PARTS.values() for one in found]
    before = [getattr(owner, method) for owner, method in parts]
    with EnginePool.local(Ground(scale=0.01).made()) as pool:
        rows = shares.of_app("naive_rag", pool, 3, 0.01)
    assert [getattr(owner, method) for owner, method in parts] == before
    assert len(rows) == 2 and all(0 < row[part] < row["seconds"] for row in rows for part in shares.PARTS)
    assert rows[0]["virtual"] == pytest.approx(0.01 * rows[0]["whole"], rel=1e-3)
    assert shares.told(rows)["virtual_s"] > 1


def test_unexplained_overhead_counts_as_communication() -> None:
    known = {"seconds": 1.2, "virtual": 1.0, "whole": 1.0, "processor": 0.3, "fakes": 0.06, "splitting": 0.04}
    row = {**known, "planning": 0.01, "graphs": 0.02, "engines": 0.03}
    asleep, awake = shares.told([row]), shares.told([row], asleep=False)
    assert (asleep["ms"]["all"]["median"], asleep["ms"]["communication"]["median"]) == (160, 100)
    assert (awake["ms"]["all"]["median"], awake["ms"]["communication"]["median"]) == (100, 40)
    assert awake["share"]["all"]["median"] == pytest.approx(0.1 / 1.1, abs=1e-4)
    assert awake["ms"]["processor"]["median"] == asleep["ms"]["processor"]["median"] == 200
    there = shares.told([{**row, "engines": 0.0, "fakes": 0.0}], {"engines": 0.03, "fakes": 0.06}, asleep=False)
    assert there == awake, "what runs beside the engines is taken as it was here"


def test_pool_file_names_create_the_same_engines() -> None:
    assert set(shares.engines(0.5)) == set(Ground().made())
    made = studied.engine("llm", 0.5)
    assert made.profile == Ground(scale=0.5).made()["llm"][0].profile
