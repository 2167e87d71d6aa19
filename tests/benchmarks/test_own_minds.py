"""Guesses at a context are right about as often on the simulated applications' fakes as was counted on real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.likeliest import simulated
from examples.apps.advanced_rag import QUESTIONS
from examples.apps.engines import WORDS, answer
from examples.apps.prompts import ANSWER, EXPAND
from teola_plugin.requests.payloads import Prompt, Sampling

FORM = "expansions, reranked"
"""Of advanced RAG."""
AWAY = 0.1
"""From what was counted on real engines, at most: that differs by as much between texts."""
ASKED = "Which terms of the report change first?"
LLAMAINDEX = f"Generate 3 search queries, one on each line, related to:\nQuery: {ASKED}\nQueries:\n"


KEPT = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "likeliest.json").read_text())["cases"]


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return simulated(max(row["questions"] for row in KEPT if row["expansions"] == "fakes"))


def test_what_is_kept_is_what_they_do(found: list[dict[str, Any]]) -> None:
    kept = [row for row in KEPT if row["expansions"] == "fakes"]
    assert kept == [{"expansions": "fakes", "text": "report", **row} for row in found]


@pytest.mark.parametrize("share", ["first", "all"])
@pytest.mark.parametrize("guess", ["store's order", "the question's hits", "the question's hits, reranked"])
def test_guesses_are_right_as_often_as_on_real_engines(guess: str, share: str, found: list[dict[str, Any]]) -> None:
    real = [one[share] for one in KEPT if (one["form"], one["guess"]) == (FORM, guess) and one["expansions"] != "fakes"]
    [fake] = [one[share] for one in found if (one["form"], one["guess"]) == (FORM, guess)]
    assert min(real) - AWAY <= fake <= max(real) + AWAY


@pytest.mark.parametrize("prompt", [EXPAND.format(question=ASKED), LLAMAINDEX])
def test_more_questions_are_in_words_of_the_question(prompt: str) -> None:
    schema = None if prompt is LLAMAINDEX else json.dumps(QUESTIONS)
    said = answer(Prompt(text=prompt), Sampling(max_tokens=96, json_schema=schema))
    questions = said.splitlines() if schema is None else json.loads(said)
    assert len(questions) == len(set(questions)) == 3
    assert all(word in ASKED for question in questions for word in question.split())


def test_answers_are_not() -> None:
    said = answer(Prompt(text=ANSWER.format(question=ASKED, passage="lambs")), Sampling(max_tokens=64))
    assert len(said.split()) == 24 and set(said.split()) <= set(WORDS)
