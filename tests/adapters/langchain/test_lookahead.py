"""Tests of speculative calls for the possible choices of a branch, a router, a fallback or a retry."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import RouterRunnable, Runnable, RunnableBranch, RunnableLambda, RunnablePassthrough
from support.own_code import with_side_effect

from benchmarks.langchain.kits import pool_kit
from teola_plugin import accelerate
from teola_plugin.engines import profiles
from teola_plugin.observe.spans import QueryTrace, Span

Chain = Runnable[Any, Any]
JUDGE = ChatPromptTemplate.from_template("Is this one allowed? Say 'yes' or 'no'.\n{question}")
REWRITE = ChatPromptTemplate.from_template("Formulate an improved question: {question}")
ASK = ChatPromptTemplate.from_template("{context}\n\nQuestion: {question}")
QUESTIONS = [{"question": f"what about {word}?"} for word in ("oats", "ivy", "lambs", "walls", "lime", "moss")]


@pytest.fixture(scope="module")
def kit() -> Iterator[Any]:
    made = pool_kit(profiles.scaled(profiles.rtx3090(), 0.05))
    yield made
    made.pool.close()


def judged(kit: Any, choosing: Chain) -> Chain:
    """Return a chain in which the model judges, and a branch follows its verdict."""
    return RunnablePassthrough.assign(verdict=JUDGE | kit.chat(4) | StrOutputParser()) | choosing


def yes(given: dict[str, Any]) -> bool:
    return bool(given["verdict"] == "yes")


def rewritten(kit: Any) -> Chain:
    return REWRITE | kit.chat(8) | StrOutputParser()


def answered(kit: Any) -> Chain:
    context = (lambda x: x["question"]) | kit.store.as_retriever(search_kwargs={"k": 2}) | (lambda found: str(found))  # type: ignore[operator]
    return RunnablePassthrough.assign(context=context) | ASK | kit.chat(4) | StrOutputParser()


CHOICES = {
    "one arm asks": lambda kit: RunnableBranch((yes, rewritten(kit)), lambda x: "no"),
    "both arms ask": lambda kit: RunnableBranch((yes, rewritten(kit)), answered(kit)),
    "router": lambda kit: (
        {"key": lambda x: x["verdict"], "input": lambda x: x}
        | RouterRunnable({"yes": rewritten(kit), "no": RunnableLambda(lambda x: "no")})
    ),
    "primary": lambda kit: answered(kit).with_fallbacks([RunnableLambda(lambda x: "fallback")]),
    "retried": lambda kit: answered(kit).with_retry(),
}


def begun_early(trace: QueryTrace) -> list[Span]:
    return [span for span in trace.spans if ".ahead." in f".{span.primitive}" and span.engine]


def answer_of(kit: Any, chain: Chain, given: Any, way: str) -> Any:
    kit.fresh()
    if way == "ainvoke":
        return asyncio.run(chain.ainvoke(given))
    return "".join(chain.stream(given)) if way == "stream" else chain.invoke(given)


@pytest.mark.parametrize("way", ["invoke", "ainvoke", "stream"])
@pytest.mark.parametrize("name", CHOICES)
def test_branch_prefetching_gives_the_answers_of_the_original(kit: Any, name: str, way: str) -> None:
    chain = judged(kit, CHOICES[name](kit))
    fast = accelerate(chain)
    plain = [answer_of(kit, chain, given, way) for given in QUESTIONS]
    assert [answer_of(kit, fast, given, way) for given in QUESTIONS] == plain
    assert name in ("primary", "retried") or len(set(map(len, plain))) > 1, "both are chosen at times"


@pytest.mark.parametrize("name", ["primary", "retried"])
def test_certain_calls_overlap_the_branch_condition_and_run_once(kit: Any, name: str) -> None:
    fast = accelerate(judged(kit, CHOICES[name](kit)))
    kit.fresh()
    fast.invoke(QUESTIONS[0])
    trace = fast.last_trace()
    verdict = next(span for span in trace.spans if span.primitive == "verdict.model.prefilling")
    early = begun_early(trace)
    assert early and min(span.queued for span in early) < verdict.done
    assert trace.wasted() == (0, 0)
    prefills = [span for span in trace.spans if span.kind in ("PREFILLING", "FULL_PREFILLING") and span.tokens]
    made = [span for span in prefills if span.primitive != verdict.primitive and span.replica]
    assert len({span.batch for span in made}) <= 1, "one request serves the early work, the part, and the plain call"


@pytest.mark.parametrize("name", ["one arm asks", "router"])
def test_speculative_call_of_an_arm_is_wasted_if_not_chosen(kit: Any, name: str) -> None:
    chain = judged(kit, CHOICES[name](kit))
    fast = accelerate(chain)
    for given in QUESTIONS:
        kit.fresh()
        chosen = fast.invoke(given) != "no"
        trace = fast.last_trace()
        assert [span.kind for span in begun_early(trace)][:1] == ["PREFILLING"]
        assert (trace.wasted()[0] == 0) == chosen, given


def test_no_llm_call_is_speculative_if_both_arms_need_one(kit: Any) -> None:
    fast = accelerate(judged(kit, CHOICES["both arms ask"](kit)))
    kit.fresh()
    fast.invoke(QUESTIONS[0])
    kinds = {span.kind for span in begun_early(fast.last_trace())}
    assert kinds == {"EMBEDDING", "SEARCHING"}


@pytest.mark.parametrize("options", [{"speculate": "off"}, {"passes": ()}])
def test_options_turn_off_speculative_calls_of_arms(kit: Any, options: dict[str, Any]) -> None:
    fast = accelerate(judged(kit, CHOICES["one arm asks"](kit)), **options)
    kit.fresh()
    fast.invoke(QUESTIONS[0])
    assert begun_early(fast.last_trace()) == []


def test_certain_calls_are_prefetched_with_speculation_off(kit: Any) -> None:
    fast = accelerate(judged(kit, CHOICES["primary"](kit)), speculate="off")
    kit.fresh()
    fast.invoke(QUESTIONS[0])
    assert begun_early(fast.last_trace()) and fast.last_trace().wasted() == (0, 0)


def test_user_code_of_an_arm_is_not_run_speculatively(kit: Any) -> None:
    calls: list[str] = []

    def counted(text: str) -> dict[str, str]:
        calls.append(text)
        return {"question": text}

    arm = rewritten(kit) | with_side_effect(counted) | REWRITE | kit.chat(4) | StrOutputParser()
    chain = judged(kit, RunnableBranch((yes, arm), lambda x: "no"))
    fast = accelerate(chain)
    for given in QUESTIONS:
        calls.clear()
        plain = answer_of(kit, chain, given, "invoke")
        once = list(calls)
        assert answer_of(kit, fast, given, "invoke") == plain
        assert calls == once * 2
        assert sum(span.kind == "PREFILLING" for span in begun_early(fast.last_trace())) == 1


def test_failing_branch_condition_raises_its_own_error(kit: Any) -> None:
    def broken(given: Any) -> bool:
        raise KeyError("mine")

    fast = accelerate(judged(kit, RunnableBranch((broken, rewritten(kit)), lambda x: "no")))
    with pytest.raises(KeyError, match="mine"):
        fast.invoke(QUESTIONS[0])
