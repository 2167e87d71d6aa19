"""Tests of the bundled models: their training data, loading, and what they can do. (`evaluate` gives all figures.)"""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from examples.demo_model import evaluate, facts, prose, tasks
from examples.demo_model.facts import Fact
from examples.demo_model.handwritten import ASKED, HELD_OUT
from teola_plugin.engines import model_cache as bundled
from teola_plugin.errors import EngineUnavailable
from teola_plugin.graph import PrimitiveKind
from teola_plugin.requests.payloads import Done, Generate, Message, Prompt, Request, Sampling

MB = 1_000_000


def made(seed: int, count: int = 60) -> list[tasks.Example]:
    return list(itertools.islice(tasks.examples(seed), count))


def test_data_depends_on_the_seed_alone() -> None:
    assert made(5) == made(5)
    assert made(5) != made(6)


def test_held_out_facts_use_other_names() -> None:
    trained, held = ({f.subject for p in facts.document(random.Random(s), 400) for f in p} for s in (1, evaluate.SEED))
    assert len(trained & held) < 0.02 * len(held)


@pytest.mark.parametrize("document", [facts.document, facts.alike_document, facts.made_up_document])
def test_statement_and_answer_contain_every_fact(document: Callable[..., list[list[Fact]]]) -> None:
    for fact in (f for paragraph in document(random.Random(7), 60) for f in paragraph):
        assert fact.subject in fact.statement and fact.value in fact.statement
        assert fact.value in fact.answer[fact.answer.index(fact.subject) + len(fact.subject) :]
        assert all(fact.subject in question for question in fact.questions)


def test_answer_is_in_the_prompt_or_unknown() -> None:
    rng = random.Random(11)
    for example in (tasks.qa_facts(rng) for _ in range(200)):
        assert (example.key in example.user) and (bool(example.key) == (example.answer != tasks.UNKNOWN))


def test_passage_contains_the_sentence_of_its_question() -> None:
    rng = random.Random(13)
    for found in (prose.passage(rng, 500) for _ in range(100)):
        assert found.sentence in found.text and found.question.endswith("?")
        assert found.sentence not in prose.foreign_passage(rng, found, 500)


def test_no_handwritten_question_is_trained_on() -> None:
    assert len(ASKED) == len(HELD_OUT) == 40
    assert not any(question in example.user for example in made(1, 400) for question in HELD_OUT)


@pytest.mark.parametrize("example", ASKED, ids=lambda example: f"{example.topic}-{example.question[:20]}")
def test_handwritten_answers_are_in_their_passages(example: object) -> None:
    assert isinstance(example, type(ASKED[0]))
    assert example.expected in prose.topic(example.topic)
    assert example.expected in evaluate.passage_for(example)


def test_bundled_models_stay_below_their_size_limits() -> None:
    assert sum(f.stat().st_size for f in bundled.llm_folder().iterdir()) < 25 * MB
    assert sum(f.stat().st_size for f in bundled.reranker_folder().iterdir()) < 15 * MB


def test_missing_bundled_model_raises_with_its_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bundled, "FOLDER", tmp_path)
    with pytest.raises(EngineUnavailable, match="demo-llm"):
        bundled.llm_folder()


@pytest.mark.models
def test_reranker_ranks_the_passage_with_the_answer_first() -> None:
    """Over 200 it is 0.98."""
    assert evaluate.reranked(bundled.reranker_folder(), 40) >= 0.9


@pytest.mark.models
def test_language_model_scores_stay_above_their_limits() -> None:
    """Well below what `evaluate` gives over 200, so that a sample passes."""
    generate = evaluate.generator(bundled.llm_folder())
    judged, tools = evaluate.held_out(tasks.judge, 20), evaluate.held_out(tasks.tool_call, 20)
    questions = evaluate.held_out(partial(tasks.qa_facts, subjects=4), 20)
    assert evaluate.contained(questions, generate(questions)) >= 0.6
    assert evaluate.contained(judged, generate(judged)) >= 0.8
    assert evaluate.right_tools(tools, generate(tools)) >= 0.6


@pytest.mark.skipif(not os.environ.get("TEOLA_TEST_LONG"), reason="starts a vLLM of its own (make test-all)")
@pytest.mark.vllm
@pytest.mark.models
async def test_vllm_and_transformers_answer_alike() -> None:
    from teola_plugin.engines.vllm import VllmEngine

    examples = evaluate.written(3) + evaluate.held_out(tasks.expand, 3) + evaluate.held_out(tasks.tool_call, 2)
    expected = evaluate.generator(bundled.llm_folder(), batch=1, tokens=48)(examples)
    engine = VllmEngine("bundled", bundled.llm_folder(), cores="0")
    await engine.start()
    try:
        for number, (example, text) in enumerate(zip(examples, expected, strict=True)):
            messages = tuple(Message(m["role"], m["content"]) for m in evaluate.messages(example))
            payload = Generate(Prompt(messages), Sampling(max_tokens=48, temperature=0.0))
            request = Request(f"r{number}", PrimitiveKind.PREFILLING, payload)
            (done,) = [result async for result in engine.execute([request]) if isinstance(result, Done)]
            assert done.value.text == text
    finally:
        await engine.stop()
