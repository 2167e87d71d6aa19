"""Tests of answers that copy the prompt, on engines that verify drafts: texts, a bound, and apps in virtual time."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest

from benchmarks.rag import apps, bound, drafted, texts
from benchmarks.single_query import APPS
from teola_plugin import EnginePool
from teola_plugin.engines import profiles
from teola_plugin.engines.fake import split_tokens
from teola_plugin.runtime.virtual_time import run_virtual

PASSAGES = apps.document(chunks=2).split("\n\n")
START = apps.HEAD.format(question=apps.QUESTION) + PASSAGES[0] + "\n\nAnswer:"


def refinement(answer: str, passage: str = PASSAGES[1]) -> str:
    better = f"\n\nAn answer without this passage: {answer}\n\nBetter answer:"
    return apps.HEAD.format(question=apps.QUESTION) + passage + better


def answer(prompt: str, share: float, tokens: int = 60) -> str:
    return texts.written(prompt, tokens, share, apps.WORDS)


def covered(text: str, sources: list[str]) -> int:
    """Return the words that are part of a run of three or more words from one of the sources."""
    words, found = text.split(), set()
    for i in range(len(words) - 2):
        if any(" ".join(words[i : i + 3]) in source for source in sources):
            found |= {i, i + 1, i + 2}
    return len(found)


# ------------------------------------------------------------ texts


@pytest.mark.parametrize("share", texts.SHARES)
@pytest.mark.parametrize("tokens", [10, 60, 200])
def test_answers_copy_the_configured_share(share: float, tokens: int) -> None:
    first = answer(START, share, tokens)
    second = answer(refinement(first), share, tokens)
    for text, sources in ((first, [PASSAGES[0]]), (second, [first, PASSAGES[1]])):
        assert len(split_tokens(text)) == tokens
        few = 2 * len(texts.recorded_runs("answer"))  # runs of two words, and what stands there by chance
        assert abs(covered(text, sources) - share * tokens) <= max(4, 0.1 * few)


@pytest.mark.parametrize("share", texts.SHARES)
def test_new_tokens_depend_on_the_whole_context(share: float) -> None:
    before = answer(START, share)
    given = {refinement(before), refinement(before, PASSAGES[0]), refinement(before + " more")}
    new = {frozenset(set(answer(prompt, share).split()) - set(prompt.split())) for prompt in given}
    assert len(new) == 3


def test_copied_runs_match_the_recorded_outputs() -> None:
    outputs = json.loads(texts.RECORDED.read_text())["outputs"]
    assert len(outputs) == 60 and all(length >= 2 for kind in ("answer", "refine") for _, length in kinds(kind))
    assert {source for source, _ in kinds("refine")} == {"answer", "passage", "question"}
    assert sum(length for _, length in kinds("answer")) / len(kinds("answer")) == pytest.approx(14.3, abs=0.1)


def kinds(kind: str) -> tuple[texts.Run, ...]:
    return texts.recorded_runs(kind)


# ------------------------------------------------------------ the bound by hand


@pytest.mark.parametrize(
    ("text", "known", "least", "steps"),
    [
        ("a b c d", "", 1, [(0, 1)] * 4),
        ("a b c d e", "a b c d e", 1, [(0, 1), (4, 4)]),
        ("a b c d e", "b c x d e", 1, [(0, 1), (2, 3), (1, 1)]),
        ("a b c d e", "b c x d e", 2, [(0, 1), (2, 3), (0, 1)]),
        ("a b c d e f g", "b c d e f g", 1, [(0, 1), (4, 5), (1, 1)]),
        ("a b a b a b", "", 1, [(0, 1), (0, 1), (4, 4)]),
        # the longest draft at first would end in the middle of the next run
        ("x p q r s t y", "p q r . s t", 2, [(0, 1), (2, 3), (2, 3)]),
    ],
)
def test_lower_bound_counts_the_fewest_steps(text: str, known: str, least: int, steps: list[tuple[int, int]]) -> None:
    found = bound.steps(text.split(), known.split(), 4, least)
    assert sum(new for _, new in found) == len(text.split())
    assert len(found) == len(steps) and found == steps


# ------------------------------------------------------------ the apps, in virtual time


@cache
def ran(name: str, tokens: int, share: float) -> dict[str, Any]:
    return drafted.exact(name, APPS[name][0], tokens, share, profiles.rtx3090())


async def _least(name: str, tokens: int, share: float, least: int, machine: Any) -> float:
    bench = apps.fake_pool(machine, EnginePool.on_this_loop, share)
    async with bench.pool:
        make, of = APPS[name]
        await make(bench, tokens).ainvoke({"question": apps.QUESTION, "document": apps.document()})
        return of(bound.Machine(bench.pool.profiles, least), bench.observed)


def least(name: str, tokens: int, share: float, shortest: int = 1, *, drafts: bool = True) -> float:
    machine = profiles.rtx3090()
    return run_virtual(_least(name, tokens, share, shortest, profiles.drafting(machine) if drafts else machine))


@pytest.mark.parametrize("share", [0.0, 0.6, 0.9])
@pytest.mark.parametrize("name", ["advanced/sequential", "naive"])
def test_accelerated_time_lies_between_bound_and_original(name: str, share: float) -> None:
    found = ran(name, 60, share)
    assert least(name, 60, share) <= least(name, 60, share, 2) <= found["accelerated_s"] + 1e-3
    assert found["accelerated_s"] <= found["plain_same_engine_s"]
    assert found["later_ms"] <= 0, "nor does the first token come later than without"
    if share:
        assert found["plain_same_engine_s"] < 0.95 * found["plain_s"]
        assert found["accelerated_s"] < 0.95 * found["accelerated_undrafted_s"]


@pytest.mark.parametrize("name", ["advanced/sequential", "naive"])
def test_drafts_cost_no_time_if_no_text_is_copied(name: str) -> None:
    found = ran(name, 60, 0.0)
    assert found["accelerated_s"] <= 1.005 * found["accelerated_undrafted_s"]
    few = least(name, 60, 0.0, 2) / least(name, 60, 0.0, drafts=False)
    assert 0.98 < few <= 1.0, "but for two tokens that stand somewhere by chance"


def test_committed_result_has_all_shares_and_undrafted_headline() -> None:
    found = json.loads((texts.RECORDED.parents[1] / "results" / "single_query.json").read_text())
    rows = found["drafts"]["rows"]
    cases = {(row["app"], row["answer_tokens"]) for row in rows}
    assert {(row["app"], row["answer_tokens"], row["copied"]) for row in rows} == {
        (*case, share) for case in cases for share in texts.SHARES
    }
    assert found["speedup"] == found["cases"][0]["speedup"], "what stands at the top has no drafts"
    assert found["drafts"]["first_token_never_later"] and all(row["same_answers"] for row in rows)
    assert found["drafts"]["nothing_copied_worst"] > 0.99
