"""Tests that the original runs when this package fails: in passes, tracers, schedulers or adapters."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import pytest
from langchain_core.runnables import Runnable, RunnableBranch, RunnableLambda, RunnablePassthrough
from support.own_leaves import Chat, Ledger
from support.small_chains import QUESTION, WAYS, call, two_steps

from teola_plugin import EnginePool, PassError, RegistrationError, accelerate
from teola_plugin.adapters.langchain import accelerate as entry
from teola_plugin.adapters.langchain import runnable as held
from teola_plugin.adapters.langchain.chat import ChatTeola
from teola_plugin.engines.fake import fake_engines
from teola_plugin.graph import Graph
from teola_plugin.passes import PassContext


@dataclass(frozen=True, slots=True)
class Broken:
    """A pass that fails."""

    error: type[BaseException]
    name: ClassVar[str] = "broken"

    def run(self, graph: Graph, context: PassContext) -> Graph:
        raise self.error("in a pass")


def plain_and_fast(chain: Runnable[Any, Any], **given: Any) -> tuple[Any, Any]:
    return chain.invoke(QUESTION), accelerate(chain, **given)


def broken(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


@pytest.mark.parametrize("way", WAYS)
def test_failing_pass_is_logged_and_the_original_runs(
    fakes: EnginePool, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fast = plain_and_fast(two_steps(ChatTeola(pool=fakes)), passes=[Broken(KeyError)])
    assert call(fast, way, expected=0)[0] == plain
    assert "planning failed; the original runs" in caplog.text and "'broken'" in caplog.text
    assert not fast.gains
    with pytest.raises(PassError):
        fast.explain()


def test_failing_pass_in_a_subplan_runs_the_original(fakes: EnginePool) -> None:
    steps = two_steps(ChatTeola(pool=fakes))
    chains = [
        RunnableBranch((lambda x: "question" in x, steps), RunnablePassthrough()),
        RunnableLambda(lambda x: steps),
        steps.with_fallbacks([steps]),
    ]
    for chain in chains:
        plain, fast = plain_and_fast(chain, passes=[Broken(ValueError)])
        assert fast.invoke(QUESTION) == plain


@pytest.mark.parametrize("where", ["AcceleratedRunnable._submit", "AcceleratedRunnable._plan", "new_query"])
@pytest.mark.parametrize("way", WAYS)
def test_internal_error_at_call_start_runs_the_original(
    fakes: EnginePool, way: str, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    plain, fast = plain_and_fast(two_steps(ChatTeola(pool=fakes)))
    monkeypatch.setattr(f"{held.__name__}.{where}", broken(ZeroDivisionError("ours")))
    assert call(fast, way, expected=0)[0] == plain
    assert "the original runs" in caplog.text and "please report it" in caplog.text
    assert "ZeroDivisionError: ours" in caplog.text


def test_internal_error_after_submission_leaves_no_live_query(fakes: EnginePool, monkeypatch: Any) -> None:
    plain, fast = plain_and_fast(two_steps(ChatTeola(pool=fakes)))
    monkeypatch.setattr(held, "SessionHandler", broken(TypeError("ours")))
    assert fast.invoke(QUESTION) == plain

    async def live() -> list[str]:
        return list(fakes.runtime._driver.runs)

    for _ in range(1000):
        if not fakes.runtime.loop.run(live()).result(5):
            return
        time.sleep(0.01)
    pytest.fail("the query is still live")


@pytest.mark.parametrize("where", ["calls", "_submit"])
@pytest.mark.parametrize("way", WAYS)
def test_internal_error_without_a_pool_runs_the_original(
    way: str, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    ledger = Ledger()
    plain, fast = plain_and_fast(two_steps(Chat(ledger=ledger)))
    ledger.calls.clear()
    target = type(fast._prefetch_plan) if where == "calls" else held.AcceleratedRunnable
    monkeypatch.setattr(target, where, broken(AttributeError("ours")))
    assert call(fast, way, expected=0)[0] == plain
    assert ledger.calls.total() == 2, "a call was made twice"
    assert "please report it" in caplog.text


@pytest.mark.parametrize("name", ["trace", "with_parts", "plan_prefetching"])
def test_failing_tracer_leaves_the_original_unchanged(
    fakes: EnginePool, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(entry, name, broken(RecursionError("ours")))
    plain, fast = plain_and_fast(two_steps(ChatTeola(pool=fakes)), shadow=1.0)
    assert fast.invoke(QUESTION) == plain and fast.plan(QUESTION) is None
    assert "please report it" in caplog.text
    assert "1 unchanged" in fast.explain() and "RecursionError" in fast.explain(details=True)


@pytest.mark.parametrize("error", [KeyboardInterrupt, asyncio.CancelledError, SystemExit])
def test_cancellation_and_interrupts_raised_in_a_pass_propagate(
    fakes: EnginePool, error: type[BaseException], monkeypatch: Any
) -> None:
    _, fast = plain_and_fast(two_steps(ChatTeola(pool=fakes)), passes=[Broken(error)])
    with pytest.raises(error):
        fast.invoke(QUESTION)
    monkeypatch.setattr(entry, "trace", broken(error()))
    with pytest.raises(error):
        accelerate(two_steps(ChatTeola(pool=fakes)))


def test_unknown_pass_raises_registration_error(fakes: EnginePool) -> None:
    with pytest.raises(RegistrationError):
        accelerate(two_steps(ChatTeola(pool=fakes)), passes=["no-such-pass"])


@pytest.mark.parametrize("method", ["admit", "engines.join", "post", "observe", "begin_subplan"])
@pytest.mark.parametrize("way", WAYS)
def test_internal_error_on_pool_thread_does_not_block_the_caller(
    way: str, method: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with EnginePool.local(fake_engines()) as pool:
        steps = two_steps(ChatTeola(pool=pool))
        plain, fast = plain_and_fast(steps | RunnableBranch((lambda x: "a" in x, steps), RunnablePassthrough()))
        owner, name = pool.runtime._driver, method
        if "." in method:
            owner, name = pool.runtime._driver.engines, method.partition(".")[2]
        monkeypatch.setattr(owner, name, broken(ZeroDivisionError("ours")))
        assert call(fast, way, expected=0)[0] == plain
        if method == "engines.join":
            assert "a call cannot join its query" in caplog.text and "please report it" in caplog.text
        monkeypatch.undo()
        assert fast.invoke(QUESTION) == plain, "the pool serves the next query"
