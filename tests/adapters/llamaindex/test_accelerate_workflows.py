"""Tests of accelerated workflows and agents: the same class, and one query for each run."""

import asyncio
import copy
import gc
import inspect
import logging
from collections.abc import Iterator
from typing import Any

import pytest
from differential.llamaindex.workflows import agents, flows
from differential.llamaindex.workflows.stage import Stage, call, do, stage
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent, ReActAgent
from llama_index.core.agent.workflow import workflow_events as events
from llama_index.core.llms import MockLLM
from llama_index.core.tools import QueryEngineTool
from llama_index.core.workflow import (
    Context,
    HumanResponseEvent,
    InputRequiredEvent,
    StartEvent,
    StopEvent,
    Workflow,
    step,
)
from support.llamaindex_engines import chat_mock

from teola_plugin import accelerate
from teola_plugin.adapters.llamaindex import TeolaLLM
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.errors import RegistrationError
from teola_plugin.pool import EnginePool


@pytest.fixture(scope="module")
def workflow_stage() -> Iterator[Stage]:
    with stage() as made:
        yield made


def run(workflow: Any, **given: Any) -> Any:
    async def played() -> Any:
        return await workflow.run(**(given or {"about": "what grows"}))

    return asyncio.run(played())


def request_count(trace: Any, engine: str = "llm") -> int:
    return len([span for span in trace.spans if span.engine == engine and span.kind != "PARTIAL_PREFILLING"])


# ------------------------------------------------------------ the object


@pytest.mark.parametrize("make", [flows.Rag, flows.Stateful, agents.function, agents.react, agents.coder, agents.team])
def test_accelerated_workflow_keeps_class_and_state(workflow_stage: Stage, make: Any) -> None:
    original = make(workflow_stage)
    before = dict(vars(original))
    fast = accelerate(original, pool=workflow_stage.pool)
    assert isinstance(fast, type(original)) and type(fast).__name__ == type(original).__name__
    assert fast.workflow_name == original.workflow_name
    assert inspect.signature(fast.run) == inspect.signature(original.run)
    assert {name: one is vars(original)[name] for name, one in before.items()} == dict.fromkeys(before, True)
    assert vars(fast) is vars(original) and fast.validate() == original.validate()
    assert fast.start_event_class is original.start_event_class and fast.events == original.events
    classes = type(fast).__mro__
    assert classes[classes.index(type(original)) :] == type(original).__mro__


def test_attributes_set_on_accelerated_agent_reach_the_original(workflow_stage: Stage) -> None:
    agent = agents.function(workflow_stage)
    fast = accelerate(agent, pool=workflow_stage.pool)
    fast.system_prompt = "Say it in one word."
    agent.tools.append(agents.FunctionTool.from_defaults(lambda: "late", name="late", description="Late."))
    run(fast, user_msg=do([call("late")]))
    assert (
        "Say it in one word." in workflow_stage.reached.prompts[-1]
        and "tool: late" in workflow_stage.reached.prompts[-1]
    )


def test_workflow_attributes_hide_methods_of_the_accelerated_class(workflow_stage: Stage) -> None:
    original = flows.Stateful(workflow_stage)
    fast = accelerate(original, pool=workflow_stage.pool)
    assert fast.plan.__func__ is flows.Stateful.plan and fast.report == "mine"
    assert fast.with_request_context(app="mine").report == "mine" and fast.original is original


def test_steps_added_later_run_in_accelerated_workflow(workflow_stage: Stage) -> None:
    class Growing(Workflow):
        @step
        async def first(self, ev: StartEvent) -> flows.Part | StopEvent:
            return flows.Part(number=1)

    original = Growing(disable_validation=True)
    fast = accelerate(original, pool=workflow_stage.pool)

    @step(workflow=type(fast))
    async def last(ev: flows.Part) -> StopEvent:
        return StopEvent(result=f"{ev.number}, last")

    assert run(fast) == run(original) == "1, last"


def test_copy_of_an_accelerated_agent_has_own_attributes_and_trace(workflow_stage: Stage) -> None:
    agent = agents.function(workflow_stage)
    fast = accelerate(agent, pool=workflow_stage.pool)
    made = copy.copy(fast)
    made.name = "other"
    assert agent.name == fast.name == "Agent" and type(made).__mro__[1:] == type(fast).__mro__[1:]
    run(made, user_msg="hi")
    assert made.last_trace() is not None and fast.last_trace() is None
    assert isinstance(agent.model_copy(), FunctionAgent) and isinstance(fast.model_copy(), FunctionAgent)


def test_accelerating_an_accelerated_agent_replaces_its_options(workflow_stage: Stage) -> None:
    fast = accelerate(
        accelerate(agents.function(workflow_stage), pool=workflow_stage.pool), pool=workflow_stage.pool, app="again"
    )
    run(fast, user_msg=do([call("add", a=1, b=2)]))
    assert request_count(fast.last_trace()) == 2 and fast.last_trace().app == "again"


def test_agent_subclass_with_overridden_step_runs_that_step(workflow_stage: Stage) -> None:
    class Counting(FunctionAgent):
        called: int = 0

        @step
        async def call_tool(self, ctx: Context, ev: events.ToolCall) -> events.ToolCallResult:
            self.called += 1
            return await super().call_tool(ctx, ev)

    agent = Counting(tools=[agents.add], llm=workflow_stage.llm)
    fast = accelerate(agent, pool=workflow_stage.pool)
    run(fast, user_msg=do([call("add", a=1, b=2)]))
    assert agent.called == fast.called == 1


# ------------------------------------------------------------ the pool


def closed_over(model: Any) -> Workflow:
    class Closed(Workflow):
        @step
        async def only(self, ev: StartEvent) -> StopEvent:
            return StopEvent(result=str(await model.acomplete("closed over")))

    return Closed()


@pytest.mark.parametrize(
    "make", [flows.Rag, flows.Engines, agents.function, agents.team, lambda s: closed_over(s.llm), flows.Outer]
)
def test_pool_of_the_models_of_steps_is_found(workflow_stage: Stage, make: Any) -> None:
    fast = accelerate(make(workflow_stage))
    run(fast, **({"user_msg": "hi"} if isinstance(fast, FunctionAgent | AgentWorkflow) else {}))
    assert request_count(fast.last_trace()) >= 1


def test_workflow_with_two_pools_raises(workflow_stage: Stage) -> None:
    with EnginePool.local([FakeLLM()]) as other:
        workflow = flows.Rag(workflow_stage)
        workflow.llm = TeolaLLM(pool=other)
        with pytest.raises(RegistrationError, match="2 different engine pools"):
            accelerate(workflow)


def test_agent_without_a_pool_runs_as_the_original() -> None:
    agent = ReActAgent(tools=[agents.add], llm=MockLLM(max_tokens=3))
    fast = accelerate(agent)
    assert str(run(fast, user_msg="hi")) == str(run(agent, user_msg="hi"))
    assert fast.last_trace() is None and {row.level for row in fast.report().parts} == {"original"}


def test_accelerate_returns_original_workflow_if_disabled(
    workflow_stage: Stage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TEOLA_DISABLE", "1")
    workflow = flows.Rag(workflow_stage)
    assert accelerate(workflow, pool=workflow_stage.pool) is workflow


def test_shadow_option_raises_for_workflows(workflow_stage: Stage) -> None:
    with pytest.raises(RegistrationError, match="a workflow's steps"):
        accelerate(agents.function(workflow_stage), shadow=0.1)


def test_original_workflow_runs_if_its_query_cannot_start(
    workflow_stage: Stage, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise ZeroDivisionError("watched badly")

    monkeypatch.setattr(workflow_stage.pool.runtime, "watch", broken)
    with caplog.at_level(logging.WARNING, logger="teola_plugin"):
        assert run(accelerate(flows.Rag(workflow_stage))) == run(flows.Rag(workflow_stage))
    assert "planning failed" in caplog.text and "ZeroDivisionError" in caplog.text


# ------------------------------------------------------------ a run is a query


@pytest.mark.parametrize(
    ("make", "prompts"),
    [(flows.Rag, 1), (flows.FanOut, 5), (flows.Retrying, 3), (flows.Outer, 2), (flows.Sync, 1), (flows.Stateful, 2)],
)
def test_trace_has_all_requests_of_the_steps(workflow_stage: Stage, make: Any, prompts: int) -> None:
    fast = accelerate(make(workflow_stage), pool=workflow_stage.pool, app="flows")
    run(fast)
    trace = fast.last_trace()
    assert (request_count(trace), trace.app, trace.outcome) == (prompts, "flows", "closed")


def test_workflow_in_a_step_joins_the_outer_query(workflow_stage: Stage) -> None:
    inner = accelerate(flows.Rag(workflow_stage), pool=workflow_stage.pool)
    outer = accelerate(flows.Outer(workflow_stage, inner), pool=workflow_stage.pool)
    run(outer)
    assert request_count(outer.last_trace()) == 2 and inner.last_trace().query_id == outer.last_trace().query_id


def test_concurrent_runs_are_separate_queries(workflow_stage: Stage) -> None:
    fast = accelerate(flows.Rag(workflow_stage), pool=workflow_stage.pool)

    async def played() -> list[Any]:
        begun = [(fast.run(about=f"what {i}"), fast.__teola_session__.last) for i in range(4)]
        await asyncio.gather(*(handler for handler, _ in begun))
        return [run.trace.result(5) for _, run in begun]

    found = asyncio.run(played())
    assert len({one.query_id for one in found}) == 4 and {request_count(one) for one in found} == {1}


def test_accelerated_engines_in_a_workflow_run_as_subplans(workflow_stage: Stage) -> None:
    fast = accelerate(flows.Engines(workflow_stage, accelerate), pool=workflow_stage.pool)
    run(fast)
    early = [span.primitive for span in fast.last_trace().spans if span.primitive.startswith("part")]
    assert len({name.partition("/")[0] for name in early}) == 2


def test_query_engine_tools_of_an_agent_run_as_subplans(workflow_stage: Stage) -> None:
    agent = agents.function(workflow_stage, *agents.engines(workflow_stage))
    fast = accelerate(agent, pool=workflow_stage.pool)
    run(fast, user_msg=do([call("farm", input="oats")], [call("shelf", input="ivy")]))
    trace = fast.last_trace()
    parts = {span.primitive.partition("/")[0] for span in trace.spans if "embedding" in span.primitive}
    assert len(parts) == 2 and [type(one) for one in agent.tools][:1] == [QueryEngineTool]
    assert not hasattr(agent.tools[0].query_engine, "__teola_accelerated__")
    rows = {row.path: row.level for row in fast.report().parts}
    assert rows['agent.tools["farm"].engine._retriever._retrievers[0]'] == "lowered"


def test_trace_has_a_step_for_each_turn_and_tool(workflow_stage: Stage) -> None:
    fast = accelerate(agents.team(workflow_stage), pool=workflow_stage.pool)
    handoff = [call("handoff", to_agent="writer", reason="found")]
    run(fast, user_msg=do([call("look", at="sea"), call("farm", input="oats")], handoff, "Written."))
    trace = fast.last_trace()
    steps = [(step.kind, step.name, step.outcome) for step in trace.steps]
    assert sorted(steps) == sorted(
        [("node", name, "done") for name in ("research", "research", "writer")]
        + [("tool", name, "done") for name in ("look", "farm", "handoff")]
    )
    farm = next(step.id for step in trace.steps if step.name == "farm")
    assert {span.step for span in trace.spans if span.primitive.startswith("part1/retrieve")} == {farm}


def test_accelerated_member_of_a_team_joins_its_query(workflow_stage: Stage) -> None:
    team = agents.team(workflow_stage)
    team.agents["research"] = accelerate(team.agents["research"], pool=workflow_stage.pool)
    fast = accelerate(team, pool=workflow_stage.pool)
    run(fast, user_msg=do([call("look", at="sea"), call("look", at="ivory tower")]))
    kinds = [span.kind for span in fast.last_trace().spans]
    assert request_count(fast.last_trace()) == 2 and "PARTIAL_PREFILLING" in kinds


def test_report_lists_steps_models_and_tools(workflow_stage: Stage) -> None:
    rows = [
        (row.path, row.level) for row in accelerate(flows.Rag(workflow_stage), pool=workflow_stage.pool).report().parts
    ]
    assert rows == [("workflow.answer", "joined"), ("workflow.retrieve", "joined")]
    text = accelerate(agents.team(workflow_stage), pool=workflow_stage.pool).explain(details=True)
    assert 'agents["research"].tools["farm"].engine' in text and 'agents["writer"].llm' in text


# ------------------------------------------------------------ its end


async def _never(workflow: Any) -> Any:
    handler = workflow.run()
    await asyncio.sleep(0.05)
    return handler


@pytest.mark.parametrize("way", ["awaited", "cancel_run", "wait_for", "cancel", "loop gone", "dropped"])
@pytest.mark.filterwarnings("ignore:WorkflowHandler.cancel:DeprecationWarning")
def test_query_ends_with_its_workflow_run(workflow_stage: Stage, way: str) -> None:
    ends = way in ("awaited", "dropped")
    fast = accelerate(flows.Slow(workflow_stage, 0.1 if ends else 20), pool=workflow_stage.pool)

    async def played() -> None:
        handler = await _never(fast)
        assert ends or not fast.__teola_session__.last.trace.done()
        if way == "cancel_run":
            await handler.cancel_run()
        elif way == "wait_for":
            await asyncio.wait_for(handler, 0.01)
        elif way == "cancel":
            handler.cancel()
        elif way == "awaited":
            await handler
        elif way == "dropped":
            del handler
            gc.collect()
            async with asyncio.timeout(20):
                while not fast.__teola_session__.last.trace.done():
                    await asyncio.sleep(0.01)

    try:
        asyncio.run(played())
    except (Exception, asyncio.CancelledError) as error:
        assert way in ("awaited", "wait_for"), error
    outcome = fast.last_trace().outcome
    assert outcome == ("closed" if ends else "cancelled")


def test_error_of_a_step_ends_the_query(workflow_stage: Stage) -> None:
    fast = accelerate(flows.Retrying(workflow_stage, 9), pool=workflow_stage.pool)
    with pytest.raises(ValueError, match="said"):
        run(fast)
    assert fast.last_trace().outcome == "closed"


@pytest.mark.filterwarnings("ignore:coroutine:RuntimeWarning", "ignore::pytest.PytestUnraisableExceptionWarning")
def test_run_that_cannot_start_ends_its_query(workflow_stage: Stage) -> None:
    fast = accelerate(flows.Typed(workflow_stage), pool=workflow_stage.pool)
    with pytest.raises(Exception, match="Failed creating a start event"):
        run(fast, nothing=1)
    with pytest.raises(RuntimeError, match="no running event loop"):
        fast.run(about="x")
    assert fast.last_trace().outcome == "closed"


def test_query_stays_open_while_a_human_answers(workflow_stage: Stage) -> None:
    fast = accelerate(flows.Asking(workflow_stage), pool=workflow_stage.pool)

    async def played() -> None:
        handler = fast.run()
        async for event in handler.stream_events():
            if isinstance(event, InputRequiredEvent):
                await asyncio.sleep(0.05)
                assert not fast.__teola_session__.last.trace.done()
                handler.ctx.send_event(HumanResponseEvent(response="yes"))
        await handler

    asyncio.run(played())
    assert request_count(fast.last_trace()) == 2


def test_overridden_run_method_is_traced(workflow_stage: Stage) -> None:
    class Own(flows.Rag):
        async def run(self, **kwargs: Any) -> Any:  # type: ignore[override]
            return await super().run(**kwargs)

    fast = accelerate(Own(workflow_stage), pool=workflow_stage.pool)
    assert run(fast) == run(flows.Rag(workflow_stage)) and request_count(fast.last_trace()) == 1


def test_concurrent_run_limit_holds_across_tenants(workflow_stage: Stage) -> None:
    most, now = 0, 0

    class Counted(Workflow):
        @step
        async def only(self, ev: StartEvent) -> StopEvent:
            nonlocal most, now
            now += 1
            most = max(most, now)
            await asyncio.sleep(0.01)
            now -= 1
            return StopEvent()

    fast = accelerate(Counted(num_concurrent_runs=2), pool=workflow_stage.pool)

    async def played() -> None:
        await asyncio.gather(*(fast.with_request_context(tenant=f"t{i}").run() for i in range(6)))

    asyncio.run(played())
    assert most == 2


# ------------------------------------------------------------ bind


@pytest.mark.parametrize("make", [agents.function, agents.react, lambda s: AgentWorkflow(agents=[agents.react(s)])])
def test_bound_llm_of_an_agent_runs_on_the_engine(workflow_stage: Stage, make: Any) -> None:
    own = chat_mock(max_tokens=3)
    agent = make(workflow_stage)
    member = agent.agents["Agent"] if isinstance(agent, AgentWorkflow) else agent
    member.llm = own
    fast = accelerate(agent, pool=workflow_stage.pool, bind=[(own, "llm")])
    functions = isinstance(member, FunctionAgent)
    rounds = [[call("add", a=1, b=2)]] if functions else [agents.act("add", a=1, b=2), agents.DONE]
    run(fast, user_msg=do(*rounds))
    assert (
        request_count(fast.last_trace()) == 2
        and ("tool: 3" if functions else "Observation: 3") in workflow_stage.reached.prompts[-1]
    )
    assert member.llm is own and fast.original is agent


def test_bound_llm_of_a_workflow_runs_on_the_engine(workflow_stage: Stage) -> None:
    own = MockLLM(max_tokens=3)
    workflow = flows.Rag(workflow_stage)
    workflow.llm = own  # type: ignore[assignment]
    fast = accelerate(workflow, pool=workflow_stage.pool, bind=[(own, "llm")])
    run(fast)
    assert request_count(fast.last_trace()) == 1
    assert workflow.llm is own
    assert fast.llm is own


def test_bind_accepts_any_model_for_a_workflow(workflow_stage: Stage) -> None:
    """Steps are user code, so the models that they call cannot be known before."""
    assert (
        accelerate(flows.Rag(workflow_stage), pool=workflow_stage.pool, bind=[(MockLLM(max_tokens=3), "llm")])
        is not None
    )
