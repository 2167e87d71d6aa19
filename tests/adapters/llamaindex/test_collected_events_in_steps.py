"""Tests of steps that run in parallel or collect several events: their certain calls are prefetched."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from llama_index.core.agent.workflow import ReActAgent
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, step
from llama_index.core.workflow.errors import WorkflowCancelledByUser
from llama_index.core.workflow.events import HumanResponseEvent, InputRequiredEvent
from support.hosted_steps import HostedLLM, called
from support.served_workflows import OwnWorkflow, compare_on_server

from teola_plugin import accelerate
from teola_plugin.adapters.plan_report import Reason, Status


class Question(Event):
    """A part of the query."""

    text: str


class Answer(Event):
    """The answer to a question."""

    text: str


class Outline(Event):
    """An outline was made."""

    text: str


class Progress(Event):
    """Something was done."""

    text: str


class Parts(OwnWorkflow):
    """Sends a question for each word, answers them one by one, and makes two texts of all answers."""

    @step
    async def split(self, ctx: Context, ev: StartEvent) -> Question | None:
        words = ev.query.split()
        await ctx.store.set("count", len(words))
        for word in words:
            ctx.send_event(Question(text=word))
        return None

    @step(num_workers=1)
    async def answer(self, ctx: Context, ev: Question) -> Answer:
        ctx.write_event_to_stream(Progress(text=ev.text))
        return Answer(text=await self.ask(f"answer {ev.text}"))

    @step
    async def combine(self, ctx: Context, ev: Answer) -> StopEvent | None:
        count = await ctx.store.get("count")
        answers = ctx.collect_events(ev, [Answer] * count)
        if answers is None:
            return None
        text = "\n".join(answer.text for answer in answers)
        summary = await self.ask(f"summary of {text}")
        title = await self.ask(f"title of {text}")
        return StopEvent(result=[summary, title])


class Classes(OwnWorkflow):
    """Waits for one event of each of two classes."""

    @step
    async def begin(self, ctx: Context, ev: StartEvent) -> Question | Outline | None:
        ctx.send_event(Question(text=ev.query))
        ctx.send_event(Outline(text="outline"))
        return None

    @step
    async def answer(self, ev: Question) -> Answer:
        return Answer(text=await self.ask(f"answer {ev.text}"))

    @step
    async def combine(self, ctx: Context, ev: Answer | Outline) -> StopEvent | None:
        collected = ctx.collect_events(ev, [Answer, Outline])
        if not collected:
            return None
        answer, outline = collected
        first = await self.ask(f"first {answer.text} {outline.text}")
        return StopEvent(result=[first, await self.ask(f"second {outline.text}")])


class Buffers(Classes):
    """Collects in a buffer with a name, and takes the events by their places."""

    @step
    async def combine(self, ctx: Context, ev: Answer | Outline) -> StopEvent | None:
        collected = ctx.collect_events(ev, [Outline, Answer], buffer_id="all")
        if collected is None:
            return None
        first = await self.ask(f"first {collected[1].text} {collected[0].text}")
        return StopEvent(result=[first, await self.ask(f"second {collected[0].text} {len(collected)}")])


class GoesOn(Parts):
    """After all answers, one step alone is left, and others come after it."""

    @step
    async def combine(self, ctx: Context, ev: Answer) -> Outline | None:
        answers = ctx.collect_events(ev, [Answer, Answer])
        if answers is None:
            return None
        return Outline(text=await self.ask(f"outline of {answers[0].text}"), last=answers[1].text)

    @step
    async def write(self, ev: Outline) -> StopEvent:
        title = await self.ask(f"title for {ev.last}")
        return StopEvent(result=[title, await self.ask(f"text for {ev.text}")])


class Listed(OwnWorkflow):
    """Returns a list of events; another step gets the list of answers."""

    @step
    async def split(self, ev: StartEvent) -> list[Question]:
        return [Question(text=word) for word in ev.query.split()]

    @step(num_workers=1)
    async def answer(self, ev: Question) -> Answer:
        return Answer(text=await self.ask(f"answer {ev.text}"))

    @step
    async def combine(self, answers: list[Answer]) -> StopEvent:
        text = " ".join(answer.text for answer in answers)
        summary = await self.ask(f"summary of {text}")
        return StopEvent(result=[summary, await self.ask(f"title of {text}")])


class Both(OwnWorkflow):
    """A step gets two events as two arguments."""

    @step
    async def begin(self, ctx: Context, ev: StartEvent) -> Question | Outline | None:
        ctx.send_event(Question(text=ev.query))
        ctx.send_event(Outline(text="outline"))
        return None

    @step
    async def combine(self, question: Question, outline: Outline) -> StopEvent:
        first = await self.ask(f"first {question.text} {outline.text}")
        return StopEvent(result=[first, await self.ask(f"second {outline.text}")])


class TwoFirstSteps(OwnWorkflow):
    """A workflow whose first event goes to two steps. One does nothing, as in workflows that also index documents."""

    @step
    async def index(self, ev: StartEvent) -> StopEvent | None:
        if not ev.get("folder"):
            return None
        return StopEvent(result="indexed")

    @step
    async def look_up(self, ctx: Context, ev: StartEvent) -> Question | None:
        query = ev.get("query")
        if not query:
            return None
        await ctx.store.set("query", query)
        return Question(text=query)

    @step
    async def outline(self, ctx: Context, ev: Question) -> Outline | None:
        return Outline(text=await self.ask(f"outline {ev.text}"))

    @step
    async def write(self, ctx: Context, ev: Outline) -> StopEvent:
        query = await ctx.store.get("query", default=None)
        title = await self.ask(f"title {query}")
        return StopEvent(result=[title, ev.text])


GAINING = (Parts, Classes, Buffers, GoesOn, Listed, Both, TwoFirstSteps)


@pytest.mark.parametrize("make", GAINING)
def test_calls_after_collected_events_overlap(make: Any) -> None:
    assert compare_on_server(make, query="oats rye") == (1, 2)


def test_any_number_of_events_is_collected() -> None:
    for query in ("oats", "oats rye wheat", "oats rye wheat spelt barley millet"):
        assert compare_on_server(Parts, query=query) == (1, 2)


def test_calls_after_too_many_events_stay_sequential() -> None:
    assert compare_on_server(Parts, query=" ".join("abcdefghijklmnopq"), latency_s=0.02) == (1, 1)


def test_the_next_run_collects_its_own_events() -> None:
    assert compare_on_server(GoesOn, runs=3, query="oats rye") == (1, 2)


def test_indexing_step_that_ends_the_run_sends_no_request() -> None:
    assert compare_on_server(TwoFirstSteps, folder="farm") == (0, 0)


# ------------------------------------------------------------ what is not certain


class Limited(Parts):
    """A workflow that answers as many questions at the same time as the step has workers."""

    @step(num_workers=2)
    async def answer(self, ctx: Context, ev: Question) -> Answer:
        return Answer(text=await self.ask(f"answer {ev.text}"))

    @step
    async def combine(self, ctx: Context, ev: Answer) -> StopEvent | None:
        answers = ctx.collect_events(ev, [Answer] * await ctx.store.get("count"))
        return None if answers is None else StopEvent(result=sorted(answer.text for answer in answers))


def test_events_overlap_only_up_to_the_workers_of_a_step() -> None:
    assert compare_on_server(Limited, query="oats rye wheat spelt") == (2, 2)


class FirstOfTwo(OwnWorkflow):
    """The first of two steps that has an answer ends the run."""

    @step
    async def begin(self, ctx: Context, ev: StartEvent) -> Question | Outline | None:
        ctx.send_event(Question(text=ev.query))
        ctx.send_event(Outline(text="outline"))
        return None

    @step
    async def answer(self, ev: Question) -> StopEvent:
        return StopEvent(result=await self.ask(f"answer {ev.text}"))

    @step
    async def wait(self, ev: Outline) -> Answer:
        await asyncio.sleep(5)
        return Answer(text="late")

    @step
    async def late(self, ev: Answer) -> StopEvent:
        return StopEvent(result=await self.ask("late"))


def test_calls_of_a_step_in_a_race_are_not_prefetched() -> None:
    assert compare_on_server(FirstOfTwo) == (1, 1)


class NeverComplete(Parts):
    """The answers are fewer than the step waits for."""

    @step
    async def combine(self, ctx: Context, ev: Answer) -> StopEvent | None:
        if ctx.collect_events(ev, [Answer] * 5) is None:
            return StopEvent(result="incomplete")
        first = await self.ask("first")
        return StopEvent(result=[first, await self.ask("second")])


def test_incomplete_event_collection_sends_no_extra_request() -> None:
    assert compare_on_server(NeverComplete, query="oats") == (1, 1)


class Approval(OwnWorkflow):
    """A person decides between the collection and the calls."""

    @step
    async def begin(self, ctx: Context, ev: StartEvent) -> InputRequiredEvent:
        async with ctx.store.edit_state() as state:
            state["plan"] = await self.ask(f"plan {ev.query}")
        return InputRequiredEvent(prefix="go on?")

    @step
    async def go_on(self, ctx: Context, ev: HumanResponseEvent) -> Outline:
        plan = await ctx.store.get("plan")
        return Outline(text=await self.ask(f"outline {plan}"))

    @step
    async def write(self, ctx: Context, ev: Outline) -> StopEvent:
        return StopEvent(result=[ev.text, await self.ask(f"title {await ctx.store.get('plan')}")])


class Waiting(OwnWorkflow):
    """A step waits for a person after an edit of the state."""

    @step
    async def begin(self, ctx: Context, ev: StartEvent) -> StopEvent:
        async with ctx.store.edit_state() as state:
            state["runs"] = state.get("runs", 0) + 1
        first = await self.ask("first")
        await ctx.wait_for_event(HumanResponseEvent, waiter_event=InputRequiredEvent(prefix="go on?"))
        second = await self.ask("second")
        return StopEvent(result=[first, second, await self.ask(f"third {await ctx.store.get('runs')}")])


@pytest.mark.parametrize("make", [Approval, Waiting])
def test_no_call_after_human_input_is_prefetched(make: Any) -> None:
    async def run(workflow: Any, llm: HostedLLM) -> tuple[Any, list[str], Any]:
        handler, before = workflow.run(query="oats"), list[str]()
        async for event in handler.stream_events():
            if isinstance(event, InputRequiredEvent):
                await asyncio.sleep(0.2)
                before = llm.prompts
                handler.ctx.send_event(HumanResponseEvent(response="yes"))
        return await handler, before, (await handler.ctx.store.get_state()).model_dump()

    original_llm, llm = HostedLLM(), HostedLLM()
    expected = asyncio.run(run(make(original_llm), original_llm))
    assert asyncio.run(run(accelerate(make(llm)), llm)) == expected
    assert llm.prompts == original_llm.prompts


class Failing(GoesOn):
    """The step after the collection raises."""

    @step
    async def write(self, ev: Outline) -> StopEvent:
        raise ValueError("no title")


def test_an_error_after_a_collection_is_the_originals() -> None:
    compare_on_server(Failing, query="oats rye")


def test_failing_answer_raises_the_originals_error() -> None:
    compare_on_server(Parts, query="oats rye", fails_on="answer rye")


def test_cancelled_run_cancels_prefetched_calls() -> None:
    llm = HostedLLM(latency_s=0.3)
    fast = accelerate(Classes(llm))

    async def run() -> None:
        handler = fast.run(query="oats")
        async with asyncio.timeout(5):
            while llm.most_at_once < 2:
                await asyncio.sleep(0.001)
        await handler.cancel_run()
        with pytest.raises(WorkflowCancelledByUser):
            await handler
        await asyncio.sleep(0.05)
        assert llm.running == 0

    asyncio.run(run())
    assert llm.prompts == ["answer oats", "first answer to answer oats outline", "second outline"]


def test_explain_names_the_step_that_waits_for_events() -> None:
    fast = accelerate(Parts(HostedLLM()))
    assert "calls that the step combine makes one after the other, side by side" in str(fast.explain())
    assert called(fast, "oats rye") == called(Parts(HostedLLM()), "oats rye")


class Inner(OwnWorkflow):
    """A workflow that another one runs."""

    @step
    async def only(self, ev: StartEvent) -> StopEvent:
        return StopEvent(result=await self.ask(f"inner {ev.query}"))


class RunsOther(OwnWorkflow):
    """Runs another workflow between its calls."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self.inner = Inner(llm)

    @step
    async def begin(self, ev: StartEvent) -> StopEvent:
        first = await self.ask("first")
        second = await self.ask("second")
        inner = await self.inner.run(query=ev.query)
        third = await self.ask("third")
        return StopEvent(result=[first, second, inner, third, await self.ask("fourth")])


class RunsAgent(OwnWorkflow):
    """Runs an agent, whose tool may do anything, before its calls."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self.agent = ReActAgent(tools=[], llm=llm, streaming=False)

    @step
    async def begin(self, ev: StartEvent) -> StopEvent:
        reply = await self.agent.run(ev.query)
        return StopEvent(result=[str(reply), await self.ask("first"), await self.ask("second")])


def test_calls_after_a_nested_workflow_run_wait_for_it() -> None:
    assert compare_on_server(RunsOther) == (1, 2)


@pytest.mark.parametrize(
    ("make", "reason", "names", "line"),
    [
        (RunsOther, Reason.RUNS_WORKFLOW, ("Inner",), "await self.inner.run("),
        (RunsAgent, Reason.RUNS_WORKFLOW, ("ReActAgent",), "await self.agent.run("),
        (Waiting, Reason.WAITS_FOR_EVENT, (), "await ctx.wait_for_event("),
    ],
)
def test_report_names_the_reason_calls_wait(make: Any, reason: Reason, names: tuple[str, ...], line: str) -> None:
    report = accelerate(make(HostedLLM())).report()
    [row] = report.with_status(Status.NOT_SEEN)
    assert row.reason is reason
    assert row.explanation is not None
    assert row.explanation.names == names
    path, _, number = row.source.rpartition(":")
    assert line in Path(path).read_text().splitlines()[int(number) - 1]


class InnerSequence(OwnWorkflow):
    """A workflow that another one runs, of two steps with calls that need nothing of each other."""

    @step
    async def first(self, ctx: Context, ev: StartEvent) -> Question:
        async with ctx.store.edit_state() as state:
            state["query"] = ev.query
        return Question(text=await self.ask(f"first {ev.query}"))

    @step
    async def second(self, ctx: Context, ev: Question) -> StopEvent:
        query = await ctx.store.get("query")
        return StopEvent(result=[ev.text, await self.ask(f"second {query}")])


class RunsSequence(RunsOther):
    """Runs a workflow of two steps twice, one run after the other."""

    def __init__(self, llm: Any) -> None:
        super().__init__(llm)
        self.inner = InnerSequence(llm)

    @step
    async def begin(self, ctx: Context, ev: StartEvent) -> StopEvent:
        results = []
        for word in ev.query.split():
            handler = self.inner.run(query=word)
            async for event in handler.stream_events():
                ctx.write_event_to_stream(Progress(text=type(event).__name__))
            results.append(await handler)
        return StopEvent(result=results)


class RunsSideBySide(RunsSequence):
    """Runs a workflow of two steps twice at once."""

    @step
    async def begin(self, ctx: Context, ev: StartEvent) -> StopEvent:
        return StopEvent(result=await asyncio.gather(*[self.inner.run(query=word) for word in ev.query.split()]))


def test_calls_of_a_nested_workflow_overlap() -> None:
    assert compare_on_server(RunsSequence, query="oats rye") == (1, 2)
    assert compare_on_server(RunsSequence, query="oats rye", runs=2) == (1, 2)


def test_concurrent_nested_runs_have_their_own_results() -> None:
    assert compare_on_server(RunsSideBySide, query="oats rye") == (2, 4)


def test_error_of_a_nested_workflow_is_the_originals() -> None:
    compare_on_server(RunsSequence, query="oats rye", fails_on="second oats")


def test_explain_names_the_steps_of_a_nested_workflow() -> None:
    assert "calls of the step inner.second, while steps before it run" in str(
        accelerate(RunsSequence(HostedLLM())).explain()
    )
