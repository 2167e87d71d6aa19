"""Tests of the documents: generated parts are up to date, code blocks run, links and names have a target."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.documented import GENERATED
from support.documents import DOCUMENTS, GIVEN, MADE, PYTHON, TAKEN, TUTORIALS, WITH_CODE, code
from support.tutorials import check_tutorial

from benchmarks import real_picture, themes
from teola_plugin import pool as pools
from teola_plugin.adapters.plan_report import Reason
from teola_plugin.engines.fake import FakeEngine, fake_engines
from teola_plugin.engines.profiles import rtx3090

ROOT = Path(__file__).parents[1]
NAME = [path.relative_to(ROOT).as_posix() for path in DOCUMENTS]


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAME)
def test_generated_texts_are_up_to_date(document: Path, request: pytest.FixtureRequest) -> None:
    text = document.read_text()
    fresh = MADE.sub(lambda found: f"{found[1]}{GENERATED[found[2]]()}\n{found[4]}", text)
    if request.config.getoption("--update-golden", default=False):
        document.write_text(fresh)
        return
    assert text.count("<!-- generated:") == len(MADE.findall(text))
    assert text == fresh, "run pytest --update-golden tests/test_docs.py, and review the change"


def test_every_generated_text_is_used() -> None:
    used = {found[2] for document in DOCUMENTS for found in MADE.finditer(document.read_text())}
    assert used == set(GENERATED)


def fakes(name: str, given: str, drafts: Any = None) -> FakeEngine:
    """Return a fake engine in place of the model that a document names."""
    return next(engine for engine in fake_engines(rtx3090()) if engine.name == name)


@pytest.fixture
def names(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """Return the names that code blocks use without defining them."""
    monkeypatch.setattr(pools, "default_engine", fakes)
    made: dict[str, Any] = {}
    exec(GIVEN, made)
    with made["pool"]:
        yield {name: made[name] for name in TAKEN}


@pytest.mark.parametrize("document", WITH_CODE, ids=lambda path: path.name)
def test_code_blocks_of_documents_run(
    document: Path, names: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    given = names["pool"]
    try:
        for number, block in enumerate(code(document)):
            with contextlib.redirect_stdout(io.StringIO()):
                exec(compile(block, f"{document.name}, Python block {number}", "exec", dont_inherit=True), names)
    finally:
        if names["pool"] is not given:
            names["pool"].close()


@pytest.mark.parametrize("document", TUTORIALS, ids=lambda path: path.name)
def test_tutorial_runs_from_an_empty_folder(document: Path, tmp_path: Path) -> None:
    check_tutorial(document, sys.executable, tmp_path, {"PYTHONPATH": str(ROOT)})


def anchors(document: Path) -> set[str]:
    """Return the anchors of headings as GitHub makes them."""
    titles = re.findall(r"(?m)^#+ (.+)$", document.read_text())
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAME)
def test_links_of_documents_resolve(document: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", document.read_text()):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        found = (document.parent / path).resolve() if path else document
        assert found.exists(), f"{document.name} links to {target}, which is not there"
        assert not anchor or anchor in anchors(found), f"{document.name} links to {target}; no such heading"


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAME)
def test_named_tests_and_benchmarks_exist(document: Path) -> None:
    text = document.read_text()
    for path, name in re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", text):
        assert re.search(rf"(?m)^(async )?def {name}\(", (ROOT / path).read_text()), f"{path} has no {name}"
    for module in re.findall(r"python -m (benchmarks\.\w+)", text):
        place = ROOT / module.replace(".", "/")
        assert place.with_suffix(".py").exists() or (place / "__main__.py").exists(), module


NAMED_BY_FOLDER = {"conformance.py", "store_conformance.py", "calibration.py", "profiles.py"}
"""Of the table in ARCHITECTURE.md, which names a folder before them."""
PLACES = ("", "teola_plugin", "docs")
"""Where a path in backticks begins."""
WRITTEN = "out"
"""What benchmarks and the demo write: there after a run."""


@pytest.mark.parametrize("document", DOCUMENTS, ids=NAME)
def test_paths_in_backticks_exist(document: Path) -> None:
    """Files, and folders with a stroke: `tests/unit`, `benchmarks/*.py`, `runtime/works`."""
    tops = {path.name for place in PLACES for path in (ROOT / place).iterdir() if path.is_dir()} - {WRITTEN}
    text = re.sub(r"(?ms)^```.*?^```$", "", document.read_text())
    for named in re.findall(r"`([\w./*-]+)(?:::\w+)?`", text):
        top, stroke, _ = named.partition("/")
        is_path = (stroke and top in tops) or named.endswith((".py", ".md", ".toml", ".lock"))
        if is_path and named not in NAMED_BY_FOLDER:
            assert any(list((ROOT / place).glob(named)) for place in PLACES), f"{document.name} names {named}"


def test_every_folder_of_tests_is_documented() -> None:
    """And every folder that is told of is there."""
    rows = set(re.findall(r"(?m)^\| `tests/(\w+)` \|", (ROOT / "CONTRIBUTING.md").read_text()))
    kept = subprocess.run(["git", "ls-files", "tests"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    folders = {Path(name).parts[1] for name in kept if len(Path(name).parts) > 2}
    assert rows == folders or not kept


def test_every_benchmark_is_documented() -> None:
    table = (ROOT / "docs" / "benchmarks.md").read_text()
    commands = [path.stem for path in (ROOT / "benchmarks").glob("*.py") if "__main__" in path.read_text()]
    commands += [path.parent.name for path in (ROOT / "benchmarks").glob("*/__main__.py")]
    assert [name for name in commands if not re.search(rf"`python -m benchmarks\.{name}[ `]", table)] == []


def test_every_document_is_linked_from_the_readme() -> None:
    linked = set(re.findall(r"\]\(([^)#\s]+)", (ROOT / "README.md").read_text()))
    assert {path.relative_to(ROOT).as_posix() for path in DOCUMENTS if path.name != "README.md"} <= linked


def test_documented_environment_variables_are_read() -> None:
    named = {name for document in DOCUMENTS for name in re.findall(r"\bTEOLA_[A-Z_]+", document.read_text())}
    for name in named:
        found = subprocess.run(
            ["grep", "-rlq", name, "teola_plugin", "adapters", "tools", "tests", "Makefile"], cwd=ROOT
        )
        assert found.returncode == 0, name


def test_no_gain_page_explains_every_reason_with_a_fix() -> None:
    rows = re.findall(r"(?m)^\| (\*.*?) \|", (ROOT / "docs" / "no-gain.md").read_text())
    phrases = [phrase for row in rows for phrase in re.findall(r"\*(.+?)\*", row)]
    patterns = {phrase: ".*".join(map(re.escape, phrase.split("..."))) for phrase in phrases}

    explained = {phrase: {one for one in Reason if re.search(patterns[phrase], one.text)} for phrase in phrases}

    assert [phrase for phrase, reasons in explained.items() if not reasons] == []
    assert {one for one in Reason if one.fix} <= set().union(*explained.values())


def test_documents_besides_the_reference_can_be_read() -> None:
    """The pages of `docs` besides the reference have at most 25,000 words together."""
    pages = [
        path for path in (ROOT / "docs").glob("*.md") if not path.name.startswith(("reference-", "compatibility-"))
    ]

    assert sum(len(path.read_text().split()) for path in pages) <= 25_000


def test_readme_is_one_page_in_the_order_of_questions() -> None:
    """An app that runs comes first, then results, when it helps and what it costs, and everything else."""
    text = (ROOT / "README.md").read_text()
    bullets = ("**It helps**", "**It does not help**", "**What it costs.**", "**Why not")
    marks = ("pip install", "```python", "## What it gains", "docs/images/real.svg", *bullets, "teola compare")

    places = [text.index(mark) for mark in (*marks, "## Questions", "## Documentation")]

    assert places == sorted(places)
    assert text[: text.index("**It helps**")].count("\n") <= 64
    assert text.count("\n") <= 100


def test_first_readme_snippet_prints_its_shown_output(tmp_path: Path) -> None:
    """In a process of its own, and the README shows what it prints."""
    text = (ROOT / "README.md").read_text()
    snippet, shown = PYTHON.findall(text)[0], re.findall(r"(?ms)^```text\n(.*?)^```$", text)[0]
    (tmp_path / "snippet.py").write_text(snippet)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "snippet.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120
    )
    assert ran.returncode == 0 and not ran.stderr, ran.stderr
    row = re.compile(r"^(plain|accelerated) +(\d+\.\d) s  (.*)$", re.MULTILINE)
    (_, plain, answer), (_, accelerated, same) = row.findall(ran.stdout)
    assert answer == same and [(name, answer_shown) for name, _, answer_shown in row.findall(shown)] == [
        ("plain", answer),
        ("accelerated", answer),
    ]
    assert float(plain) >= 1.5 and float(accelerated) < 0.8 * float(plain)
    assert [seconds for _, seconds, _ in row.findall(shown)] == ["1.5", "0.5"]


@pytest.mark.parametrize("theme", themes.THEMES)
def test_readme_chart_matches_the_results(theme: str) -> None:
    found = json.loads(real_picture.RESULTS.read_text())
    drawn = themes.themed(ROOT / "docs" / "images" / "real.svg", theme).read_text()
    assert drawn == real_picture.picture(found, theme), "run python -m benchmarks.real_picture docs/images/real.svg"
