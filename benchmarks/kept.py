"""Runs a benchmark and keeps its result, unless this commit's is there already: what `make bench` is made of.

Each result is first a file in out/bench/COMMIT and, when it is whole, one in benchmarks/results. A run that was broken
off is begun anew with the next call, those before it are not. Prints what is done on stderr.

    python -m benchmarks.kept overhead graphs
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.common import commit

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
ARGUMENTS: dict[str, dict[str, Sequence[str]]] = {
    "single_query": {"single_query": ("--repeats", "3")},
    "llamaindex_patterns": {"llamaindex_patterns": (), "llamaindex_patterns_own": ("--objects", "own")},
    "graphs": {"graphs": ("--scale", "1", "--repeats", "3")},
    "stock_real": {"stock_real": ("--repeats", "5")},
    "apps": {
        "apps": ("--ground", "profile"),
        "apps_real": ("--ground", "real", "--queries", "6"),
        "apps_simulated": ("--ground", "simulated", "--folder", "{folder}/apps"),
    },
    "ablation": {"ablation": ("--kept", "{folder}/ablation.jsonl")},
}
"""Benchmark -> its results, each with the arguments that docs/benchmarks.md names; others have one result, and none."""
Run = Callable[[Sequence[str], Path], int]
"""Runs a command into a file, and gives its exit code."""


def ran(command: Sequence[str], into: Path) -> int:
    with into.open("w", encoding="utf-8") as file:
        return subprocess.run(command, cwd=ROOT, stdout=file).returncode


def keep(benchmark: str, folder: Path, results: Path = RESULTS, run: Run = ran) -> None:
    """Have all results of a benchmark. Exits where it fails, or gives no JSON."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, given in ARGUMENTS.get(benchmark, {benchmark: ()}).items():
        whole, part = folder / f"{name}.json", folder / f"{name}.part"
        if whole.exists():
            _say(f"{name}: done before ({whole}); remove that to measure again")
        else:
            arguments = [one.format(folder=folder) for one in given]
            _say(f"{name}: begun {time.strftime('%H:%M:%S')}")
            begun = time.monotonic()
            code = run([sys.executable, "-m", f"benchmarks.{benchmark}", *arguments, "--json"], part)
            if code or not _is_json(part):
                raise SystemExit(f"{name} failed ({code}); what it printed is in {part}. Next: run it again.")
            part.replace(whole)
            _say(f"{name}: done in {time.monotonic() - begun:.0f} s")
        shutil.copyfile(whole, results / whole.name)


def _is_json(path: Path) -> bool:
    try:
        return isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    except ValueError:
        return False


def _say(line: str) -> None:
    print(f"bench: {line}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Runs benchmarks and keeps their results.")
    parser.add_argument("names", nargs="+", metavar="NAME", help="of a benchmark: overhead, graphs, ...")
    for one in parser.parse_args().names:
        keep(one, ROOT / "out" / "bench" / commit().replace(" ", "-"))
