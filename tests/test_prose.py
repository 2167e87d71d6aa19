"""Tests of `tools/check_prose.py`: our documents and messages pass, and each rule finds what it should."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools import check_prose as check

ROOT = Path(__file__).resolve().parents[1]
LONG = " ".join(["word"] * 31)
PLANTED = {
    "What is sent early is taken later.": "a clause as its subject",
    "Who needs an answer waits.": "a clause as its subject",
    "*Whatever* you send is kept.": "a clause as its subject",
    "The second call was made for nothing.": "'for nothing'",
    "The app's own model runs in its place.": "'in its place'",
    "It does not wait, and it never asks.": "2 negations (not, never)",
    "You can't read it, and nobody can.": "2 negations (n't, nobody)",
    f"{LONG}.": "31 words",
}
"""Sentences that break a rule, and a part of what is said about each."""
PLAIN = (
    "What does it cost? Who pays?",
    "The package does not copy your app. It never sends data anywhere.",
    "Use `for nothing in its place` as a name.",
    f"{LONG[:-5]}.",
    "Start it, e.g. by `make demo`, and wait.",
    "See [the page](no-gain.md#no-and-not): it has a no-op.",
    "## What nobody reads, and not in its place",
    "| What | Who |\n|---|---|\n| What is not told | is never told |",
    "```text\nWhat is not told is never told.\n```",
    "<!-- generated: figures -->\nWhat is not told is never told.\n<!-- end -->",
    "**What it costs.** A millisecond.",
)


@pytest.fixture
def repository(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Create a repository with a document and a module that pass."""
    monkeypatch.setattr(check, "NOT_YET_CLEAN", ())
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "page.md").write_text("# A page\n\nThe package sends calls sooner.\n")
    (tmp_path / "server").mkdir()
    (tmp_path / "server" / "module.py").write_text('raise ValueError("it is no text")\n')
    return tmp_path.resolve()


def test_documents_and_messages_pass_the_prose_check() -> None:
    assert check.problems(ROOT) == []


def test_documents_that_are_not_yet_clean_exist() -> None:
    assert [name for name in check.NOT_YET_CLEAN if not (ROOT / name).exists()] == []


@pytest.mark.parametrize("sentence", PLANTED)
@pytest.mark.parametrize("before", ["", "A first sentence. ", "* ", "> "])
def test_bad_sentence_in_a_document_is_reported_with_its_line(repository: Path, sentence: str, before: str) -> None:
    (repository / "README.md").write_text(f"# Title\n\nA paragraph.\n\n{before}{sentence}\n")

    [problem] = check.problems(repository)

    assert problem.startswith("README.md:5: ")
    assert PLANTED[sentence] in problem
    assert problem.endswith(sentence.replace("*", ""))


@pytest.mark.parametrize("text", PLAIN)
def test_plain_sentences_questions_code_tables_and_headings_pass(repository: Path, text: str) -> None:
    (repository / "README.md").write_text(f"# Title\n\n{text}\n")

    assert check.problems(repository) == []


@pytest.mark.parametrize(
    "source",
    [
        'raise ValueError("what is not known is not taken")',
        'error = TypeError("it is not text, and not a number")',
        'def f(name):\n    raise RuntimeError(f"{name} does not go on, and has no place")',
        'def f(name):\n    text = f"{name} was made for nothing"\n    raise RuntimeError(text)',
        'class Own(ValueError): ...\nclass Owner(Own): ...\nraise Owner("it runs in its place")',
        'def own(message: str) -> ValueError: ...\nraise own("it runs in its place")',
        'raise print("fine", hint="leave it in its place")',
        'raise ValueError("fine" if x else "it runs in its place")',
        'commands.add_parser("run", help="what is not known is not run")',
        'log.warning("%s is not there, and it is not known", name)',
        'class Reason(Enum):\n    FIRST = "it runs in its place", "a line"',
    ],
)
def test_bad_message_or_hint_is_reported_with_its_file(repository: Path, source: str) -> None:
    (repository / "server" / "module.py").write_text(f"{source}\n")

    problems = check.problems(repository)

    assert problems
    assert all(problem.startswith("server/module.py:") for problem in problems)


@pytest.mark.parametrize(
    "source",
    [
        'name = "what is not known is not taken"',
        'say("it runs in its place")',
        'raise ValueError("it is no text", "no number")',
        'raise ValueError("is it not text, and not a number?")',
        'raise ValueError("give no name. It is not needed")',
    ],
)
def test_other_strings_of_sources_are_not_checked(repository: Path, source: str) -> None:
    (repository / "server" / "module.py").write_text(f"{source}\n")

    assert check.problems(repository) == []


def test_messages_of_the_sources_are_collected() -> None:
    texts = [passage.text for passage in check.message_passages(ROOT)]

    assert len(texts) > 1000
    assert "the engine pool is not running." in texts
    assert "call its start(), or use it inside `code`" in texts


def test_documents_not_yet_clean_are_skipped(repository: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (repository / "docs" / "page.md").write_text("What is sent early is taken later.\n")
    monkeypatch.setattr(check, "NOT_YET_CLEAN", ("docs/page.md",))

    assert check.problems(repository) == []


def test_prose_command_prints_the_problems(
    repository: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (repository / "docs" / "page.md").write_text("What is sent early is taken later.\n")
    monkeypatch.setattr(check.sys, "argv", ["check_prose.py", str(repository)])

    assert check.main() == 1
    assert "docs/page.md:1: begins with a clause as its subject" in capsys.readouterr().out
