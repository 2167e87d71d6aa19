"""Where tool calls are made: what was begun for one is at hand there, and ends with it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, Protocol

from langgraph.errors import GraphBubbleUp

from teola_plugin.adapters.langchain.listening import current_agent
from teola_plugin.adapters.langgraph.agents.heard_answer import HeardAnswer
from teola_plugin.adapters.langgraph.agents.tool_prefetch import during
from teola_plugin.runtime.context import current_place, placed
from teola_plugin.runtime.query_run import QueryRun
from teola_plugin.shims.langchain_interceptors import tool_claim


class Agent(Protocol):
    """Whose tools run."""

    run: QueryRun

    def answer_of(self, tool_call: str) -> HeardAnswer | None: ...


tools_of: ContextVar[Agent | None] = ContextVar("teola_tools_of", default=None)
"""The agent whose tools run here."""


def around(run_one: Callable[..., Any]) -> Callable[..., Any]:
    """What runs one tool call of a tool node, with what was begun for it at hand."""

    def run(call: Any, *args: Any, **kwargs: Any) -> Any:
        with _place(call) as told:
            result = run_one(call, *args, **kwargs)
            told(result)
            return result

    return run


def in_loop(run_one: Callable[..., Any]) -> Callable[..., Any]:
    """`around` for a loop."""

    async def run(call: Any, *args: Any, **kwargs: Any) -> Any:
        with _place(call) as told:
            result = await run_one(call, *args, **kwargs)
            told(result)
            return result

    return run


@contextmanager
def _place(call: Any) -> Iterator[Callable[[Any], None]]:
    """The place of a tool call: its function finds what was begun for it, and what it calls is nobody's model node."""
    agent, called = tools_of.get(), call if isinstance(call, dict) else {}
    name = called.get("id") or ""
    answer = agent.answer_of(name) if agent is not None else None
    found = answer.begun(name) if answer is not None else None
    results: list[Any] = []
    claim = found.prefetch.claim() if found is not None and found.prefetch is not None else None
    with _step(agent, called), nobody(), during(tool_claim, claim):
        try:
            yield results.append
        finally:
            if answer is not None:
                _safely(lambda: answer.ended(name, results[0] if results else None))


@contextmanager
def _step(agent: Agent | None, call: Mapping[str, Any]) -> Iterator[None]:
    """The call in the trace of its query."""
    if agent is None:
        yield
        return
    step, outcome = agent.run.step_began("tool", str(call.get("name", ""))), "failed"
    try:
        with placed(replace(current_place.get(), step=step)):
            yield
        outcome = "done"
    except GraphBubbleUp:  # an interrupt, a command for the graph around
        outcome = "interrupted"
        raise
    finally:
        agent.run.step_ended(step, outcome)


def anybody() -> bool:
    """Whether an agent listens to models, or to tools, that are called here."""
    return current_agent.get() is not None or tools_of.get() is not None


@contextmanager
def nobody() -> Iterator[None]:
    """What is called in the body belongs to no agent: models are not listened to, tools find nothing."""
    with during(current_agent, None), during(tools_of, None):
        yield


def _safely(does: Callable[[], None]) -> None:
    try:
        does()
    except Exception as error:
        logging.getLogger("teola_plugin").warning(
            "what was begun early for a tool is left alone (%s is a bug of teola-plugin: please report it)",
            type(error).__name__,
            exc_info=error,
        )
