"""Tests of tenant, app, weight and deadline of a workflow's run: they hold for every call of its steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from differential.llamaindex.workflows import agents, flows
from differential.llamaindex.workflows.stage import Stage, call, do, stage
from llama_index.core.workflow import Context, StartEvent, StopEvent, Workflow, step
from support.recording import Arrival, arrivals

from teola_plugin import accelerate
from teola_plugin.errors import QueryTimeout, RegistrationError

pytestmark = pytest.mark.filterwarnings("ignore:WorkflowHandler:DeprecationWarning")
ASKED: dict[str, Any] = {"about": "what grows"}


@pytest.fixture(scope="module")
def workflow_stage() -> Iterator[Stage]:
    with stage() as made:
        yield made


@pytest.fixture(scope="module")
def all_seen(workflow_stage: Stage) -> list[Arrival]:
    return arrivals(workflow_stage.pool)


@pytest.fixture
def seen(all_seen: list[Arrival]) -> list[Arrival]:
    all_seen.clear()
    return all_seen


def run(workflow: Any, **given: Any) -> Any:
    async def played() -> Any:
        return await workflow.run(**(given or ASKED))

    return asyncio.run(played())


def talk(*rounds: Any) -> dict[str, Any]:
    return {"user_msg": do(*rounds)}


TOOLS = talk([call("look", at="sea"), call("look", at="ivory tower")])
RUNS: dict[str, tuple[Any, dict[str, Any]]] = {
    "rag": (flows.Rag, ASKED),
    "workers": (flows.FanOut, ASKED),
    "nested": (flows.Outer, ASKED),
    "a thread": (flows.Sync, ASKED),
    "resources": (lambda s: flows.given(s)(), ASKED),
    "engines": (lambda s: flows.Engines(s, accelerate), ASKED),
    "an agent": (agents.function, TOOLS),
    "engines as tools": (lambda s: agents.function(s, *agents.engines(s)), talk([call("farm", input="oats")])),
    "a team": (agents.team, TOOLS),
}


@pytest.mark.parametrize("name", RUNS)
def test_request_context_of_a_workflow_reaches_the_engines(
    workflow_stage: Stage, seen: list[Arrival], name: str
) -> None:
    make, given = RUNS[name]
    fast = accelerate(make(workflow_stage), pool=workflow_stage.pool, app="mine")
    run(fast.with_request_context(tenant="acme", weight=2.5), **given)
    assert seen and {(one.tenant, one.app, one.weight) for one in seen} == {("acme", "mine", 2.5)}
    seen.clear()
    run(fast, **given)
    assert {(one.tenant, one.app, one.weight) for one in seen} == {("", "mine", 1.0)}


@pytest.mark.parametrize("name", ["rag", "an agent"])
def test_request_context_reaches_engines_if_no_query_can_start(
    workflow_stage: Stage, seen: list[Arrival], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError

    make, given = RUNS[name]
    fast = accelerate(make(workflow_stage), pool=workflow_stage.pool, app="mine")
    monkeypatch.setattr(workflow_stage.pool.runtime, "watch", broken)
    run(fast.with_request_context(tenant="acme", weight=2.5), **given)
    assert {(one.tenant, one.app, one.weight) for one in seen} == {("acme", "mine", 2.5)}


def test_nested_workflow_inherits_the_request_context(workflow_stage: Stage, seen: list[Arrival]) -> None:
    outer = accelerate(
        flows.Outer(workflow_stage, accelerate(flows.Rag(workflow_stage), pool=workflow_stage.pool)),
        pool=workflow_stage.pool,
        app="outer",
    )
    run(outer.with_request_context(tenant="acme"))
    assert {(one.tenant, one.app) for one in seen} == {("acme", "outer")}


def test_nested_workflow_with_own_tenant_is_a_separate_query(workflow_stage: Stage, seen: list[Arrival]) -> None:
    inner = accelerate(flows.Rag(workflow_stage), pool=workflow_stage.pool, app="inner").with_request_context(
        tenant="zoo"
    )
    outer = accelerate(flows.Outer(workflow_stage, inner), pool=workflow_stage.pool, app="outer").with_request_context(
        tenant="acme"
    )
    run(outer)
    assert {(one.tenant, one.app) for one in seen} == {("acme", "outer"), ("zoo", "inner")}
    assert inner.last_trace().query_id != outer.last_trace().query_id


# ------------------------------------------------------------ deadlines


class Own(Workflow):
    """Code of the user's alone, which catches what it can."""

    def __init__(self, cancelled: list[str]) -> None:
        super().__init__()
        self.begun, self.cancelled = list[str](), cancelled

    @step
    async def only(self, ctx: Context, ev: StartEvent) -> StopEvent:
        self.begun.append("step")
        try:
            await asyncio.sleep(ev.get("takes", 30))
        except asyncio.CancelledError:
            self.cancelled.append("step")
            raise
        return StopEvent(result="done")


async def timed(fast: Any, **given: Any) -> tuple[float, list[str]]:
    """Return the seconds until `QueryTimeout`, and the events until then."""
    begun, handler = time.monotonic(), fast.run(**given)
    event_names = [type(event).__name__ async for event in handler.stream_events()]
    with pytest.raises(QueryTimeout, match="did not end before its deadline"):
        await handler
    assert isinstance(handler.exception(), QueryTimeout) and handler.is_done()
    return time.monotonic() - begun, event_names


@pytest.mark.parametrize("pooled", [True, False])
def test_deadline_interrupts_steps_of_user_code(workflow_stage: Stage, pooled: bool) -> None:
    own = Own([])
    fast = accelerate(own, pool=workflow_stage.pool if pooled else None).with_request_context(deadline_s=0.1)
    seconds, event_names = asyncio.run(timed(fast))
    assert seconds < 25 and own.cancelled == own.begun and event_names == ["WorkflowCancelledEvent"]
    if pooled:
        assert fast.last_trace().outcome == "timeout"


def test_deadline_interrupts_an_agent_that_waits_for_a_tool(workflow_stage: Stage) -> None:
    """An agent makes an answer of what its tools raise: it gets none, all the same."""
    fast = accelerate(agents.function(workflow_stage), pool=workflow_stage.pool).with_request_context(deadline_s=0.15)
    seconds, event_names = asyncio.run(timed(fast, **talk([call("stare", at="it")])))
    assert seconds < 25 and event_names[-1] == "WorkflowCancelledEvent"


def test_run_within_its_deadline_ends_as_the_original(workflow_stage: Stage) -> None:
    fast = accelerate(Own([]), pool=workflow_stage.pool).with_request_context(deadline_s=20)
    assert run(fast, takes=0.01) == "done"
    retrying = accelerate(flows.Retrying(workflow_stage, 9), pool=workflow_stage.pool).with_request_context(
        deadline_s=20
    )
    with pytest.raises(ValueError, match="said"):
        run(retrying)


def test_run_with_a_deadline_can_be_cancelled(workflow_stage: Stage) -> None:
    own = Own([])
    fast = accelerate(own, pool=workflow_stage.pool).with_request_context(deadline_s=20)

    async def played() -> None:
        for times, way in enumerate(("cancel_run", "wait_for", "cancel")):
            handler = fast.run()
            async with asyncio.timeout(10):
                while len(own.begun) == times:
                    await asyncio.sleep(0.001)
            if way == "cancel_run":
                await handler.cancel_run()
            elif way == "cancel":
                handler.cancel()
            with pytest.raises((Exception, asyncio.CancelledError)):
                await asyncio.wait_for(handler, 0.05)
            async with asyncio.timeout(10):
                while not handler.is_done() or handler.ctx.is_running:
                    await asyncio.sleep(0.001)

    asyncio.run(played())
    assert own.cancelled == own.begun == ["step"] * 3


def test_deadline_interrupts_an_overridden_run_method(workflow_stage: Stage) -> None:
    class Waits(Own):
        async def run(self, **given: Any) -> Any:  # type: ignore[override]
            return await super().run(**given)

    fast = accelerate(Waits([]), pool=workflow_stage.pool).with_request_context(deadline_s=0.1)
    with pytest.raises(QueryTimeout):
        run(fast)


def test_deadline_of_the_outer_query_interrupts_a_nested_workflow(workflow_stage: Stage) -> None:
    outer = accelerate(
        flows.Outer(workflow_stage, accelerate(Own([]), pool=workflow_stage.pool)), pool=workflow_stage.pool
    )
    seconds, _ = asyncio.run(timed(outer.with_request_context(deadline_s=0.1), **ASKED))
    assert seconds < 25


def test_deadline_that_is_no_number_raises(workflow_stage: Stage) -> None:
    fast = accelerate(flows.Rag(workflow_stage), pool=workflow_stage.pool)
    with pytest.raises(RegistrationError, match="deadline_s"):
        fast.with_request_context(deadline_s="soon")  # type: ignore[arg-type]
