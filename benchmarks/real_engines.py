"""Real models and a real vLLM server, plain and accelerated: what `teola demo` measures, kept.

python -m benchmarks.real_engines --json
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import arguments, environment, report


def options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--repeats", type=int, default=9, help="runs of each way")


def measured(repeats: int) -> dict[str, Any]:
    """Cases, each with its median seconds plain and accelerated."""
    from teola_plugin.cli.demo import documents, runs
    from teola_plugin.cli.demo.engines import Models
    from teola_plugin.cli.demo.report import Report

    demo = runs.DemoOptions(Models(), documents.DEFAULT_QUESTION, documents.load_documents([]), repeats)
    quiet, folder = Report(quiet=True), Path(tempfile.mkdtemp(prefix="teola-bench-"))
    _, own = runs.run_stock(demo, folder / "stock.html", quiet, is_first=True)
    _, pooled = runs.run_pooled(demo, folder / "pool.html", quiet, is_first=False)
    found = {"one_line": own["one_line"], "stock": own["cases"]["uploaded"], "pool": pooled["cases"]["uploaded"]}
    return found | {"nothing_to_gain": own["cases"]["nothing_to_gain"]}


def row(name: str, case: dict[str, Any]) -> dict[str, Any]:
    """Of the table, and of the results."""
    seconds = {key: round(case[key], 4) for key in ("plain_s", "accelerated_s")}
    equal = {"answers_equal": case["answers_equal"], "runs": case["runs"]}
    return {"case": name, **seconds, "speedup": round(case["speedup"], 3), **equal}


def main() -> None:
    given = arguments(__doc__ or "", options)
    rows = [row(name, case) for name, case in measured(given.repeats).items()]
    result = {"benchmark": "real_engines", "environment": environment(), "cases": {r["case"]: r for r in rows}}
    report(result, given, "Real engines, seconds", rows)


if __name__ == "__main__":
    main()
