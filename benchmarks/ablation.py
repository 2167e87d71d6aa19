"""What each part gains, in virtual time: the five applications as workflows, with one thing changed at a time.

Passes (none, parallelisation, pipelining, all four of the paper), the order in which engines serve, drafts, two apps
on one cluster beside the paper's baselines, lengths of answers, and how far prefilling and decoding slow each other.
Everybody meets the same arrivals. `benchmarks.apps.studied` says which engines there are.

    python -m benchmarks.ablation --json
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.apps.studied import Case, Ground, run_all
from benchmarks.common import arguments, environment, print_table, report, summary
from teola_plugin.observe.progress import progress

LENGTHS, INTERFERENCES = (8, 24, 64, 200), (0.0, 0.5, 1.0)
CHANGED = "advanced_rag"
"""What is changed at load, too, where that would take long for all."""
PARALLEL, PIPELINED = ("prune-dependencies", "prefilling-split"), ("stage-decomposition", "decoding-pipelining")
FULL = (PARALLEL[0], PIPELINED[0], PARALLEL[1], PIPELINED[1])
GRAPHS: dict[str, tuple[str, ...]] = {
    "none": (),
    "parallelisation": PARALLEL,
    "pipelining": PIPELINED,
    "full": FULL,
}
"""As the paper groups its passes: 1 and 3, 2 and 4. `none` is one component after the other, as the workflow says."""
RATES = {
    "search_engine": (0.0, 8.0, 16.0),
    "agent": (0.0, 16.0, 30.0),
    "naive_rag": (0.0, 2.0, 4.0),
    "advanced_rag": (0.0, 2.0, 4.0),
    "contextual_retrieval": (0.0, 0.3, 0.6),
}
"""Queries a second: one at a time, and up to where the busiest engine has something to do nearly always."""
UPLOADS = ("naive_rag", "advanced_rag")
LARGE = 300
"""Paragraphs of a large upload: 600 chunks, more than the embedder takes at once with profit."""
POLICIES = {"topology-aware": "topology-aware", "TO": "throughput-oriented", "PO": "per-invocation"}
SLOTS, CROWDED = 16, (2.0, 5.0)
"""Requests at once on an LLM where there is little room, and rates up to where it is filled."""
DRAFTS = {"off": FULL, "lookup": FULL, "lookup and graph": (*FULL, "draft-decoding")}
COPIED, DRAFTED = (0.3, 0.6), ("naive_rag", "advanced_rag", "contextual_retrieval")
SCHEMES: dict[str, dict[str, Any]] = {
    "LlamaDist-PO": {"passes": (), "ground": Ground("per-invocation", caching=False)},
    "LlamaDist-TO": {"passes": (), "ground": Ground("throughput-oriented", caching=False)},
    "LlamaDistPC-PO": {"passes": (), "by_hand": True, "ground": Ground("per-invocation")},
    "LlamaDistPC-TO": {"passes": (), "by_hand": True, "ground": Ground("throughput-oriented")},
    "accelerated": {},
}
TOGETHER = (2.0, 4.0)


class Study:
    """Which cases a table needs, and its rows once they have run."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self.found: dict[Case, dict[str, Any]] = {}

    def cases(self, first: Case) -> list[Case]:
        """The runs of one setting: a few queries where nobody meets another, else some seeds."""
        options = self._options
        if not first.rate:
            return [replace(first, queries=min(30, options.queries))]
        return [replace(first, queries=options.queries, seed=seed) for seed in range(options.seeds)]

    def row(self, first: Case, base: Case, **known: Any) -> dict[str, Any]:
        """Means over the seeds, and how many times as long `base` takes, seed by seed."""
        own = [self.found[case] for case in self.cases(first)]
        pairs = list(zip([self.found[case] for case in self.cases(base)], own, strict=True))
        told = {name: round(fmean(one[name] for one in own), 4) for name in ("mean", "p95", "p99", "queued", "work")}
        return {
            **known,
            "rate": first.rate,
            **told,
            "wasted_tokens": round(fmean(one["wasted_tokens"] for one in own), 1),
            "speedup": summary([a["mean"] / b["mean"] for a, b in pairs], digits=3),
            "speedup_p99": summary([a["p99"] / b["p99"] for a, b in pairs], digits=3),
            "busiest": own[-1]["busiest"],
            "spent": own[0]["spent"],
        } | (
            {
                "speedup_by_app": {
                    name: round(fmean(a["by_app"][name] / b["by_app"][name] for a, b in pairs), 3)
                    for name in own[0]["by_app"]
                }
            }
            if own[0]["by_app"]
            else {}
        )

    def tables(self) -> dict[str, list[tuple[Case, Case, dict[str, Any]]]]:
        """By table: of each row its case, that which it is compared with, and what names it."""
        return {
            "graph": self._graph(),
            "batching": self._batching(),
            "drafts": self._drafts(),
            "together": self._together(),
            "lengths": self._sensitivity("tokens", LENGTHS),
            "interference": self._sensitivity("interference", INTERFERENCES),
        }

    def _apps(self) -> list[str]:
        return [app for app in RATES if self._options.only in app]

    def _graph(self) -> list[tuple[Case, Case, dict[str, Any]]]:
        firsts = [(app, Case((app,), rate)) for app in self._apps() for rate in RATES[app]]
        large = [app for app in self._apps() if app in UPLOADS]
        firsts += [(f"{app}, 600 chunks", Case((app,), paragraphs=LARGE)) for app in large]
        return [
            (replace(first, passes=passes), replace(first, passes=()), {"app": app, "passes": name})
            for app, first in firsts
            for name, passes in GRAPHS.items()
        ]

    def _batching(self) -> list[tuple[Case, Case, dict[str, Any]]]:
        firsts = [Case((app,), rate, FULL) for app in self._apps() for rate in RATES[app][1:]]
        narrow = Ground(slots=SLOTS)
        firsts += [Case((app,), rate, FULL, narrow) for app in self._apps() if app in DRAFTED for rate in CROWDED]
        firsts = [one for one in firsts if one.apps != ("contextual_retrieval",) or one.ground.slots is None]
        return [
            (
                one,
                replace(one, ground=replace(one.ground, policy=policy)),
                {"app": one.apps[0], "against": name, "slots": one.ground.slots or 64},
            )
            for one in firsts
            for name, policy in POLICIES.items()
        ]

    def _drafts(self) -> list[tuple[Case, Case, dict[str, Any]]]:
        rows = []
        for app in [app for app in self._apps() if app in DRAFTED]:
            for copied in COPIED:
                for rate in RATES[app][: 2 if app == CHANGED else 1]:
                    off = Case((app,), rate, FULL, Ground(copied=copied, tokens=64))
                    for name, passes in DRAFTS.items():
                        ground = replace(off.ground, drafts=0 if name == "off" else 16)
                        known = {"app": app, "copied": copied, "drafts": name}
                        rows.append((replace(off, passes=passes, ground=ground), off, known))
        return rows

    def _together(self) -> list[tuple[Case, Case, dict[str, Any]]]:
        if self._options.only:
            return []
        own = [Case(UPLOADS, rate) for rate in TOGETHER]
        return [(one, replace(one, **how), {"against": name}) for one in own for name, how in SCHEMES.items()]

    def _sensitivity(self, name: str, values: Sequence[float]) -> list[tuple[Case, Case, dict[str, Any]]]:
        rows = []
        for app in self._apps():
            for rate in RATES[app][: 2 if app == CHANGED else 1]:
                for value in values:
                    ground = replace(Ground(), **{name: value})  # type: ignore[arg-type]
                    full = Case((app,), rate, FULL, ground)
                    rows.append((full, replace(full, passes=()), {"app": app, name: value}))
        return rows


def main(options: argparse.Namespace) -> dict[str, Any]:
    study = Study(options)
    tables = study.tables()
    needed = [case for rows in tables.values() for row in rows for one in row[:2] for case in study.cases(one)]
    with progress(len(set(needed)), "runs") as bar:
        study.found = run_all(needed, options.workers, options.kept, bar.advance)
    return {
        "benchmark": "ablation",
        **{name: [study.row(own, base, **known) for own, base, known in rows] for name, rows in tables.items()},
        "queries": options.queries,
        "seeds": options.seeds,
        "environment": environment(),
    }


def rows(table: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """What is printed of a table."""
    left = ("p95", "queued", "work", "wasted_tokens", "speedup", "speedup_p99", "busiest", "spent", "speedup_by_app")
    return [
        {name: value for name, value in row.items() if name not in left}
        | {"faster": row["speedup"]["median"], "interval": str(row["speedup"]["interval"])}
        for row in table
    ]


if __name__ == "__main__":
    given = arguments(
        "What each part gains, in virtual time.",
        lambda parser: (
            parser.add_argument("--queries", type=int, default=100, help="of each run"),
            parser.add_argument("--seeds", type=int, default=3, help="runs of each setting at each rate"),
            parser.add_argument("--workers", type=int, default=2, help="processes side by side"),
            parser.add_argument("--only", default="", help="only applications whose name contains this"),
            parser.add_argument("--kept", type=Path, help="a file for finished runs, from which it goes on"),
        ),
    )
    outcome = main(given)
    report(outcome, given, "passes", rows(outcome["graph"]))
    for title in ("batching", "drafts", "together", "lengths", "interference"):
        if outcome[title]:
            print_table(title, rows(outcome[title]))
