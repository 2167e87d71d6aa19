"""Agents with middleware."""

from __future__ import annotations

from typing import Any

from langchain.agents import AgentState, create_agent
from langchain.agents.middleware import (
    AgentMiddleware,
    HumanInTheLoopMiddleware,
    ModelCallLimitMiddleware,
    ModelFallbackMiddleware,
    SummarizationMiddleware,
    ToolRetryMiddleware,
    after_model,
    before_model,
    dynamic_prompt,
)
from langchain_core.messages import AIMessage, ToolMessage
from langchain_core.tools import tool
from langgraph.types import Command, interrupt

from support.graphs.agents import ADD, SEARCH, adder, passages
from support.graphs.case import case
from support.graphs.kit import Kit, called
from support.request_counts import POISON


class Hooks(AgentMiddleware[Any, Any, Any]):
    """A middleware with every hook, in sync and async code. One of the hooks calls a model."""

    def __init__(self, kit: Kit) -> None:
        super().__init__()
        self.kit = kit

    def before_agent(self, state: Any, runtime: Any) -> None:
        self.kit.note("before agent")

    def before_model(self, state: Any, runtime: Any) -> None:
        self.kit.note(f"before model {len(state['messages'])}")

    def after_model(self, state: Any, runtime: Any) -> dict[str, Any] | None:
        said = self.kit.llm.invoke(f"judge {state['messages'][-1].text}").text
        self.kit.note(f"judged {said}")
        return None

    def after_agent(self, state: Any, runtime: Any) -> dict[str, Any]:
        return {"messages": [AIMessage("signed")]}

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        return handler(request.override(system_prompt=f"You see {len(request.messages)}."))

    async def awrap_model_call(self, request: Any, handler: Any) -> Any:
        return await handler(request.override(system_prompt=f"You see {len(request.messages)}."))

    def wrap_tool_call(self, request: Any, handler: Any) -> Any:
        self.kit.note(f"tool {request.tool_call['name']}")
        return handler(request)

    async def awrap_tool_call(self, request: Any, handler: Any) -> Any:
        self.kit.note(f"tool {request.tool_call['name']}")
        return await handler(request)


@case({"messages": ADD}, {"messages": SEARCH})
def all_hooks(kit: Kit) -> Any:
    return create_agent(kit.agent, [adder(kit), passages(kit)], middleware=[Hooks(kit)], checkpointer=kit.saver)


@case({"messages": ADD}, {"messages": "stop"})
def decorated_hooks(kit: Kit) -> Any:
    """Build an agent with three hooks: a prompt by the state, an end of the run, and a change of the answer."""

    @dynamic_prompt
    def prompt(request: Any) -> str:
        return f"Message {len(request.messages)}."

    @before_model(can_jump_to=["end"])
    def stop(state: AgentState[Any], runtime: Any) -> dict[str, Any] | None:
        if state["messages"][-1].text == "stop":
            return {"messages": [AIMessage("stopped")], "jump_to": "end"}
        return None

    @after_model
    def louder(state: AgentState[Any], runtime: Any) -> dict[str, Any] | None:
        last = state["messages"][-1]
        if isinstance(last, AIMessage) and not last.tool_calls:
            return {"messages": [last.model_copy(update={"content": last.text.upper()})]}
        return None

    return create_agent(kit.agent, [adder(kit)], middleware=[prompt, stop, louder], checkpointer=kit.saver)


class Shortcuts(AgentMiddleware[Any, Any, Any]):
    """A middleware that answers some calls of the model and of tools itself. It makes all other model calls twice."""

    def wrap_model_call(self, request: Any, handler: Any) -> Any:
        if request.messages[-1].text == "nothing":
            return AIMessage("nothing to say")
        handler(request)
        return handler(request)

    def wrap_tool_call(self, request: Any, handler: Any) -> Any:
        if request.tool_call["args"].get("a") == 2:
            return ToolMessage("five", tool_call_id=request.tool_call["id"])
        return handler(request)


@case({"messages": ADD}, {"messages": "nothing"}, {"messages": "Add: " + called("add", a=7, b=7)}, only="sync")
def shortcuts(kit: Kit) -> Any:
    return create_agent(kit.agent, [adder(kit)], middleware=[Shortcuts()], checkpointer=kit.saver)


APPROVED = Command(resume={"decisions": [{"type": "approve"}]})
EDITED = Command(resume={"decisions": [{"type": "edit", "edited_action": {"name": "add", "args": {"a": 5, "b": 5}}}]})
REJECTED = Command(resume={"decisions": [{"type": "reject", "message": "not that"}]})


@case({"messages": ADD}, APPROVED, {"messages": ADD}, EDITED, {"messages": SEARCH + called("add", a=1, b=1)}, REJECTED)
def human_in_the_loop(kit: Kit) -> Any:
    approval: Any = HumanInTheLoopMiddleware(interrupt_on={"add": True})
    return create_agent(kit.agent, [adder(kit), passages(kit)], middleware=[approval], checkpointer=kit.saver)


@case({"messages": "Ask: " + called("confirm", what="it")}, Command(resume="yes"))
def tool_that_asks(kit: Kit) -> Any:
    retriever = kit.retriever

    @tool
    def confirm(what: str) -> str:
        """Asks before it looks."""
        answer = interrupt(f"really {what}?")
        return f"{answer}: {retriever.invoke(what)[0].page_content}"

    return create_agent(kit.agent, [confirm], checkpointer=kit.saver)


@case({"messages": "one " * 30}, {"messages": "two " * 30}, {"messages": "three"})
def summarised(kit: Kit) -> Any:
    summary: Any = SummarizationMiddleware(kit.llm, trigger=("messages", 3), keep=("messages", 1))
    return create_agent(kit.agent, [], middleware=[summary], checkpointer=kit.saver)


@case({"messages": "Loop: " + called("loop", n=0)})
def limited_calls(kit: Kit) -> Any:
    """Build an agent with a tool that makes the model call it again, until a limit ends the run."""

    @tool
    def loop(n: int) -> str:
        """Again."""
        return called("loop", n=n + 1)

    limit: Any = ModelCallLimitMiddleware(run_limit=3)
    return create_agent(kit.agent, [loop], middleware=[limit], checkpointer=kit.saver)


@case({"messages": f"a {POISON} question"}, {"messages": "Shaky: " + called("shaky", x=1)})
def fallbacks_and_retries(kit: Kit) -> Any:
    """Build an agent whose model fails, so that the user's own answers, and whose tool works on the second try."""

    @tool
    def shaky(x: int) -> str:
        """Works the second time."""
        if kit.before("shaky") == 0:
            raise ConnectionError("not yet")
        return f"{x} at last"

    fallback: Any = ModelFallbackMiddleware(kit.own)
    retry: Any = ToolRetryMiddleware(max_retries=1, initial_delay=0.001, jitter=False)
    return create_agent(kit.agent, [shaky], middleware=[fallback, retry], checkpointer=kit.saver)
