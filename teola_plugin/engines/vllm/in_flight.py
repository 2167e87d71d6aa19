"""What the host of an LLM engine works on, and where its answers go. Lives on the pool's loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from teola_plugin.engines.vllm.link import Answer, Delta, Refusal
from teola_plugin.errors import EngineError
from teola_plugin.requests.request import Request
from teola_plugin.requests.results import Done, Failed, Piece, Result


@dataclass(frozen=True, slots=True)
class Call:
    """A request in flight and where its results go."""

    request: Request
    inbox: asyncio.Queue[Result]


class InFlight:
    """Requests, and questions of the engine itself, by the number with which they went to the host.

    `refused` makes an error of a refusal; `answered` is told of every request that ended with a value.
    """

    def __init__(
        self, refused: Callable[[Refusal], EngineError], answered: Callable[[Request, Any], None] = lambda *_: None
    ) -> None:
        self._refused, self._answered = refused, answered
        self._numbers = itertools.count(1)
        self._calls: dict[int, Call] = {}
        self._by_request: dict[str, int] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}

    def __len__(self) -> int:
        """Requests that have not ended."""
        return len(self._calls)

    def number(self) -> int:
        return next(self._numbers)

    def add(self, number: int, request: Request, inbox: asyncio.Queue[Result]) -> None:
        self._calls[number], self._by_request[request.id] = Call(request, inbox), number

    def number_of(self, request_id: str) -> int:
        """0 for a request that is not in flight."""
        return self._by_request.get(request_id, 0)

    def remove(self, number: int) -> Call | None:
        call = self._calls.pop(number, None)
        if call is not None and self._by_request.get(call.request.id) == number:
            del self._by_request[call.request.id]
        return call

    def ask(self, number: int) -> asyncio.Future[Any]:
        """The answer to a question of the engine itself."""
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        return answer

    def receive(self, item: Delta | Answer | Refusal) -> None:
        question = self._questions.pop(item.id, None)
        if question is not None:
            if not question.done() and isinstance(item, Answer):
                question.set_result(item.value)
            elif not question.done() and isinstance(item, Refusal):
                question.set_exception(self._refused(item))
            return
        call = self._calls.get(item.id)
        if call is None:  # cancelled meanwhile
            return
        name = call.request.id
        if isinstance(item, Delta):
            call.inbox.put_nowait(Piece(name, item.text, item.tokens))
            return
        self.remove(item.id)
        if isinstance(item, Refusal):
            call.inbox.put_nowait(Failed(name, self._refused(item)))
        else:
            call.inbox.put_nowait(Done(name, item.value, item.stats, cuts=item.cuts))
            self._answered(call.request, item.value)

    def fail(self, error: Callable[[], EngineError]) -> None:
        """Fail all calls and questions. `error` is called only if there are any."""
        calls, self._calls = self._calls, {}
        self._by_request.clear()
        questions, self._questions = self._questions, {}
        if not calls and not questions:
            return
        made = error()
        for call in calls.values():  # one object: each port makes its callers' own of it
            call.inbox.put_nowait(Failed(call.request.id, made))
        for question in questions.values():
            if not question.done():
                question.set_exception(made)
