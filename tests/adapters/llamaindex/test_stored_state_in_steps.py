"""Tests of steps that read and write the state of their run: calls that depend on it are prefetched if certain."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from llama_index.core.workflow import Context, Event, StartEvent, StopEvent, step
from llama_index.core.workflow.errors import WorkflowCancelledByUser, WorkflowTimeoutError
from pydantic import BaseModel, ConfigDict, Field, field_validator
from support.hosted_steps import HostedLLM
from support.served_workflows import OwnWorkflow, compare_on_server

from teola_plugin import accelerate


class Planned(Event):
    """A plan was made."""

    text: str = "nothing"


class Progress(Event):
    """Something was done."""

    text: str


class Notes(BaseModel):
    """A state with fields."""

    query: str = ""
    count: int = 0
    notes: list[str] = Field(default_factory=list)


class Checked(BaseModel):
    """A state that changes what it is assigned."""

    model_config = ConfigDict(validate_assignment=True)
    query: str = ""

    @field_validator("query")
    @classmethod
    def shout(cls, query: str) -> str:
        return query.upper()


class TypedEdit(OwnWorkflow):
    """Edits a state with fields in both steps."""

    @step
    async def plan(self, ctx: Context[Notes], ev: StartEvent) -> Planned:
        async with ctx.store.edit_state() as state:
            state.query = ev.query
            state.count += 2
        return Planned(text=await self.ask(f"plan {ev.query}"))

    @step
    async def answer(self, ctx: Context[Notes], ev: Planned) -> StopEvent:
        async with ctx.store.edit_state() as state:
            state.count += 1
            query = state.query
        answer = await self.ask(f"answer {query}, number {await ctx.store.get('count')}")
        return StopEvent(result=[ev.text, answer])


class KeyEdit(OwnWorkflow):
    """Edits a state without declared fields, by key and by attribute, between its calls."""

    @step
    async def plan(self, ctx: Context, ev: StartEvent) -> Planned:
        async with ctx.store.edit_state() as state:
            state["query"] = ev.query
            state.number = 1
        plan = await self.ask(f"plan {ev.query}")
        async with ctx.store.edit_state() as state:
            state["plan"] = plan
        return Planned(text=plan)

    @step
    async def answer(self, ctx: Context, ev: Planned) -> StopEvent:
        query = await ctx.store.get("query")
        async with ctx.store.edit_state() as state:
            state["number"] += 1
            number, missing = state["number"], state.get("missing", "none")
        first = await self.ask(f"first {query} {number} {missing}")
        async with ctx.store.edit_state() as state:
            state["first"] = first
            return StopEvent(result=[await self.ask(f"second {state['query']}"), state["plan"]])


class WholeState(OwnWorkflow):
    """Reads the state as one object."""

    @step
    async def plan(self, ctx: Context[Notes], ev: StartEvent) -> Planned:
        await ctx.store.set("query", ev.query)
        return Planned(text=await self.ask(f"plan {ev.query}"))

    @step
    async def answer(self, ctx: Context[Notes], ev: Planned) -> StopEvent:
        state = await ctx.store.get_state()
        return StopEvent(result=[ev.text, await self.ask(f"answer {state.query} {state.count}")])


class Defaults(OwnWorkflow):
    """Reads keys that may be missing."""

    @step
    async def plan(self, ctx: Context, ev: StartEvent) -> Planned:
        number = await ctx.store.get("number", default=0)
        await ctx.store.set("number", number + 1)
        plan = await self.ask(f"plan {number}")
        return Planned(text=plan)

    @step
    async def answer(self, ctx: Context, ev: Planned) -> StopEvent:
        number = await ctx.store.get("number", default=None)
        other = await ctx.store.get("other", "nothing")
        return StopEvent(result=[ev.text, await self.ask(f"answer {number} {other}")])


class NestedKeys(OwnWorkflow):
    @step
    async def plan(self, ctx: Context, ev: StartEvent) -> Planned:
        await ctx.store.set("user", {"name": ev.query})
        return Planned(text=await self.ask("plan"))

    @step
    async def answer(self, ctx: Context, ev: Planned) -> StopEvent:
        return StopEvent(result=[ev.text, await self.ask(f"answer {await ctx.store.get('user.name')}")])


class AppendedNotes(OwnWorkflow):
    """The list is changed in place; the call that does not need it is certain."""

    @step
    async def plan(self, ctx: Context[Notes], ev: StartEvent) -> Planned:
        async with ctx.store.edit_state() as state:
            state.query = ev.query
            state.notes.append(ev.query)
        return Planned(text=await self.ask("plan"))

    @step
    async def answer(self, ctx: Context[Notes], ev: Planned) -> StopEvent:
        query = await self.ask(f"query {await ctx.store.get('query')}")
        notes = await self.ask(f"notes {await ctx.store.get('notes')}")
        return StopEvent(result=[query, notes])


class WrittenEvents(OwnWorkflow):
    """Writes events before, between and after its calls."""

    @step
    async def plan(self, ctx: Context, ev: StartEvent) -> StopEvent:
        ctx.write_event_to_stream(Progress(text="begins"))
        first = await self.ask("first")
        ctx.write_event_to_stream(Progress(text=first))
        second = await self.ask("second")
        ctx.write_event_to_stream(Progress(text="ends"))
        return StopEvent(result=[first, second])


class DecidedByState(OwnWorkflow):
    """The number in the state decides whether it goes on."""

    @step
    async def plan(self, ctx: Context, ev: StartEvent | Planned) -> Planned | StopEvent:
        number = await ctx.store.get("number", default=0)
        if number >= 2:
            return StopEvent(result=number)
        await ctx.store.set("number", number + 1)
        query = ev.query if isinstance(ev, StartEvent) else ev.text
        first = await self.ask(f"first {query}")
        second = await self.ask(f"second {query} {number}")
        return Planned(text=f"{first}, {second}")


CERTAIN = (TypedEdit, KeyEdit, WholeState, Defaults, NestedKeys, AppendedNotes, WrittenEvents, DecidedByState)


@pytest.mark.parametrize("make", CERTAIN)
def test_certain_calls_around_state_edits_overlap(make: Any) -> None:
    assert compare_on_server(make) == (1, 2 if make is not KeyEdit else 3)


@pytest.mark.parametrize("make", [TypedEdit, Defaults, DecidedByState])
def test_every_run_has_its_own_state(make: Any) -> None:
    assert compare_on_server(make, runs=2)[1] == 2


def test_continued_run_has_the_state_of_the_earlier_run() -> None:
    async def two_runs(workflow: Any) -> list[Any]:
        handler = workflow.run(query="oats")
        first = await handler
        return [first, await workflow.run(query="rye", ctx=handler.ctx)]

    original_llm, llm = HostedLLM(), HostedLLM()
    expected = asyncio.run(two_runs(Defaults(original_llm)))
    assert asyncio.run(two_runs(accelerate(Defaults(llm)))) == expected
    assert llm.prompts == original_llm.prompts
    assert llm.most_at_once == 2


# ------------------------------------------------------------ reads that are not certain


class ValidatedState(OwnWorkflow):
    """The state changes what is written to it."""

    @step
    async def plan(self, ctx: Context[Checked], ev: StartEvent) -> Planned:
        async with ctx.store.edit_state() as state:
            state.query = ev.query
        return Planned(text=await self.ask("plan"))

    @step
    async def answer(self, ctx: Context[Checked], ev: Planned) -> StopEvent:
        return StopEvent(result=await self.ask(f"answer {await ctx.store.get('query')}"))


class ReplacedState(OwnWorkflow):
    @step
    async def plan(self, ctx: Context[Notes], ev: StartEvent) -> Planned:
        await ctx.store.set("query", "before")
        await ctx.store.set_state(Notes(query=ev.query))
        return Planned(text=await self.ask("plan"))

    @step
    async def answer(self, ctx: Context[Notes], ev: Planned) -> StopEvent:
        return StopEvent(result=await self.ask(f"answer {await ctx.store.get('query')}"))


class ClearedState(OwnWorkflow):
    @step
    async def plan(self, ctx: Context[Notes], ev: StartEvent) -> Planned:
        await ctx.store.set("query", ev.query)
        await ctx.store.clear()
        return Planned(text=await self.ask("plan"))

    @step
    async def answer(self, ctx: Context[Notes], ev: Planned) -> StopEvent:
        return StopEvent(result=await self.ask(f"answer {await ctx.store.get('query')}"))


class CopyOfState(OwnWorkflow):
    """Writes to what `get_state` returns, which may or may not be the state."""

    @step
    async def plan(self, ctx: Context, ev: StartEvent) -> Planned:
        await ctx.store.set("query", "before")
        state = await ctx.store.get_state()
        state["query"] = ev.query
        return Planned(text=await self.ask("plan"))

    @step
    async def answer(self, ctx: Context, ev: Planned) -> StopEvent:
        return StopEvent(result=await self.ask(f"answer {await ctx.store.get('query')}"))


class EditInLoop(OwnWorkflow):
    @step
    async def plan(self, ctx: Context[Notes], ev: StartEvent) -> Planned:
        for letter in ev.query:
            async with ctx.store.edit_state() as state:
                state.query += letter.upper()
        return Planned(text=await self.ask("plan"))

    @step
    async def answer(self, ctx: Context[Notes], ev: Planned) -> StopEvent:
        return StopEvent(result=await self.ask(f"answer {await ctx.store.get('query')}"))


class EditByHelper(OwnWorkflow):
    """Code that is not understood gets the state."""

    @step
    async def plan(self, ctx: Context[Notes], ev: StartEvent) -> Planned:
        async with ctx.store.edit_state() as state:
            exec("state.query = 'changed'", {"state": state})
        return Planned(text=await self.ask("plan"))

    @step
    async def answer(self, ctx: Context[Notes], ev: Planned) -> StopEvent:
        return StopEvent(result=await self.ask(f"answer {await ctx.store.get('query')}"))


class ExtendedAlias(OwnWorkflow):
    """A list has two names while it grows."""

    @step
    async def plan(self, ctx: Context[Notes], ev: StartEvent) -> StopEvent:
        async with ctx.store.edit_state() as state:
            notes = state.notes
            state.notes += [ev.query]
            first = await self.ask("first")
            second = await self.ask(f"second {notes} {state.notes}")
        return StopEvent(result=[first, second, await self.ask(f"third {await ctx.store.get('notes')}")])


class WholeEvent(OwnWorkflow):
    """A workflow whose prompt contains a whole event and a state, whose text is not known before."""

    @step
    async def plan(self, ctx: Context[Notes], ev: StartEvent) -> StopEvent:
        state = await ctx.store.get_state()
        first = await self.ask(f"first {ev}")
        second = await self.ask(f"second {state} {[*ev]}")
        return StopEvent(result=[first, second])


class DeclaredField(OwnWorkflow):
    """`get` of an event reads no declared field."""

    @step
    async def plan(self, ev: StartEvent) -> Planned:
        return Planned(text="plan", query=ev.query)

    @step
    async def answer(self, ev: Planned) -> StopEvent:
        first = await self.ask(f"first {ev.get('text')} {ev.get('query')} {ev.get('other', 1)}")
        return StopEvent(result=[first, await self.ask(f"second {ev.text} {getattr(ev, 'query', None)}")])


class OtherClass(OwnWorkflow):
    """An event of another class takes another way."""

    @step
    async def plan(self, ev: StartEvent | Planned) -> Planned | StopEvent:
        if isinstance(ev, Planned):
            return StopEvent(result=ev.text)
        first = await self.ask("first")
        return Planned(text=f"{first} {await self.ask('second')}")


UNCERTAIN = (ValidatedState, ReplacedState, ClearedState, CopyOfState, EditInLoop, EditByHelper, ExtendedAlias)


@pytest.mark.parametrize("make", [*UNCERTAIN, WholeEvent])
def test_calls_with_unknown_state_equal_the_originals(make: Any) -> None:
    assert compare_on_server(make)[0] == 1


@pytest.mark.parametrize("make", [DeclaredField, OtherClass])
def test_calls_that_depend_on_an_event_equal_the_originals(make: Any) -> None:
    assert compare_on_server(make) == (1, 2)


class Ready(Event):
    """One of several."""

    number: int


class Done(Event):
    """One of several is done."""


class Racing(OwnWorkflow):
    """Several runs of a step read what the others write."""

    @step
    async def begin(self, ctx: Context, ev: StartEvent) -> Ready | None:
        await ctx.store.set("number", 0)
        await ctx.store.set("notes", [])
        for number in range(3):
            ctx.send_event(Ready(number=number))
        return None

    @step(num_workers=3)
    async def count(self, ctx: Context, ev: Ready) -> Done:
        await asyncio.sleep(0.05 * ev.number)
        await self.ask(f"first {ev.number}")
        number, notes = await ctx.store.get("number"), await ctx.store.get("notes")
        await ctx.store.set("number", number + 1)
        prompt = f"second {ev.number} {number} {notes}"
        notes.append(ev.number)
        await self.ask(prompt)
        return Done()

    @step
    async def end(self, ctx: Context, ev: Done) -> StopEvent | None:
        return None if ctx.collect_events(ev, [Done] * 3) is None else StopEvent(result="ended")


class RacingAttribute(Racing):
    """Several runs of a step read an attribute that the others write."""

    number = 0

    @step(num_workers=3)
    async def count(self, ctx: Context, ev: Ready) -> Done:
        await asyncio.sleep(0.05 * ev.number)
        await self.ask(f"first {ev.number}")
        prompt = f"second {ev.number} {self.number}"
        self.number += 1
        await self.ask(prompt)
        return Done()


@pytest.mark.parametrize("make", [Racing, RacingAttribute])
def test_state_changed_by_parallel_steps_gives_the_originals_result(make: Any) -> None:
    compare_on_server(make)


# ------------------------------------------------------------ errors


class RaisesInEdit(OwnWorkflow):
    @step
    async def plan(self, ctx: Context[Notes], ev: StartEvent) -> Planned:
        plan = await self.ask("plan")
        async with ctx.store.edit_state() as state:
            state.query = ev.query
            if ev.query == "oats":
                raise ValueError("no oats")
        return Planned(text=plan)

    @step
    async def answer(self, ctx: Context[Notes], ev: Planned) -> StopEvent:
        return StopEvent(result=await self.ask(f"answer {await ctx.store.get('query')}"))


def test_error_inside_a_state_edit_is_the_originals() -> None:
    assert compare_on_server(RaisesInEdit)[1] == 1


def test_call_after_a_state_edit_without_error_is_prefetched() -> None:
    assert compare_on_server(RaisesInEdit, query="rye") == (1, 2)


def test_failed_request_around_a_state_edit_is_the_originals_error() -> None:
    compare_on_server(TypedEdit, fails_on="answer")


@pytest.mark.parametrize("way", ["cancelled", "late"])
def test_stopped_run_leaves_the_state_of_the_original(way: str) -> None:
    async def run(workflow: Any, llm: HostedLLM) -> tuple[str, Any]:
        handler = workflow.run(query="oats")
        async with asyncio.timeout(5):
            while not llm.running:
                await asyncio.sleep(0.001)
        if way == "cancelled":
            await handler.cancel_run()
        with pytest.raises(WorkflowCancelledByUser if way == "cancelled" else WorkflowTimeoutError) as caught:
            await handler
        await asyncio.sleep(0.05)
        assert llm.running == 0
        return str(caught.value), (await handler.ctx.store.get_state()).model_dump()

    outcomes = []
    for change in (lambda workflow: workflow, accelerate):
        llm = HostedLLM(latency_s=5.0)
        outcomes.append(asyncio.run(run(change(TypedEdit(llm, timeout=1.0)), llm)))
    assert outcomes[0] == outcomes[1]
    assert outcomes[0][1] == {"query": "oats", "count": 2, "notes": []}


def test_explain_names_the_prefetched_call_after_a_state_edit() -> None:
    explanation = str(accelerate(TypedEdit(HostedLLM())).explain())
    assert "calls of the step answer, while steps before it run" in explanation
