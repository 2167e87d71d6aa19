"""An agent listens to its model: calls of tools are heard of while the answer is still being written.

What is heard is a guess until the answer is whole, and whoever listens changes nothing of the answer, nor of how it is
made: what goes wrong with a listener is logged, and the call goes on without it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Generator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, replace
from typing import Any, Protocol

from langchain_core.messages import AIMessage, BaseMessage

from teola_plugin.adapters.calls import giving_up
from teola_plugin.adapters.tool_calls import Call, CallReader
from teola_plugin.requests.payloads import Prompt
from teola_plugin.runtime.handles import CallHandle
from teola_plugin.runtime.query_run import QueryRun


@dataclass(frozen=True, slots=True)
class ModelCall:
    """A call of a pool model with tools, inside a live query."""

    pool: Any
    engine: str
    run: QueryRun
    prompt: Prompt
    names: Collection[str]
    """Of the tools that the model is told of."""
    to_prompt: Callable[[Sequence[BaseMessage]], Prompt]
    """How the model spells messages."""

    def prompt_with(self, more: Sequence[BaseMessage]) -> Prompt:
        """The prompt, with these messages behind it. Raises what `to_prompt` raises."""
        return replace(self.prompt, messages=self.prompt.messages + self.to_prompt(more).messages)


class AnswerListener(Protocol):
    """Hears of one answer, where the model is called: in the caller's thread, or on its loop."""

    def called(self, index: int, call: Call) -> None:
        """The JSON of a call has closed: the one of this number in the answer, if the whole of it is as it seems."""
        ...

    def answered(self, message: AIMessage) -> None:
        """The answer is whole, and these are its calls."""
        ...

    def failed(self) -> None:
        """There will be no answer."""
        ...


class AgentListener(Protocol):
    """Says whether anybody listens to a call."""

    def listener_for(self, call: ModelCall) -> AnswerListener | None: ...


current_agent: ContextVar[AgentListener | None] = ContextVar("teola_agent", default=None)
"""The agent whose model node the running code belongs to."""


def listening(call: ModelCall) -> Hearing | None:
    """Return the listener to a call that is made here; None for nobody."""
    agent = current_agent.get()
    if agent is None:
        return None
    try:
        listener = agent.listener_for(call)
    except Exception as error:
        _log(error)
        return None
    return None if listener is None else Hearing(listener, call.names)


class Hearing:
    """One answer, as it is heard."""

    def __init__(self, listener: AnswerListener, names: Collection[str]) -> None:
        self._listener: AnswerListener | None = listener
        self._reader = CallReader(names)
        self._next_number = 0

    def piece(self, text: str) -> None:
        for call in self._reader.feed(text):
            number, self._next_number = self._next_number, self._next_number + 1
            self._tell(lambda listener, n=number, call=call: listener.called(n, call))  # type: ignore[misc]

    def answered(self, message: AIMessage) -> None:
        self._tell(lambda listener: listener.answered(message))

    def failed(self) -> None:
        self._tell(lambda listener: listener.failed())

    def _tell(self, tell: Callable[[AnswerListener], None]) -> None:
        if self._listener is None:
            return
        try:
            tell(self._listener)
        except Exception as error:
            self._listener = None
            _log(error)


class PendingAnswer:
    """The values of a model's call, to be waited for by `result()` or by `await`. Somebody may be listening."""

    def __init__(self, handle: CallHandle, hearing: Hearing | None) -> None:
        self._handle, self._hearing = handle, hearing

    def result(self) -> list[Any]:
        """Return the values, as `CallHandle.result` does."""
        hearing = self._hearing
        if hearing is None:
            return self._handle.result()
        try:
            with giving_up(self._handle):
                for piece in self._handle.pieces:
                    hearing.piece(piece.text)
                return self._handle.result()
        except BaseException:
            hearing.failed()
            raise

    def __await__(self) -> Generator[Any, None, list[Any]]:
        return self._wait().__await__()

    async def _wait(self) -> list[Any]:
        hearing = self._hearing
        if hearing is None:
            return await self._handle
        try:
            with giving_up(self._handle):
                async for piece in self._handle.pieces:
                    hearing.piece(piece.text)
                return await self._handle
        except BaseException:
            hearing.failed()
            raise

    def is_whole(self, message: AIMessage) -> None:
        """Tell who listens what became of it."""
        if self._hearing is not None:
            self._hearing.answered(message)


def _log(error: Exception) -> None:
    logging.getLogger("teola_plugin").warning(
        "an agent cannot listen to its model (%s is a bug of teola-plugin: please report it)",
        type(error).__name__,
        exc_info=error,
    )
