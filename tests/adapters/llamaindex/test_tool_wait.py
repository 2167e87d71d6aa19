"""Tests of agents whose next prompt is prefilled while their tools run: what is sent, when, and when nothing is."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from differential.llamaindex.workflows import agents
from differential.llamaindex.workflows.agents import LONG, act
from differential.llamaindex.workflows.stage import Stage, call, do, said, stage
from llama_index.core.agent.workflow import AgentWorkflow, FunctionAgent
from llama_index.core.llms import MockLLM
from llama_index.core.tools import FunctionTool
from support.recording import record

from teola_plugin import accelerate
from teola_plugin.adapters.llamaindex import TeolaLLM
from teola_plugin.adapters.llamaindex.workflows import tool_wait
from teola_plugin.engines.fake import FakeLLM
from teola_plugin.pool import EnginePool
from teola_plugin.requests.payloads import Generate, Request, Warmup

TWO = [call("look", at="sea"), call("look", at="ivory tower")]
WORDY = "Thought: " + "I wonder what grows there and what does not. " * 8


@pytest.fixture(scope="module")
def workflow_stage() -> Iterator[Stage]:
    with stage() as made:
        yield made


@pytest.fixture(scope="module")
def all_seen(workflow_stage: Stage) -> list[Request]:
    return record(workflow_stage.pool.engine("llm"))


@pytest.fixture
def seen(all_seen: list[Request]) -> list[Any]:
    """Record the payloads that reach the model's engine."""
    all_seen.clear()
    return all_seen


def run(agent: Any, *rounds: Any, **given: Any) -> Any:
    async def played() -> Any:
        return await agent.run(user_msg=do(*rounds), **given)

    return asyncio.run(played())


def prefilled_and_sent(seen: list[Request]) -> list[tuple[str, str]]:
    """Return pairs of a prefilled prompt and the prompt that was sent next, in order."""
    found, waiting = [], list[str]()
    for request in seen:
        if isinstance(request.payload, Warmup):
            waiting.append(request.payload.prompt.known_prefix())
        elif isinstance(request.payload, Generate):
            found += [(known, request.payload.prompt.flat()) for known in waiting]
            waiting.clear()
    assert not waiting
    return found


CASES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "results in their order": (agents.function, (TWO,)),
    "in one piece": (lambda s: agents.function(s, streaming=False), (TWO,)),
    "with a state": (lambda s: agents.function(s, initial_state={"a": 1}), ([call("note", what="a")], TWO)),
    "a tool that fails": (agents.function, ([call("fail", at="x" * 300), *TWO[1:]],)),
    "a tool that is not there": (agents.function, ([call("fly", at="x" * 300), *TWO],)),
    "in a team": (agents.team, (TWO, [call("handoff", to_agent="writer", reason="found")], "Written.")),
    "in a mixed team": (
        agents.mixed,
        (TWO, [call("handoff", to_agent="second", reason="sum")], WORDY + act("look", at="attic"), agents.DONE),
    ),
    "thinking aloud": (agents.react, (WORDY + act("look", at="ivory tower"), agents.DONE)),
    "thinking aloud, told how": (
        lambda s: agents.react(s, system_prompt="Be kind."),
        (WORDY + act("look", at="ivory tower"), act("add", a=1, b=2), agents.DONE),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_prefilled_text_is_a_prefix_of_the_next_prompt(workflow_stage: Stage, seen: list[Request], name: str) -> None:
    make, rounds = CASES[name]
    fast = accelerate(make(workflow_stage), pool=workflow_stage.pool)
    workflow_stage.pool.reset()  # what another case has left in the cache would need no warm-up
    run(fast, *rounds)
    found = prefilled_and_sent(seen)
    assert found, "nothing was prefilled"
    for known, prompt in found:
        assert prompt.startswith(known)
    trace = fast.last_trace()
    assert trace.wasted() == (0, 0)
    prefills = [span for span in trace.spans if span.kind == "PARTIAL_PREFILLING"]
    assert {span.outcome for span in prefills if span.started is not None} <= {"done", "cancelled"}


def test_tool_results_are_prefilled_as_they_arrive(workflow_stage: Stage, seen: list[Request]) -> None:
    fast = accelerate(agents.function(workflow_stage), pool=workflow_stage.pool)
    run(fast, [*TWO, call("look", at="house")])
    (first, prompt), (second, _) = prefilled_and_sent(seen)
    assert first.count(LONG) == 1 and second.count(LONG) == 2 and prompt.count(LONG) == 3
    assert second.startswith(first) and first.rstrip().endswith("tool:")
    last = fast.last_trace().spans[-1]
    assert last.cached > len(second) // 4 * 0.8


def test_concurrent_runs_prefill_their_own_prompts(workflow_stage: Stage, seen: list[Request]) -> None:
    fast = accelerate(agents.function(workflow_stage), pool=workflow_stage.pool)

    async def played() -> Any:
        return await asyncio.gather(
            *(fast.run(user_msg=do([call("look", at=at), *TWO])) for at in ("a", "bb", "ccccc"))
        )

    asyncio.run(played())
    warmed = [r.payload.prompt.known_prefix() for r in seen if isinstance(r.payload, Warmup)]
    prompts = [r.payload.prompt.flat() for r in seen if isinstance(r.payload, Generate)]
    assert len(warmed) >= 3 and all(any(one.startswith(known) for one in prompts) for known in warmed)


# ------------------------------------------------------------ when nothing is sent


class OtherStep(FunctionAgent):
    async def take_step(self, ctx: Any, llm_input: Any, tools: Any, memory: Any) -> Any:
        return await super().take_step(ctx, llm_input[-1:], tools, memory)


class OwnTool(FunctionTool):
    """A tool of the user's own class, which may run code even when it is inspected."""


def own_tool() -> Any:
    made = FunctionTool.from_defaults(async_fn=agents.look)
    return OwnTool(async_fn=made.async_fn, metadata=made.metadata)


NOTHING: dict[str, tuple[Any, tuple[Any, ...], dict[str, Any]]] = {
    "no passes": (agents.function, (TWO,), {"passes": ()}),
    "other passes": (agents.function, (TWO,), {"passes": ("prune-dependencies",)}),
    "quick tools": (agents.function, ([call("add", a=1, b=2), call("add", a=3, b=4)],), {}),
    "its result is the answer": (agents.direct, (TWO,), {}),
    "too little": (agents.function, ([call("look", at="sea")],), {}),
    "a step of its own": (lambda s: OtherStep(tools=[agents.look], llm=s.llm), (TWO,), {}),
    "a tool of its own": (lambda s: agents.function(s, own_tool()), (TWO,), {}),
    "code": (agents.coder, ("<execute>1</execute>", "done"), {}),
}


@pytest.mark.parametrize("name", NOTHING)
def test_excluded_agents_get_no_prefilling_while_tools_run(
    workflow_stage: Stage, seen: list[Request], name: str
) -> None:
    make, rounds, options = NOTHING[name]
    run(accelerate(make(workflow_stage), pool=workflow_stage.pool, **options), *rounds)
    assert [r for r in seen if isinstance(r.payload, Warmup)] == []
    assert [r for r in seen if isinstance(r.payload, Generate)]


def test_engine_without_prefix_cache_gets_no_prefilling() -> None:
    model = FakeLLM(answer=lambda prompt, _: said(prompt))
    with EnginePool.local([model]) as pool:
        seen = record(model)
        agent = FunctionAgent(tools=[agents.look], llm=TeolaLLM(pool=pool, is_function_calling_model=True))
        run(accelerate(agent), TWO)
        assert len(seen) == 2 and not any(isinstance(r.payload, Warmup) for r in seen)


def test_agent_of_another_pool_gets_no_prefilling(workflow_stage: Stage, seen: list[Request]) -> None:
    with EnginePool.local([FakeLLM()]) as other:
        run(accelerate(agents.function(workflow_stage), pool=other), TWO)
    assert not any(isinstance(r.payload, Warmup) for r in seen)


def test_failing_prefilling_does_not_change_the_answer(
    workflow_stage: Stage, seen: list[Request], monkeypatch: Any
) -> None:
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("written badly")

    monkeypatch.setattr(tool_wait, "tool_arguments", broken)
    plain = run(agents.function(workflow_stage), TWO)
    assert str(run(accelerate(agents.function(workflow_stage), pool=workflow_stage.pool), TWO)) == str(plain)
    assert not any(isinstance(r.payload, Warmup) for r in seen)


def test_cancelled_run_leaves_no_prefilling_open(workflow_stage: Stage, seen: list[Request]) -> None:
    fast = accelerate(agents.function(workflow_stage), pool=workflow_stage.pool)

    async def played() -> None:
        handler = fast.run(user_msg=do([*TWO, call("stare", at="it")]))
        await asyncio.sleep(0.2)  # two of them have their results
        await handler.cancel_run()
        await asyncio.sleep(0.05)

    asyncio.run(played())
    assert fast.last_trace().outcome == "cancelled"
    assert all(span.done is not None for span in fast.last_trace().spans)


def test_prefilling_works_in_teams_with_other_models(workflow_stage: Stage, seen: list[Request]) -> None:
    """Only what the pool's own engines serve is prefilled, whoever else is in the team."""
    team = agents.team(workflow_stage)
    team.agents["writer"].llm = MockLLM(max_tokens=3)
    fast = accelerate(team, pool=workflow_stage.pool)
    assert isinstance(fast, AgentWorkflow)
    run(fast, TWO)
    assert prefilled_and_sent(seen)
