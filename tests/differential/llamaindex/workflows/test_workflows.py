"""Workflows and agents, plain and accelerated: results, events in order, contexts, prompts, spans, errors."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from differential.llamaindex.workflows import agents, flows
from differential.llamaindex.workflows.agents import act, told
from differential.llamaindex.workflows.stage import Play, Seen, Stage, anonymous, call, differences, see, stage
from llama_index.core.workflow import Context, HumanResponseEvent, InputRequiredEvent, StopEvent, step

from teola_plugin import accelerate

pytestmark = pytest.mark.filterwarnings("ignore:Skipping serialization of known unserializable key")
"""Of memories: LlamaIndex saves a context when it is used again."""
ASKED = flows.asked()


@dataclass(frozen=True)
class Case:
    make: Callable[[Stage], Any]
    play: Play = ASKED
    raced: bool = False
    fails: bool = False


CASES: dict[str, Case] = {
    "rag": Case(flows.Rag),
    "nobody listens": Case(flows.Rag, flows.unheard),
    "five at a time": Case(flows.Rag, flows.five, raced=True),
    "one at a time": Case(lambda s: flows.Rag(s, num_concurrent_runs=1), flows.five, raced=True),
    "verbose": Case(lambda s: flows.Rag(s, verbose=True)),
    "the same context": Case(flows.Rag, flows.again),
    "events of its own": Case(flows.Typed, flows.by_event),
    "no such event": Case(flows.Typed, flows.asked(nothing=1), fails=True),
    "workers": Case(flows.FanOut, raced=True),
    "retries": Case(flows.Retrying),
    "retries in vain": Case(lambda s: flows.Retrying(s, 9), fails=True),
    "time is up": Case(flows.Slow, fails=True),
    "cancelled": Case(lambda s: flows.Slow(s, 20), flows.cancelled, fails=True),
    "a human": Case(flows.Asking, flows.human),
    "a human, waited for": Case(flows.Waiting, flows.human),
    "nested": Case(flows.Outer),
    "a thread": Case(flows.Sync),
    "names of ours": Case(flows.Stateful),
    "resources": Case(lambda s: flows.given(s)()),
    "engines": Case(flows.Engines),
}
LOOKS = [call("look", at="sea"), call("look", at="ivory tower"), call("look", at="house")]
HANDOFF = [call("handoff", to_agent="writer", reason="found")]
AGENTS: dict[str, Case] = {
    "function agent": Case(agents.function, told([call("look", at="sea")], [call("add", a=1, b=2)])),
    "three at a time": Case(agents.function, told(LOOKS, [call("look", at="attic")])),
    "in one piece": Case(lambda s: agents.function(s, streaming=False), told(LOOKS)),
    "with a state": Case(
        lambda s: agents.function(s, initial_state={"notes": []}), told([call("note", what="a")], LOOKS)
    ),
    "told which tool": Case(lambda s: agents.function(s, initial_tool_choice="add"), told([call("add", a=1, b=1)])),
    "no tools": Case(lambda s: agents.FunctionAgent(llm=s.llm), told("only words")),
    "positional": Case(agents.function, agents.positional([call("add", a=1, b=2)])),
    "engines as tools": Case(
        lambda s: agents.function(s, *agents.engines(s)),
        told([call("farm", input="oats")], [call("port", input="sails")], [call("shelf", input="ivy")]),
        raced=True,
    ),
    "a tool fails": Case(agents.function, told([call("fail", at="sea"), call("look", at="sea")])),
    "an unknown tool": Case(agents.function, told([call("fly", to="sea"), call("look", at="sea")])),
    "its result is the answer": Case(agents.direct, told([call("look", at="sea")])),
    "a human, in a tool": Case(agents.function, told([call("permit", what="this")], heard=flows.answer)),
    "structured": Case(agents.structured, told([call("add", a=1, b=2)])),
    "too many turns": Case(
        agents.function, told(*[[call("add", a=i, b=i)] for i in range(9)], max_iterations=3), fails=True
    ),
    "an end by force": Case(
        agents.function,
        told(*[[call("look", at="x")] for _ in range(9)], max_iterations=3, early_stopping_method="generate"),
    ),
    "a conversation": Case(agents.function, agents.conversation),
    "three runs": Case(agents.function, agents.three, raced=True),
    "an agent, cancelled": Case(agents.function, agents.cancelled, fails=True),
    "react": Case(agents.react, told(act("look", at="sea"), act("add", a=1, b=2), agents.DONE)),
    "react, in one piece": Case(
        lambda s: agents.react(s, streaming=False), told(act("look", at="sea"), act("fail", at="sea"), agents.DONE)
    ),
    "react, badly written": Case(agents.react, told("Action: what?", act("look", at="sea"), agents.DONE)),
    "react, nothing written": Case(agents.react, told("", act("look", at="sea"), agents.DONE)),
    "react with engines": Case(
        lambda s: agents.react(s, *agents.engines(s), system_prompt="Be kind."),
        told(act("farm", input="oats"), act("shelf", input="ivy"), agents.DONE),
    ),
    "code": Case(agents.coder, told("I run <execute>add(1, 2)</execute>", "It is done.")),
    "a team": Case(
        agents.team,
        told(LOOKS[:2], HANDOFF, [call("note", what="a")], "Written."),
    ),
    "a team, engines": Case(
        agents.team,
        told(
            [call("farm", input="oats")], [call("handoff", to_agent="writer", reason="found")], [call("add", a=1, b=2)]
        ),
        raced=True,
    ),
    "a mixed team": Case(
        agents.mixed,
        told(LOOKS, [call("handoff", to_agent="second", reason="sum")], act("look", at="sea"), agents.DONE),
    ),
}
CASES |= AGENTS


@pytest.fixture(scope="module")
def workflow_stage() -> Iterator[Stage]:
    with stage() as made:
        yield made


def both(workflow_stage: Stage, name: str, **options: Any) -> tuple[Seen, Seen]:
    """Return a run of the original and one of the accelerated workflow, each of a new workflow."""
    case = CASES[name]
    before = see(workflow_stage, case.make(workflow_stage), case.play)
    assert before.failed == case.fails, before.result
    return before, see(workflow_stage, accelerate(case.make(workflow_stage), **options), case.play)


def same(before: Seen, after: Seen, *, raced: bool) -> None:
    if found := differences(before, after, raced=raced):
        pytest.fail("\n".join(one[:3000] for one in found), pytrace=False)


@pytest.mark.parametrize("name", CASES)
def test_workflow_behaves_as_the_original(workflow_stage: Stage, name: str) -> None:
    before, after = both(workflow_stage, name, pool=workflow_stage.pool)
    same(before, after, raced=CASES[name].raced)
    assert after.trace is not None


@pytest.mark.parametrize("name", ["rag", "a human", "function agent", "react", "engines"])
def test_workflow_with_other_options_behaves_as_the_original(workflow_stage: Stage, name: str) -> None:
    for options in ({"passes": ()}, {"speculate": "all"}, {"speculate": "off"}):
        same(*both(workflow_stage, name, pool=workflow_stage.pool, **options), raced=CASES[name].raced)


@pytest.mark.parametrize("name", ["rag", "function agent", "three at a time", "a team"])
def test_failing_model_in_a_workflow_raises_the_originals_error(workflow_stage: Stage, name: str) -> None:
    """The same exception, in the same place; agents too do not survive it."""
    case = CASES[name]
    for prompt in see(workflow_stage, case.make(workflow_stage), case.play).prompts:
        workflow_stage.reached.broken = prompt[-60:]
        before, after = (
            see(workflow_stage, one, case.play)
            for one in (case.make(workflow_stage), accelerate(case.make(workflow_stage)))
        )
        workflow_stage.reached.broken = ""
        assert before.failed and (before.result, before.events) == (after.result, after.events)


# ------------------------------------------------------------ contexts


async def interrupted(workflow: Any) -> dict[str, Any]:
    """Run up to the question. Return what is saved then."""
    handler = workflow.run()
    async for event in handler.stream_events():
        if isinstance(event, InputRequiredEvent):
            break
    saved: dict[str, Any] = handler.ctx.to_dict()
    await handler.cancel_run()
    return saved


async def resumed(workflow: Any, saved: dict[str, Any]) -> Any:
    handler = workflow.run(ctx=Context.from_dict(workflow, saved))
    handler.ctx.send_event(HumanResponseEvent(response="yes"))
    return await handler


@pytest.mark.parametrize("make", [flows.Asking, flows.Waiting])
def test_original_and_accelerated_workflow_resume_each_other(workflow_stage: Stage, make: Any) -> None:
    workflows = {"plain": make(workflow_stage), "fast": accelerate(make(workflow_stage), pool=workflow_stage.pool)}
    saved = {name: asyncio.run(interrupted(one)) for name, one in workflows.items()}
    assert anonymous(json.dumps(saved["plain"])) == anonymous(json.dumps(saved["fast"]))
    assert "teola" not in json.dumps(saved["fast"]).lower()
    answers = {
        asyncio.run(resumed(one, json.loads(json.dumps(s)))) for one in workflows.values() for s in saved.values()
    }
    assert len(answers) == 1


def test_continued_workflow_run_is_a_separate_query(workflow_stage: Stage) -> None:
    fast = accelerate(flows.Asking(workflow_stage), pool=workflow_stage.pool)
    saved = asyncio.run(interrupted(fast))
    first = fast.last_trace()
    asyncio.run(resumed(fast, saved))
    second = fast.last_trace()
    assert first.query_id != second.query_id
    assert [len([s for s in one.spans if s.engine == "llm"]) for one in (first, second)] == [1, 1]


# ------------------------------------------------------------ the harness


@pytest.mark.parametrize("name", ["rag", "a human", "function agent", "a mixed team", "retries"])
def test_two_runs_of_the_original_workflow_are_equal(workflow_stage: Stage, name: str) -> None:
    """The control: what is compared does not differ by itself."""
    case = CASES[name]
    before, after = (see(workflow_stage, case.make(workflow_stage), case.play) for _ in range(2))
    same(before, after, raced=case.raced)


class MoreEvents(flows.Rag):
    @step
    async def answer(self, ctx: Context, ev: flows.Retrieved) -> StopEvent:
        ctx.write_event_to_stream(flows.Progress(piece="more"))
        return await super().answer(ctx, ev)


class OtherStore(flows.Rag):
    @step
    async def answer(self, ctx: Context, ev: flows.Retrieved) -> StopEvent:
        await ctx.store.set("mine", 1)
        return await super().answer(ctx, ev)


class AsksTwice(flows.Rag):
    @step
    async def answer(self, ctx: Context, ev: flows.Retrieved) -> StopEvent:
        await self.llm.acomplete("once more")
        return await super().answer(ctx, ev)


class OtherAnswer(flows.Rag):
    @step
    async def answer(self, ctx: Context, ev: flows.Retrieved) -> StopEvent:
        return StopEvent(result=f"{(await super().answer(ctx, ev)).result} ")


@pytest.mark.parametrize(
    ("wrong", "what"),
    [(MoreEvents, "event"), (OtherStore, "context"), (AsksTwice, "prompts"), (OtherAnswer, "result")],
)
def test_comparison_detects_an_unfaithful_workflow(workflow_stage: Stage, wrong: Any, what: str) -> None:
    before, after = (see(workflow_stage, make(workflow_stage), ASKED) for make in (flows.Rag, wrong))
    assert any(one.startswith(what) for one in differences(before, after, raced=False))
