"""Where tool calls are made: what was begun for one is at hand there, and ends with it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol

from teola_plugin.adapters.langchain.listening import current_agent
from teola_plugin.adapters.langgraph.agents.early_calls import claimable
from teola_plugin.adapters.langgraph.agents.heard_answer import HeardAnswer


class Agent(Protocol):
    """Whose tools run."""

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
    agent, name = tools_of.get(), call.get("id") if isinstance(call, dict) else None
    answer = agent.answer_of(name) if agent is not None and name else None
    found = answer.begun(name) if answer is not None and name else None
    results: list[Any] = []
    with during(claimable, found.early if found is not None else None), during(current_agent, None):
        try:
            yield results.append
        finally:
            if answer is not None and name:
                _safely(lambda: answer.ended(name, results[0] if results else None))


@contextmanager
def during(variable: ContextVar[Any], value: Any) -> Iterator[None]:
    """The variable has this value in the body."""
    token = variable.set(value)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # a generator may be closed in another context than it began in
            variable.reset(token)


def _safely(does: Callable[[], None]) -> None:
    try:
        does()
    except Exception as error:
        logging.getLogger("teola_plugin").warning(
            "what was begun early for a tool is left alone (%s is a bug of teola-plugin: please report it)",
            type(error).__name__,
            exc_info=error,
        )
