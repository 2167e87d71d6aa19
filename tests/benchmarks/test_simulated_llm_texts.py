"""Tests of the fake LLM of the simulated applications: its texts have the stated words."""

from __future__ import annotations

import json

import pytest

from examples.apps.advanced_rag import QUESTIONS
from examples.apps.engines import WORDS, answer
from examples.apps.prompts import ANSWER, EXPAND
from teola_plugin.requests.payloads import Prompt, Sampling

ASKED = "Which terms of the report change first?"
LLAMAINDEX = f"Generate 3 search queries, one on each line, related to:\nQuery: {ASKED}\nQueries:\n"


@pytest.mark.parametrize("prompt", [EXPAND.format(question=ASKED), LLAMAINDEX])
def test_expanded_questions_use_words_of_the_question(prompt: str) -> None:
    schema = None if prompt is LLAMAINDEX else json.dumps(QUESTIONS)
    text = answer(Prompt(text=prompt), Sampling(max_tokens=96, json_schema=schema))
    questions = text.splitlines() if schema is None else json.loads(text)
    assert len(questions) == len(set(questions)) == 3
    assert all(word in ASKED for question in questions for word in question.split())


def test_answers_use_words_of_their_own() -> None:
    text = answer(Prompt(text=ANSWER.format(question=ASKED, passage="lambs")), Sampling(max_tokens=64))
    assert len(text.split()) == 24 and set(text.split()) <= set(WORDS)
