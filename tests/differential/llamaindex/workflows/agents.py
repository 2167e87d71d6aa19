"""Agents as LlamaIndex's documentation builds them, and the messages that they get."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from differential.llamaindex.workflows.stage import Play, Stage, Told, call, do
from llama_index.core.agent.workflow import AgentWorkflow, CodeActAgent, FunctionAgent, ReActAgent
from llama_index.core.memory import ChatMemoryBuffer
from llama_index.core.tools import FunctionTool, QueryEngineTool, RetrieverTool
from llama_index.core.workflow import Context, HumanResponseEvent, InputRequiredEvent
from pydantic import BaseModel

LONG = "and what is more, it is said that oats and ivy grow there; " * 12


_looking: list[str] = []


async def look(at: str) -> str:
    """What is there. Takes a while, as tools do; of those under way the shortest name comes first."""
    _looking.append(at)
    try:
        await asyncio.sleep(0.03)
        while any(len(other) < len(at) for other in _looking):
            await asyncio.sleep(0.002)
        await asyncio.sleep(0.06)
    finally:
        _looking.remove(at)
    return f"{at}: {LONG}"


async def stare(at: str) -> str:
    """Takes longer than anybody waits."""
    await asyncio.sleep(30)
    return at


def add(a: int, b: int) -> int:
    """The sum."""
    return a + b


async def fail(at: str) -> str:
    """Never there."""
    raise LookupError(f"nothing at {at}")


async def note(ctx: Context, what: str) -> str:
    """Writes something down."""
    async with ctx.store.edit_state() as state:
        state["notes"] = [*state.get("notes", []), what]
    return "noted"


async def permit(ctx: Context, what: str) -> str:
    """Asks a human."""
    said = await ctx.wait_for_event(HumanResponseEvent, waiter_event=InputRequiredEvent(prefix=what))
    return f"they say {said.response}"


def engines(stage: Stage, fast: Callable[[Any], Any] = lambda engine: engine) -> list[Any]:
    library = stage.library
    return [
        QueryEngineTool.from_defaults(fast(library.fused()), name="farm", description="what grows"),
        QueryEngineTool.from_defaults(fast(library.rag("tree_summarize", 5)), name="port", description="what sails"),
        RetrieverTool.from_defaults(fast(library.fusion()), name="shelf", description="passages"),
    ]


def function(stage: Stage, *tools: Any, **options: Any) -> FunctionAgent:
    given = {"system_prompt": "Use your tools.", "llm": stage.llm, **options}
    return FunctionAgent(tools=list(tools or (look, add, fail, note, permit, stare)), **given)


def react(stage: Stage, *tools: Any, **options: Any) -> ReActAgent:
    return ReActAgent(tools=list(tools or (look, add, fail)), llm=stage.llm, **options)


def act(name: str, **arguments: Any) -> str:
    """Return what a model writes for a `ReActAgent`."""
    return f"Thought: I need {name}.\nAction: {name}\nAction Input: {json.dumps(arguments)}"


DONE = "Thought: I can answer without using any more tools.\nAnswer: so it is"


def direct(stage: Stage) -> FunctionAgent:
    return function(stage, FunctionTool.from_defaults(look, return_direct=True), add)


class Fact(BaseModel):
    """Something true."""

    of: str


def structured(stage: Stage) -> FunctionAgent:
    return function(stage, structured_output_fn=lambda messages: {"of": str(len(messages))})


def coder(stage: Stage) -> CodeActAgent:
    async def execute(code: str) -> str:
        await asyncio.sleep(0.02)
        return f"ran {code} {LONG}"

    return CodeActAgent(code_execute_fn=execute, llm=stage.llm, tools=[add])


def team(stage: Stage, **options: Any) -> AgentWorkflow:
    """Return two agents that hand over to each other."""
    research = function(stage, look, *engines(stage), name="research", description="finds", can_handoff_to=["writer"])
    writer = function(stage, add, note, name="writer", description="writes", can_handoff_to=["research"])
    return AgentWorkflow(agents=[research, writer], root_agent="research", **options)


def mixed(stage: Stage) -> AgentWorkflow:
    """Return a team of a function agent and a ReAct agent."""
    first = function(stage, look, name="first", description="looks")
    second = react(stage, add, look, name="second", description="adds")
    return AgentWorkflow(agents=[first, second], root_agent="first", initial_state={"a": 1})


# ------------------------------------------------------------ plays


def told(*rounds: Any, heard: Callable[[Any, Any], Any] = lambda handler, event: None, **given: Any) -> Play:
    async def play(agent: Any, told: Told) -> Any:
        return await told.listen(agent.run(user_msg=do(*rounds), **given), heard)

    return play


async def conversation(agent: Any, told: Told) -> Any:
    """Ask two questions in one context with a memory."""
    ctx, memory = Context(agent), ChatMemoryBuffer.from_defaults(token_limit=40_000)
    first = await told.listen(agent.run(user_msg=do([call("look", at="sea")]), ctx=ctx, memory=memory))
    second = await told.listen(agent.run(user_msg=do([call("add", a=1, b=2)]), ctx=ctx))
    return [first, second, await memory.aget_all()]


def positional(*rounds: Any) -> Play:
    async def play(agent: Any, told: Told) -> Any:
        return await told.listen(agent.run(do(*rounds)))

    return play


async def three(agent: Any, told: Told) -> Any:
    asked = [do([call("look", at="s" * n), call("add", a=n, b=1)], [call("look", at="x")]) for n in (1, 2, 3)]
    return await asyncio.gather(*(agent.run(user_msg=one) for one in asked))


async def cancelled(agent: Any, told: Told) -> Any:
    handler = agent.run(user_msg=do([call("stare", at="far away")]))
    await asyncio.sleep(0.1)
    await handler.cancel_run()
    return await told.listen(handler)
