"""Figures in the documents come from `benchmarks/results`: tables are made of it (test_docs.py), sentences are here."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FOUND: dict[str, Any] = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
DOCUMENTS += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))


def hundredfold(found: Any) -> Any:
    """The same with every number a hundred times as large."""
    if isinstance(found, dict):
        return {name: hundredfold(one) for name, one in found.items()}
    return 100 * found if isinstance(found, int | float) else found


SENTENCES = {
    "docs/benchmarks.md": [
        "at load {single_query[environment][load_1m]:.1f}; the chain with nothing to gain was "
        "{single_query[nothing_to_gain][behind_ms][median]:.1f} ms behind (single runs "
        "{single_query[nothing_to_gain][behind_ms][min]:.0f} to "
        "{single_query[nothing_to_gain][behind_ms][max]:.0f} ms)",
        "the accelerated chain was at worst {single_query[drafts][nothing_copied_worst]:.3f} times as fast as without",
        "a token behind the first takes {drafts[cases][0][plain ms]:.1f} ms in an answer without drafts and "
        "{drafts[cases][0][lookup ms]:.1f} ms by lookup",
        "in a refinement {drafts[cases][1][plain ms]:.1f} and {drafts[cases][1][lookup ms]:.1f} ms, and "
        "{drafts[cases][1][graph ms]:.1f} ms with the answer before it as a draft",
        "Both together are {drafts[speedup_lookup]:.2f} times as fast by lookup, and refinements "
        "{drafts[speedup_graph]:.2f} times with the graph;",
        "{drafts[held_out_lookup]:.2f} and {drafts[held_out_graph]:.2f} times.",
        "is {drafts[nothing_to_copy]:.3f} times as fast where there is nothing to copy, and {drafts[misled]:.2f} times",
        "that misleads (load {drafts[environment][load_1m]:.1f})",
        "the least of all is {drafts[worst_at_load]:.3f} ({drafts[worst_is]})",
        "the control, is {drafts[control_at_load][0]:.2f} to {drafts[control_at_load][1]:.2f} times as fast",
        "(load {apps[environment][load_1m]:.1f} of other work beside it)",
        "the worst of all is {apps[worst_ratio]:.2f}:",
        "There are {apps_simulated[queries_per_rate]} queries at each rate",
        "{apps_simulated[worst_ratio][median]:.2f}: the {apps_simulated[worst_ratio][of]} of contextual retrieval at "
        "{apps_simulated[worst_ratio][rate]} a second, over {apps_simulated[worst_ratio][baseline]} "
        "({apps_simulated[worst_ratio][min]:.2f} to {apps_simulated[worst_ratio][max]:.2f} from seed to seed). "
        "Of {apps_simulated[ratios]} ratios {apps_simulated[behind]} have an interval",
        "at most {percent[worst_processor_share]:.2f} % of any application's latency by processor time, and "
        "{percent[worst_share][clock, process]:.2f} % by the clock",
        "Over Ray it is {percent[worst_share][clock, ray]:.1f} % by the clock where an upload",
        "(load {overheads[environment][load_1m]:.1f} on four cores",
        "other work ran on (load {apps_real[environment][load_1m]:.1f})",
    ],
    "docs/cluster.md": ["One process needs {overhead[per_primitive_ms][chain][median]:.2f} ms for each"],
}
"""Document -> what it says, with the place of each figure in the results."""

GIVEN = {
    "docs/benchmarks.md": {
        **dict.fromkeys(("2.09", "19.2", "1.2", "1.55"), "the paper's"),
        **dict.fromkeys(("0.35", "28.5", "0.164"), "the profile rtx3090"),
        "1.10": "what tests/benchmarks/test_single_query.py asserts",
        "0.98": "benchmarks/apps/loaded.py: LEVEL",
        "0.25": "the default of --scale",
        "1.05": "what benchmarks/graphs.py takes for possible",
        **dict.fromkeys(("1.74", "2.31", "1.56", "1.25"), "Spec-Bench's"),
    },
    "docs/cluster.md": {"1.5": "cluster/host/clients.py: GAP"},
    "docs/placement.md": {"1.5": "scheduling/placement/rebalance.py: HOT_RATIO"},
    "docs/compatibility-langchain.md": {"1.0": "the ordinary weight"},
}
"""Document -> figures that were not measured, and whose they are."""
VERSION = (
    r"(`langchain-core`( before)?|`langgraph`|`llama-index-core`|`llama-index-workflows`|Ray|arXiv|tested with)"
    r" \(?\d+\.\d+"
    r"|Python 3\.\d+( to 3\.\d+)?|Apache-2\.0|`[^`]*`"
)
"""Numbers with a point that are no figures: versions, papers, names."""


PERCENT = {"percent": hundredfold(FOUND["overheads"])}
"""Shares of the results, as they are told."""


def prose(document: str) -> str:
    """Its sentences in one line: no made tables (test_docs.py makes them again), no code, no links' targets."""
    text = (ROOT / document).read_text()
    for unread in (r"<!-- generated: .*?<!-- end -->", r"```.*?```", r"\]\([^)]*\)"):
        text = re.sub(unread, " ", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("document", SENTENCES)
def test_sentences_tell_what_was_measured(document: str) -> None:
    text = prose(document)
    for sentence in SENTENCES[document]:
        assert sentence.format(**FOUND, **PERCENT) in text


@pytest.mark.parametrize("document", DOCUMENTS)
def test_no_other_figure_is_told(document: str) -> None:
    text = prose(document)
    for sentence in SENTENCES.get(document, ()):
        text = text.replace(sentence.format(**FOUND, **PERCENT), " ")
    left = re.findall(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)", re.sub(VERSION, " ", text))
    assert sorted(set(left)) == sorted(GIVEN.get(document, {})), "make it a sentence of the results, or say whose it is"


def test_every_result_has_its_command_and_its_machine() -> None:
    """The table in docs/benchmarks.md names each file."""
    table = (ROOT / "docs" / "benchmarks.md").read_text()
    commands = (ROOT / "Makefile").read_text()
    for name, result in FOUND.items():
        assert f"results/{name}.json" in table and {"cores", "load_1m", "python"} <= set(result["environment"])
        assert f"python -m benchmarks.{result['benchmark']} " in table
        assert re.search(rf"for b in [^;]*\b{result['benchmark']}\b", commands), f"make bench leaves {name} out"
