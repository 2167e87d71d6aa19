"""Tests that figures in sentences of the documents come from `benchmarks/results`. test_docs.py tests the tables."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
FOUND: dict[str, Any] = {path.stem: json.loads(path.read_text()) for path in RESULTS.glob("*.json")}
DOCUMENTS = ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "CHANGELOG.md"]
DOCUMENTS += sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md"))


CONTROLS = [way["control"] for app in FOUND["public_apps"]["apps"] for way in app["ways"].values()]
"""Ratios of the original to itself, of each app and entry point."""
DERIVED = {
    "control": {"least": min(CONTROLS), "most": max(CONTROLS)},
    "arrived": FOUND["server_load"]["accepted"] + FOUND["server_load"]["refused"],
}
"""Figures of sentences that follow from several of the results."""

SENTENCES = {
    "docs/benchmarks.md": [
        "the control, is {drafts[control_at_load][0]:.2f} to {drafts[control_at_load][1]:.2f} times as fast",
        "{server_load[accepted]} of {arrived:,} queries were taken, all within their goal of "
        "{server_load[goal_s]:.0f} s",
        "The original against itself is {control[least]:.2f} to {control[most]:.2f}.",
    ],
    "docs/cluster.md": ["One process needs {overhead[per_primitive_ms][chain][median]:.2f} ms for each"],
}
"""Document -> what it says, with the place of each figure in the results."""

GIVEN = {
    "docs/benchmarks.md": {
        **dict.fromkeys(("2.00", "0.95"), "examples of a ratio"),
        **dict.fromkeys(("0.35", "28.5"), "the profile rtx3090"),
        "0.1": "benchmarks/public_apps/server.py: PROMPT_TOKEN_S, in ms",
    },
    "docs/placement.md": {"1.5": "scheduling/placement/rebalance.py: HOT_RATIO"},
    "docs/compatibility-langchain.md": {"1.0": "the ordinary weight"},
}
"""Document -> figures that were not measured, and whose they are."""
VERSION = (
    r"(`(langchain-core|langgraph|llama-index-core|llama-index-workflows)`( before)?|Ray|arXiv|tested with) \(?\d+\.\d+"
    r"|Python 3\.\d+( to 3\.\d+)?|Apache-2\.0|`[^`]*`"
)
"""Numbers with a point that are no figures: versions, papers, names."""


def prose(document: str) -> str:
    """Return a document's sentences in one line, without generated tables, code and targets of links."""
    text = (ROOT / document).read_text()
    for unread in (r"<!-- generated: .*?<!-- end -->", r"```.*?```", r"\]\([^)]*\)"):
        text = re.sub(unread, " ", text, flags=re.DOTALL)
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize("document", SENTENCES)
def test_figures_in_sentences_match_the_results(document: str) -> None:
    text = prose(document)
    for sentence in SENTENCES[document]:
        assert sentence.format(**FOUND, **DERIVED) in text


@pytest.mark.parametrize("document", DOCUMENTS)
def test_documents_contain_no_other_figures(document: str) -> None:
    text = prose(document)
    for sentence in SENTENCES.get(document, ()):
        text = text.replace(sentence.format(**FOUND, **DERIVED), " ")
    left = re.findall(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)", re.sub(VERSION, " ", text))
    assert sorted(set(left)) == sorted(GIVEN.get(document, {})), "make it a sentence of the results, or say whose it is"


def test_every_result_has_its_command_and_environment() -> None:
    """docs/benchmarks.md names each file with its command, and the file its machine and its commit."""
    table = (ROOT / "docs" / "benchmarks.md").read_text()
    commands = (ROOT / "Makefile").read_text()
    for name, result in FOUND.items():
        facts = set(result["environment"])
        assert f"results/{name}.json" in table
        assert {"cores", "load_1m", "python"} <= facts
        assert facts & {"commit", "added"}, f"{name}.json names no commit"
        assert f"python -m benchmarks.{result['benchmark']} " in table
        assert re.search(rf"for b in [^;]*\b{result['benchmark']}\b", commands), f"make bench leaves {name} out"


EQUALITY = {"answers_equal", "outputs_equal", "requests_equal", "same_answers"}
"""Keys of the results that say whether accelerated runs answered and asked as the original did."""


def unequal(value: Any, path: str) -> Iterator[str]:
    """Yield the paths of all results below a value that say that something was not equal."""
    if isinstance(value, dict):
        for name, part in value.items():
            if name in EQUALITY and part is not True:
                yield f"{path}/{name}"
            yield from unequal(part, f"{path}/{name}")
    elif isinstance(value, list):
        for number, part in enumerate(value):
            yield from unequal(part, f"{path}/{number}")


def test_answers_and_requests_were_equal_in_all_results() -> None:
    """docs/benchmarks.md says so."""
    assert list(unequal(FOUND, "results")) == []


def test_different_answer_in_a_result_is_found() -> None:
    assert list(unequal({"cases": [{"answers_equal": False}]}, "results")) == ["results/cases/0/answers_equal"]
