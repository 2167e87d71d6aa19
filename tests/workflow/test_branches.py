"""Tests of branches whose searches start before their condition is known. The answer is that of the sequence."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from teola_plugin import EnginePool, QueryError
from teola_plugin.engines.fake import FakeEmbedder, FakeLLM, FakeStore, FakeWebSearch
from teola_plugin.engines.profiles import rtx3090, scaled, web_search
from teola_plugin.requests.payloads import Hit
from teola_plugin.workflow import (
    Branch,
    Condition,
    Function,
    Generation,
    Indexing,
    Map,
    Searching,
    WebSearch,
    Workflow,
)

PROFILES = scaled(rtx3090(), 0.3)
WEB_S = 0.1


class Kit:
    """A pool whose model judges by the question, and what the web was asked."""

    def __init__(self, *, own: bool = True) -> None:
        self.searches: Counter[str] = Counter()
        self.fails = 0
        web = FakeWebSearch("web", replace(web_search(WEB_S), dedicated=own), answer=self._hits)
        engines = [FakeLLM("llm", PROFILES["llm"], self._said), FakeEmbedder("embedder"), FakeStore("store"), web]
        self.pool = EnginePool.local(engines).start()

    def _said(self, prompt: Any, sampling: Any) -> str:
        text = prompt.flat()
        if "verdict" in text:
            return ("yes" if "oats" in text else "no") + ", as it seems to me after some thought about it"
        return f"said {len(text)}"

    def _hits(self, query: str, k: int) -> list[Hit]:
        self.searches[query] += 1
        if self.fails:
            self.fails -= 1
            raise ValueError("the web is down")
        return [Hit(query, f"about {query}", {"source": query}, 1.0)]


@pytest.fixture
def kit() -> Iterator[Kit]:
    made = Kit()
    yield made
    made.pool.close()


def judged(branch: Any, condition: Any = None) -> Workflow:
    verdict = Generation("verdict", "verdict on {question}", max_tokens=24) >> Condition("needed", value="verdict")
    return Workflow("w", (condition or verdict) >> branch >> Generation("answer", "{question}: {found}", max_tokens=4))


def searched(**more: Any) -> Workflow:
    return judged(Branch("found", condition="needed", then=WebSearch("web"), **more))


def search_starts(result: Any, part: str = "web") -> list[float]:
    """Return when each search was requested, in seconds after the condition was known."""
    spans = result.trace.spans
    known = next(span.done for span in spans if span.primitive.endswith("needed"))
    return [span.queued - known for span in spans if span.primitive.endswith(part) and span.engine]


def test_branch_search_starts_before_its_condition_and_runs_once(kit: Kit) -> None:
    result = searched().deploy(kit.pool).run({"question": "oats?"})
    assert [hit.id for hit in result.outputs["found"]] == ["oats?"] and kit.searches == {"oats?": 1}
    assert len(search_starts(result)) == 1 and search_starts(result)[0] < 0
    assert {span.outcome for span in result.trace.spans if span.engine == "web"} == {"done"}


@pytest.mark.parametrize("speculate", ["auto", "off"])
@pytest.mark.parametrize("question", ["oats?", "ivy?"])
def test_speculative_search_gives_the_sequential_answer(kit: Kit, question: str, speculate: Any) -> None:
    plain = searched().deploy(kit.pool, passes=(), speculate="off").run({"question": question})
    result = searched().deploy(kit.pool, speculate=speculate).run({"question": question})
    assert (result.answer, result.outputs) == (plain.answer, plain.outputs)


def test_answer_does_not_wait_for_an_unneeded_search(kit: Kit) -> None:
    """The search is abandoned."""
    kit.pool.engine("web")._profile = replace(web_search(60.0), dedicated=True)  # type: ignore[attr-defined]
    began = time.perf_counter()
    result = searched().deploy(kit.pool).run({"question": "ivy?"})
    assert time.perf_counter() - began < 50 and result.outputs["found"] is None
    assert {span.outcome for span in result.trace.spans if span.engine == "web"} <= {"cancelled", "wasted"}


@pytest.mark.parametrize("question", ["oats?", "ivy?"])
def test_failed_speculative_search_does_not_fail_the_query(kit: Kit, question: str) -> None:
    """If the search is needed after all, it is made as without speculation."""
    kit.pool.engine("web")._profile = replace(web_search(0.0), dedicated=True)  # type: ignore[attr-defined]
    kit.fails = 1
    result = searched().deploy(kit.pool).run({"question": question})
    assert (result.outputs["found"] is None) == (question == "ivy?")


def test_persistent_search_failure_raises_the_same_error(kit: Kit) -> None:
    kit.fails = 1000
    with pytest.raises(QueryError) as plain:
        searched().deploy(kit.pool, speculate="off").run({"question": "oats?"})
    with pytest.raises(QueryError) as early:
        searched().deploy(kit.pool).run({"question": "oats?"})
    assert type(early.value.__cause__) is type(plain.value.__cause__)
    assert searched().deploy(kit.pool).run({"question": "ivy?"}).outputs["found"] is None


@pytest.mark.parametrize(
    "given", [{"speculate": "off"}, {"passes": ()}, {"passes": (), "speculate": "all"}], ids=["off", "none", "all"]
)
def test_search_is_not_speculative_if_passes_or_speculation_are_off(kit: Kit, given: dict[str, Any]) -> None:
    result = searched().deploy(kit.pool, **given).run({"question": "oats?"})
    assert [at >= 0 for at in search_starts(result)] == [True]
    kit.searches.clear()
    searched().deploy(kit.pool, **given).run({"question": "ivy?"})
    assert not kit.searches


def test_only_engines_declared_own_are_searched_speculatively() -> None:
    kit = Kit(own=False)
    try:
        result = searched().deploy(kit.pool).run({"question": "oats?"})
        assert [at >= 0 for at in search_starts(result)] == [True]
        searched().deploy(kit.pool).run({"question": "ivy?"})
        assert kit.searches == {"oats?": 1}
        result = searched().deploy(kit.pool, speculate="all").run({"question": "oats?"})
        assert [at < 0 for at in search_starts(result)] == [True]
    finally:
        kit.pool.close()


def user_code(question: str) -> str:
    return question


ARMS: dict[str, Callable[[], Workflow]] = {
    "writes an answer": lambda: judged(
        Branch("found", condition="needed", then=WebSearch("web") >> Generation("said", "{web}", max_tokens=2))
    ),
    "code of one's own": lambda: judged(
        Branch("found", condition="needed", then=Function("own", user_code) >> WebSearch("web"))
    ),
    "writes rows": lambda: judged(Branch("found", condition="needed", then=Indexing("rows") >> WebSearch("web"))),
}


@pytest.mark.parametrize("name", ARMS)
def test_arm_with_more_than_a_search_starts_when_taken(kit: Kit, name: str) -> None:
    given = {"question": "oats?", "documents": ["Oats grow."]}
    app = ARMS[name]().deploy(kit.pool)
    inputs = given if name == "writes rows" else {"question": "oats?"}
    assert all(at >= 0 for at in search_starts(app.run(inputs))) and search_starts(app.run(inputs))


def test_search_is_not_speculative_if_the_choice_is_known(kit: Kit) -> None:
    flow = judged(
        Branch("found", condition="needed", then=WebSearch("web")),
        Condition("needed", value="question", test=lambda question: "oats" in question),
    )
    flow.deploy(kit.pool).run({"question": "ivy?"})
    assert not kit.searches


def test_searches_of_both_arms_start_before_the_choice(kit: Kit) -> None:
    """A store of the pool's on one way, the web on the other; what is written before is found."""
    flow = Indexing("rows") >> Generation("verdict", "verdict on {question}", max_tokens=24)
    flow = flow >> Condition("needed", value="verdict")
    branch = Branch("found", condition="needed", then=Searching("kept", k=1), otherwise=WebSearch("web"))
    whole = Workflow("w", flow >> branch >> Generation("answer", "{question}: {found}", max_tokens=4))
    for question, expected in (("oats?", "Oats grow."), ("ivy?", "about ivy?")):
        given = {"question": question, "documents": ["Oats grow."]}
        plain = whole.deploy(kit.pool, speculate="off").run(given)
        result = whole.deploy(kit.pool).run(given)
        assert [hit.text for hit in result.outputs["found"]] == [expected]
        assert result.answer == plain.answer
        assert search_starts(result)[0] < 0


@pytest.mark.parametrize("question", ["oats?", "ivy?"])
def test_arm_that_writes_starts_only_when_taken(kit: Kit, question: str) -> None:
    """A branch with side effects must not start before it is taken."""
    written = Indexing("rows") >> Searching("kept", k=1)
    app = judged(Branch("found", condition="needed", then=WebSearch("web"), otherwise=written)).deploy(kit.pool)
    result = app.run({"question": question, "documents": ["Ivy climbs."]})
    assert result.outputs["found"][0].text == ("about oats?" if question == "oats?" else "Ivy climbs.")
    assert asyncio.run(kit.pool.engine("store").collections()) == ["documents"] * (question == "ivy?")  # type: ignore[attr-defined]


def test_branches_inside_a_map_choose_an_arm_per_item(kit: Kit) -> None:
    each = Generation("verdict", "verdict on {item}", max_tokens=24) >> Condition("needed", value="verdict")
    each = each >> Branch("found", condition="needed", then=WebSearch("web", query="item"))
    flow = Map("all", over="questions", flow=each) >> Function("texts", lambda all: [bool(one) for one in all])
    result = Workflow("w", flow).deploy(kit.pool).run({"questions": ["oats", "ivy", "more oats"]})
    assert result.answer == [True, False, True] and kit.searches["ivy"] <= 1
    assert kit.searches["oats"] == kit.searches["more oats"] == 1


def test_concurrent_queries_are_right_despite_a_cancelled_one(kit: Kit) -> None:
    app = searched().deploy(kit.pool)

    async def crowd() -> list[Any]:
        lost = asyncio.create_task(app.arun({"question": "lost oats?"}))
        await asyncio.sleep(0.005)
        lost.cancel()
        questions = [f"{n} {'oats' if n % 2 else 'ivy'}" for n in range(12)]
        return await asyncio.gather(*(app.arun({"question": one}) for one in questions))

    found = asyncio.run(crowd())
    assert [bool(one.outputs["found"]) for one in found] == [bool(n % 2) for n in range(12)]


def test_explain_names_the_speculative_search(kit: Kit) -> None:
    explanation = searched().deploy(kit.pool).explain({"question": "oats?"})
    assert "web before it is known which way found takes" in explanation
    assert "before it is known" not in searched().deploy(kit.pool, speculate="off").explain({"question": "oats?"})
