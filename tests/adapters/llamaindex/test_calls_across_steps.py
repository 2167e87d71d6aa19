"""Tests of own models in later steps of a workflow that are certain to run: their calls are prefetched, too."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core import MockEmbedding, VectorStoreIndex
from llama_index.core.schema import TextNode
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, Workflow, step
from llama_index.core.workflow.errors import WorkflowCancelledByUser, WorkflowTimeoutError
from llama_index.core.workflow.events import HumanResponseEvent, InputRequiredEvent
from pydantic import field_validator
from support.hosted_steps import LATENCY_S, HostedLLM, called, compared, run_with_events

from teola_plugin import accelerate

SLOW_S = 0.25
"""Latency of a model whose calls are under way at once also on a busy machine."""


class Planned(Event):
    """A plan was made."""

    plan: str
    topics: list[str] = []


class Sketched(Event):
    """A sketch was made."""

    sketch: str


class Shouted(Event):
    """A text that its class changes."""

    text: str

    @field_validator("text")
    @classmethod
    def shout(cls, text: str) -> str:
        return text.upper()


class Counted(Event):
    """A number of another type than the step gives."""

    count: float


class OwnWorkflow(Workflow):
    """A workflow with a model in an attribute."""

    def __init__(self, llm: HostedLLM, **options: Any) -> None:
        super().__init__(**{"timeout": 60, **options})
        self.llm = llm

    async def ask(self, prompt: str) -> str:
        """Return the model's answer."""
        return (await self.llm.acomplete(prompt)).text


class Sequence(OwnWorkflow):
    """The sketch needs nothing of the plan; the answer needs both."""

    @step
    async def plan(self, ctx: Context, ev: StartEvent) -> Planned:
        await ctx.store.set("query", ev.query)
        return Planned(plan=await self.ask(f"plan {ev.query}"))

    @step
    async def sketch(self, ctx: Context, ev: Planned) -> Sketched:
        query = await ctx.store.get("query")
        await ctx.store.set("plan", ev.plan)
        return Sketched(sketch=await self.ask(f"sketch {query}"))

    @step
    async def answer(self, ctx: Context, ev: Sketched) -> StopEvent:
        plan = await ctx.store.get("plan")
        return StopEvent(result=await self.ask(f"answer from {plan} and {ev.sketch}"))


class Lists(OwnWorkflow):
    """The second step goes over what the event has."""

    @step
    async def plan(self, ev: StartEvent) -> Planned:
        first = await self.ask("first topic")
        return Planned(plan=await self.ask(f"plan {first}"), topics=[first, ev.query])

    @step
    async def explain(self, ev: Planned) -> StopEvent:
        return StopEvent(result=[ev.plan, *[await self.ask(f"explain {topic}") for topic in ev.topics]])


class Renamed(OwnWorkflow):
    """The first step calls nothing."""

    @step
    async def begin(self, ev: StartEvent) -> Planned:
        return Planned(plan=ev.query.strip())

    @step
    async def sketch(self, ev: Planned) -> Sketched:
        return Sketched(sketch=await self.ask(f"sketch {ev.plan}"), query=ev.plan)

    @step
    async def check(self, ev: Sketched) -> StopEvent:
        return StopEvent(result=[ev.sketch, await self.ask(f"check {ev.query}")])


class Engines(OwnWorkflow):
    """A workflow whose steps call engines. The second one makes several calls."""

    def __init__(self, llm: HostedLLM) -> None:
        super().__init__(llm)
        nodes = [TextNode(text=f"text {number}", id_=str(number)) for number in range(3)]
        self.engine = VectorStoreIndex(nodes, embed_model=MockEmbedding(embed_dim=2)).as_query_engine(llm=llm)

    @step
    async def plan(self, ev: StartEvent) -> Planned:
        return Planned(plan=str(await self.engine.aquery(f"plan {ev.query}")))

    @step
    async def detail(self, ev: Planned) -> StopEvent:
        topics = [ev.plan.lower(), ev.plan.upper(), ev.plan]
        return StopEvent(result=[str(await self.engine.aquery(f"detail {topic}")) for topic in topics])


class SyncSteps(OwnWorkflow):
    @step
    def plan(self, ev: StartEvent) -> Planned:
        return Planned(plan=self.llm.complete(f"plan {ev.query}").text, query=ev.query)

    @step
    def sketch(self, ev: Planned) -> StopEvent:
        return StopEvent(result=[ev.plan, self.llm.complete(f"sketch {ev.query}").text])


class NumberOfWorkers(OwnWorkflow):
    @step(num_workers=1)
    async def plan(self, ev: StartEvent) -> Planned:
        return Planned(plan=await self.ask(f"plan {ev.query}"), query=ev.query)

    @step(num_workers=1)
    async def sketch(self, ev: Planned) -> StopEvent:
        return StopEvent(result=[ev.plan, await self.ask(f"sketch {ev.query}")])


@pytest.mark.parametrize("make", [Sequence, Lists, Renamed, Engines, NumberOfWorkers])
def test_calls_of_later_steps_overlap(make: type[OwnWorkflow]) -> None:
    original_llm, llm = compared(make, latency_s=SLOW_S)
    assert original_llm.most_at_once == 1
    assert llm.most_at_once >= 2


def test_calls_of_sync_steps_overlap_with_concurrent_option() -> None:
    _, llm = compared(SyncSteps, latency_s=SLOW_S, concurrent=[HostedLLM])
    assert llm.most_at_once == 2


def test_calls_of_sync_steps_stay_sequential_for_unknown_llm() -> None:
    _, llm = compared(SyncSteps)
    assert llm.most_at_once == 1


def test_explain_names_steps_whose_calls_are_prefetched() -> None:
    explanation = str(accelerate(Sequence(HostedLLM())).explain())
    assert "calls of the step sketch, while steps before it run" in explanation


def test_concurrent_runs_have_their_own_results() -> None:
    llm = HostedLLM()
    fast = accelerate(Sequence(llm))

    async def run() -> list[Any]:
        return list(await asyncio.gather(*(run_with_events(fast, query) for query in ("oats", "rye", "oats"))))

    results = [result for result, _ in asyncio.run(run())]
    assert results == [called(Sequence(HostedLLM()), query)[0] for query in ("oats", "rye", "oats")]
    assert len(llm.prompts) == 9


def test_run_continues_from_the_context_of_another() -> None:
    async def run(workflow: Any) -> list[Any]:
        handler = workflow.run(query="oats")
        first = await handler
        return [first, await workflow.run(query="rye", ctx=handler.ctx)]

    original_llm, llm = HostedLLM(), HostedLLM()
    assert asyncio.run(run(accelerate(Sequence(llm)))) == asyncio.run(run(Sequence(original_llm)))
    assert llm.prompts == original_llm.prompts


# ------------------------------------------------------------ events and what steps change


class Validated(OwnWorkflow):
    @step
    async def shout(self, ev: StartEvent) -> Shouted:
        await self.ask("first")
        return Shouted(text=ev.query)

    @step
    async def sketch(self, ev: Shouted) -> StopEvent:
        return StopEvent(result=await self.ask(f"sketch {ev.text}"))


class Coerced(OwnWorkflow):
    @step
    async def count(self, ev: StartEvent) -> Counted:
        await self.ask("first")
        return Counted(count=len(ev.query))

    @step
    async def sketch(self, ev: Counted) -> StopEvent:
        return StopEvent(result=await self.ask(f"sketch {ev.count}"))


class AttributeOfItsOwn(OwnWorkflow):
    query = "nothing"

    @step
    async def plan(self, ev: StartEvent) -> Planned:
        self.query = ev.query
        return Planned(plan=await self.ask("plan"))

    @step
    async def sketch(self, ev: Planned) -> StopEvent:
        return StopEvent(result=await self.ask(f"sketch {self.query}"))


class ListOfItsOwn(OwnWorkflow):
    def __init__(self, llm: HostedLLM) -> None:
        super().__init__(llm)
        self.notes = ["note"]

    @step
    async def plan(self, ev: StartEvent) -> Planned:
        self.notes.append(ev.query)
        return Planned(plan=await self.ask("plan"))

    @step
    async def sketch(self, ev: Planned) -> StopEvent:
        return StopEvent(result=await self.ask("sketch " + ", ".join(self.notes)))


class ChangedInPlace(OwnWorkflow):
    @step
    async def plan(self, ctx: Context, ev: StartEvent) -> Planned:
        topics = [ev.query]
        await ctx.store.set("topics", topics)
        topics.append("rye")
        return Planned(plan=await self.ask("plan"))

    @step
    async def sketch(self, ctx: Context, ev: Planned) -> StopEvent:
        topics = await ctx.store.get("topics")
        return StopEvent(result=await self.ask("sketch " + ", ".join(topics)))


@pytest.mark.parametrize("make", [Validated, Coerced, AttributeOfItsOwn, ListOfItsOwn, ChangedInPlace])
def test_next_step_reads_current_event_and_workflow_attributes(make: type[OwnWorkflow]) -> None:
    compared(make)


def test_prefetched_call_uses_values_coerced_by_the_event() -> None:
    _, llm = compared(Coerced, latency_s=SLOW_S)
    assert llm.prompts == ["first", "sketch 4.0"]
    assert llm.most_at_once == 2


# ------------------------------------------------------------ steps that are not certain


class Decision(OwnWorkflow):
    @step
    async def plan(self, ev: StartEvent) -> Planned | StopEvent:
        answer = await self.ask("is it enough?")
        if "yes" in answer.split():
            return StopEvent(result="enough")
        return Planned(plan=answer)

    @step
    async def sketch(self, ev: Planned) -> StopEvent:
        return StopEvent(result=await self.ask("sketch"))


class SentEvents(OwnWorkflow):
    """A workflow of two steps, one of which may end the run before the other has made its call."""

    @step
    async def plan(self, ctx: Context, ev: StartEvent) -> Planned | Sketched:
        ctx.send_event(Sketched(sketch=""))
        return Planned(plan=await self.ask("plan"))

    @step
    async def sketch(self, ev: Planned) -> StopEvent | None:
        return StopEvent(result=await self.ask("sketch"))

    @step
    async def end(self, ev: Sketched) -> StopEvent:
        return StopEvent(result="ended")


class TwoReaders(OwnWorkflow):
    @step
    async def plan(self, ev: StartEvent) -> Planned:
        return Planned(plan=await self.ask("plan"))

    @step
    async def end(self, ev: Planned) -> StopEvent:
        return StopEvent(result="ended")

    @step
    async def sketch(self, ev: Planned) -> StopEvent:
        await asyncio.sleep(LATENCY_S)
        return StopEvent(result=await self.ask("sketch"))


@pytest.mark.parametrize("make", [Decision, SentEvents, TwoReaders])
def test_calls_of_uncertain_steps_are_not_prefetched(make: type[OwnWorkflow]) -> None:
    _, llm = compared(make)
    assert llm.most_at_once <= 1


class Approval(OwnWorkflow):
    @step
    async def plan(self, ev: StartEvent) -> InputRequiredEvent:
        return InputRequiredEvent(prefix=await self.ask("plan"))

    @step
    async def sketch(self, ev: HumanResponseEvent) -> Sketched:
        return Sketched(sketch=await self.ask("sketch"))

    @step
    async def end(self, ev: Sketched) -> StopEvent:
        return StopEvent(result=[ev.sketch, await self.ask("end")])


def test_no_call_after_human_input_is_prefetched() -> None:
    llm = HostedLLM(latency_s=SLOW_S)
    fast = accelerate(Approval(llm))

    async def run() -> Any:
        handler = fast.run(query="oats")
        async for event in handler.stream_events():
            if isinstance(event, InputRequiredEvent):
                await asyncio.sleep(2 * LATENCY_S)
                assert llm.prompts == ["plan"]
                handler.ctx.send_event(HumanResponseEvent(response="yes"))
        return await handler

    assert asyncio.run(run()) == ["answer to sketch", "answer to end"]
    assert llm.most_at_once == 2


# ------------------------------------------------------------ errors, retries, ends of runs


@pytest.mark.parametrize("refused", ["plan", "sketch", "answer"])
def test_error_of_a_step_is_the_originals(refused: str) -> None:
    errors, prompts = [], []
    for change in (lambda workflow: workflow, accelerate):
        llm = HostedLLM(fails_on=f"{refused} ")
        with pytest.raises(ValueError, match="refused") as caught:
            called(change(Sequence(llm)))
        errors.append(str(caught.value))
        prompts.append(llm.prompts)
    assert errors[0] == errors[1]
    assert set(prompts[1]) - set(prompts[0]) <= {"sketch oats"}, "more than what was certain without an error"


class ThreeAttempts:
    """A retry policy."""

    def next(self, elapsed_time: float, attempts: int, error: Exception, **kwargs: Any) -> float | None:
        """Return the seconds until the next attempt."""
        return 0.01 if attempts < 3 else None


class Retried(OwnWorkflow):
    @step(retry_policy=ThreeAttempts())
    async def plan(self, ev: StartEvent) -> Planned:
        return Planned(plan=await self.ask(f"plan {ev.query}"), query=ev.query)

    @step(retry_policy=ThreeAttempts())
    async def sketch(self, ev: Planned) -> StopEvent:
        return StopEvent(result=[ev.plan, await self.ask(f"sketch {ev.query}")])


class FailingTwice(HostedLLM):
    """Refuses the first two calls with a prompt that contains a word."""

    word: str
    _refusals: int = 0

    def _end(self, prompt: str) -> str:
        answer = super()._end(prompt)
        if self.word in prompt and self._refusals < 2:
            self._refusals += 1
            raise ValueError("refused")
        return answer


@pytest.mark.parametrize("word", ["plan oats", "sketch oats"])
def test_retried_step_makes_its_calls_again(word: str) -> None:
    original_llm, llm = FailingTwice(word=word), FailingTwice(word=word)
    expected = called(Retried(original_llm))
    assert called(accelerate(Retried(llm))) == expected
    assert llm.prompts.count(word) == original_llm.prompts.count(word) == 3


async def begin(fast: Any, llm: HostedLLM) -> Any:
    """Start a run. Return its handler once the first two calls are under way."""
    handler = fast.run(query="oats")
    async with asyncio.timeout(5):
        while llm.most_at_once < 2:
            await asyncio.sleep(0.001)
    return handler


def test_cancelled_run_cancels_prefetched_calls() -> None:
    llm = HostedLLM(latency_s=2 * SLOW_S)
    fast = accelerate(Sequence(llm))

    async def run() -> None:
        handler = await begin(fast, llm)
        await handler.cancel_run()
        with pytest.raises(WorkflowCancelledByUser):
            await handler
        await asyncio.sleep(0.05)
        assert llm.running == 0

    asyncio.run(run())
    assert llm.prompts == ["plan oats", "sketch oats"]


def test_run_timeout_cancels_prefetched_calls() -> None:
    llm = HostedLLM(latency_s=3.0)
    fast = accelerate(Sequence(llm, timeout=1.0))

    async def run() -> None:
        with pytest.raises(WorkflowTimeoutError):
            await (await begin(fast, llm))
        await asyncio.sleep(0.05)
        assert llm.running == 0

    asyncio.run(run())
    assert llm.prompts == ["plan oats", "sketch oats"]


# ------------------------------------------------------------ lists of the workflow that steps change


class Logging(OwnWorkflow):
    """A workflow that keeps a log on itself."""

    def __init__(self, llm: HostedLLM) -> None:
        super().__init__(llm)
        self.log: list[str] = ["begun"]
        self.seen: set[str] = set()

    def note(self, text: str) -> str:
        """Add a text to the log, and return it."""
        self.log.append(text)
        return text


class NotesBetweenCalls(Logging):
    @step
    async def plan(self, ev: StartEvent) -> StopEvent:
        self.log.append(ev.query)
        first = await self.ask(f"first {ev.query}")
        self.log.append(self.note(first))
        self.seen.add(first)
        second = await self.ask(f"second {ev.query}")
        return StopEvent(result=[first, second, *self.log])


class NotesInALoop(Logging):
    @step
    async def plan(self, ev: StartEvent) -> StopEvent:
        answers = []
        for word in ("first", "second", "third"):
            answer = await self.ask(f"{word} {ev.query}")
            self.log.append(answer)
            answers.append(self.note(answer))
        return StopEvent(result=answers)


class NotesBeforeTheNextStep(Logging):
    @step
    async def plan(self, ev: StartEvent) -> Planned:
        return Planned(plan=self.note(await self.ask(f"plan {ev.query}")))

    @step
    async def answer(self, ev: Planned) -> StopEvent:
        return StopEvent(result=[await self.ask("independent"), ev.plan])


@pytest.mark.parametrize("make", [NotesBetweenCalls, NotesInALoop, NotesBeforeTheNextStep])
def test_calls_behind_notes_in_a_list_of_the_workflow_are_prefetched(make: type[OwnWorkflow]) -> None:
    original_llm, llm = compared(make, latency_s=SLOW_S)

    assert original_llm.most_at_once == 1
    assert llm.most_at_once >= 2


class ReadsItsNotes(Logging):
    """Prompts read the list that the step changes."""

    @step
    async def plan(self, ev: StartEvent) -> StopEvent:
        first = self.note(await self.ask(f"first {', '.join(self.log)}"))
        second = self.note(await self.ask(f"second {self.log}"))
        third = await self.ask(f"third {len(self.log)} {self.log[-1]}")
        return StopEvent(result=[first, second, third])


class NextStepReadsNotes(Logging):
    """The next step reads the list, and so does a helper."""

    def notes(self) -> str:
        return " and ".join(self.log)

    @step
    async def plan(self, ev: StartEvent) -> Planned:
        self.log.append(ev.query)
        return Planned(plan=await self.ask(f"plan {ev.query}"))

    @step
    async def answer(self, ev: Planned) -> StopEvent:
        answers = [await self.ask(f"{self.notes()}")]
        for note in self.log:
            answers.append(await self.ask(f"check {note}"))
        return StopEvent(result=answers)


@pytest.mark.parametrize("make", [ReadsItsNotes, NextStepReadsNotes])
def test_prompts_with_notes_of_the_workflow_are_the_originals(make: type[OwnWorkflow]) -> None:
    original_llm, llm = HostedLLM(), HostedLLM()
    original, fast = make(original_llm), accelerate(make(llm))

    for query in ("oats", "rye", "oats"):
        assert called(fast, query) == called(original, query)

    assert llm.prompts == original_llm.prompts


class InsertsIntoAnIndex(OwnWorkflow):
    """The step changes an index, which is no list: the search behind it finds the new text."""

    def __init__(self, llm: HostedLLM) -> None:
        super().__init__(llm)
        self.index = VectorStoreIndex([TextNode(text="old", id_="old")], embed_model=MockEmbedding(embed_dim=2))
        self.retriever = self.index.as_retriever(similarity_top_k=5)

    @step
    async def plan(self, ev: StartEvent) -> StopEvent:
        first = await self.ask(f"first {ev.query}")
        self.index.insert_nodes([TextNode(text=first, id_="new")])
        nodes = await self.retriever.aretrieve(ev.query)
        return StopEvent(result=[await self.ask(f"grade {node.text}") for node in nodes])


def test_search_behind_a_change_of_an_index_finds_it() -> None:
    compared(InsertsIntoAnIndex)


def test_error_behind_a_note_is_the_originals() -> None:
    errors = []
    for change in (lambda workflow: workflow, accelerate):
        workflow = NotesInALoop(HostedLLM(fails_on="second"))
        with pytest.raises(Exception) as caught:
            called(change(workflow))
        errors.append((type(caught.value), str(caught.value), workflow.log))

    assert errors[0] == errors[1]
