"""Workflows as LlamaIndex's documentation writes them, each with one feature."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Annotated, Any

from differential.llamaindex.workflows.stage import Play, Stage, Told
from llama_index.core.llms import ChatMessage
from llama_index.core.workflow import (
    Context,
    Event,
    HumanResponseEvent,
    InputRequiredEvent,
    StartEvent,
    StopEvent,
    Workflow,
    step,
)
from llama_index.core.workflow.resource import Resource
from pydantic import BaseModel
from workflows.retry_policy import retry_policy, stop_after_attempt, wait_fixed

# ------------------------------------------------------------ what events there are


class Retrieved(Event):
    texts: list[str]


class Part(Event):
    number: int


class Done(Event):
    said: str


class Progress(Event):
    piece: str


class Question(StartEvent):
    about: str


class Verdict(StopEvent):
    text: str
    sources: int


# ------------------------------------------------------------ workflows


class Rag(Workflow):
    """Retrieve, then answer; the store of the context carries the question."""

    def __init__(self, stage: Stage, **options: Any) -> None:
        super().__init__(**options)
        self.llm, self.retriever = stage.llm, stage.library.index.as_retriever(similarity_top_k=2)

    @step
    async def retrieve(self, ctx: Context, ev: StartEvent) -> Retrieved:
        await ctx.store.set("question", ev.about)
        return Retrieved(texts=[node.get_content() for node in await self.retriever.aretrieve(ev.about)])

    @step
    async def answer(self, ctx: Context, ev: Retrieved) -> StopEvent:
        about = await ctx.store.get("question")
        return StopEvent(result=str(await self.llm.acomplete(f"{ev.texts} {about}")))


class Typed(Workflow):
    """Events of its own at both ends, and tokens on the stream."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.llm = stage.llm

    @step
    async def only(self, ctx: Context, ev: Question) -> Verdict:
        text = ""
        async for piece in await self.llm.astream_chat([ChatMessage(ev.about)]):
            ctx.write_event_to_stream(Progress(piece=piece.delta or ""))
            text = piece.message.content or ""
        return Verdict(text=text, sources=2)


class FanOut(Workflow):
    """A workflow that handles as many events at the same time as it has workers."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.llm, self.now, self.most_at_once = stage.llm, 0, 0

    @step
    async def split(self, ctx: Context, ev: StartEvent) -> Part | None:
        for number in range(5):
            ctx.send_event(Part(number=number))
        return None

    @step(num_workers=2)
    async def work(self, ev: Part) -> Done:
        self.now += 1
        self.most_at_once = max(self.most_at_once, self.now)
        said = str(await self.llm.acomplete(f"part {ev.number}"))
        await asyncio.sleep(0.02)
        self.now -= 1
        return Done(said=said)

    @step
    async def join(self, ctx: Context, ev: Done) -> StopEvent | None:
        found = ctx.collect_events(ev, [Done] * 5)
        return None if found is None else StopEvent(result=(self.most_at_once, sorted(one.said for one in found)))


class Retrying(Workflow):
    """Fails twice, and tells of it."""

    def __init__(self, stage: Stage, fails: int = 2) -> None:
        super().__init__()
        self.llm, self.fails = stage.llm, fails

    @step(retry_policy=retry_policy(wait=wait_fixed(0.001), stop=stop_after_attempt(3)))
    async def only(self, ctx: Context, ev: StartEvent) -> StopEvent:
        said = str(await self.llm.acomplete(f"attempt {ctx.retry_info().retry_number}"))
        if ctx.retry_info().retry_number < self.fails:
            raise ValueError(said)
        return StopEvent(result=said)


class Slow(Workflow):
    def __init__(self, stage: Stage, timeout: float = 0.1) -> None:
        super().__init__(timeout=timeout)
        self.llm = stage.llm

    @step
    async def only(self, ev: StartEvent) -> StopEvent:
        await self.llm.acomplete("one")
        await asyncio.sleep(30)
        return StopEvent()


class Asking(Workflow):
    """A human answers on the stream."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.llm = stage.llm

    @step
    async def ask(self, ctx: Context, ev: StartEvent) -> InputRequiredEvent:
        await ctx.store.set("draft", str(await self.llm.acomplete("a draft")))
        return InputRequiredEvent(prefix="good?")

    @step
    async def answered(self, ctx: Context, ev: HumanResponseEvent) -> StopEvent:
        draft = await ctx.store.get("draft")
        return StopEvent(result=str(await self.llm.acomplete(f"{draft} and {ev.response}")))


class Waiting(Workflow):
    """A human answers inside a step, which runs again."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.llm = stage.llm

    @step
    async def only(self, ctx: Context, ev: StartEvent) -> StopEvent:
        draft = str(await self.llm.acomplete("a draft"))
        said = await ctx.wait_for_event(HumanResponseEvent, waiter_event=InputRequiredEvent(prefix=draft))
        return StopEvent(result=str(await self.llm.acomplete(f"{draft} and {said.response}")))


class Outer(Workflow):
    """A workflow that runs another workflow in a step."""

    def __init__(self, stage: Stage, inner: Any = None) -> None:
        super().__init__()
        self.llm, self.inner = stage.llm, inner or Rag(stage)

    @step
    async def only(self, ev: StartEvent) -> StopEvent:
        found = await self.inner.run(about=ev.about)
        return StopEvent(result=str(await self.llm.acomplete(f"of {found}")))


class Sync(Workflow):
    """A step that is no coroutine runs on a thread."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.llm = stage.llm

    @step
    def only(self, ev: StartEvent) -> StopEvent:
        return StopEvent(result=str(self.llm.complete("on a thread")))


class State(BaseModel):
    said: list[str] = []


class Stateful(Workflow):
    """A typed state, and steps named as something of ours is."""

    def __init__(self, stage: Stage) -> None:
        super().__init__()
        self.llm, self.report = stage.llm, "mine"

    @step
    async def plan(self, ctx: Context[State], ev: StartEvent) -> Part:
        async with ctx.store.edit_state() as state:
            state.said.append(str(await self.llm.acomplete("a plan")))
        return Part(number=len(self.report))

    @step
    async def explain(self, ctx: Context[State], ev: Part) -> StopEvent:
        state = await ctx.store.get_state()
        return StopEvent(result=(state.said, str(await self.llm.acomplete(f"explain {ev.number}"))))


def given(stage: Stage) -> type[Workflow]:
    """Return a workflow with a step that gets its model from a factory, and one that is a function."""

    def model() -> Any:
        return stage.llm

    class Injected(Workflow):
        @step
        async def first(self, ev: StartEvent, llm: Annotated[Any, Resource(model)]) -> Done:
            return Done(said=str(await llm.acomplete("injected")))

    @step(workflow=Injected)
    async def last(ev: Done) -> StopEvent:
        return StopEvent(result=str(await stage.llm.acomplete(f"free {ev.said}")))

    return Injected


class Engines(Workflow):
    """Engines in steps, of which nobody knows but the step."""

    def __init__(self, stage: Stage, fast: Callable[[Any], Any] = lambda engine: engine) -> None:
        super().__init__()
        self.engine, self.searches = fast(stage.library.fused("tree_summarize")), fast(stage.library.fusion())

    @step
    async def only(self, ev: StartEvent) -> StopEvent:
        found = await self.searches.aretrieve(ev.about)
        return StopEvent(result=f"{len(found)} {await self.engine.aquery(ev.about)}")


# ------------------------------------------------------------ plays


def asked(**given: Any) -> Play:
    async def play(workflow: Any, told: Told) -> Any:
        return await told.listen(workflow.run(**(given or {"about": "what grows"})))

    return play


async def unheard(workflow: Any, told: Told) -> Any:
    return await workflow.run(about="what grows")


async def by_event(workflow: Any, told: Told) -> Any:
    return await told.listen(workflow.run(start_event=Question(about="what grows")))


def answer(handler: Any, event: Any) -> None:
    if isinstance(event, InputRequiredEvent):
        handler.ctx.send_event(HumanResponseEvent(response="yes"))


async def human(workflow: Any, told: Told) -> Any:
    return await told.listen(workflow.run(), answer)


async def five(workflow: Any, told: Told) -> Any:
    handlers = [workflow.run(about=f"what {i}") for i in range(5)]
    return await asyncio.gather(*handlers)


async def again(workflow: Any, told: Told) -> Any:
    """Run twice in the same context."""
    ctx = Context(workflow)
    return [await told.listen(workflow.run(about=about, ctx=ctx)) for about in ("what grows", "what sails")]


async def cancelled(workflow: Any, told: Told) -> Any:
    handler = workflow.run(about="what grows")
    await asyncio.sleep(0.02)
    await handler.cancel_run()
    return await told.listen(handler)
