"""The requests in flight to the host of an LLM engine, and the queues for their results. Used on the pool's loop."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from teola_plugin.engines.vllm.link import Delta, Refusal, RequestAnswer
from teola_plugin.errors import EngineError
from teola_plugin.requests.payloads import Request
from teola_plugin.requests.results import Done, Failed, Piece, Result


@dataclass(frozen=True, slots=True)
class InFlightRequest:
    """A request in flight and the queue for its results."""

    request: Request
    inbox: asyncio.Queue[Result]


class InFlight:
    """Requests, and questions of the engine itself, by the number with which they were sent to the host.

    `to_error` converts a refusal; `on_answer` is called with every request that ended with a value.
    """

    def __init__(
        self, to_error: Callable[[Refusal], EngineError], on_answer: Callable[[Request, Any], None] = lambda *_: None
    ) -> None:
        self._to_error, self._on_answer = to_error, on_answer
        self._numbers = itertools.count(1)
        self._calls: dict[int, InFlightRequest] = {}
        self._by_request: dict[str, int] = {}
        self._questions: dict[int, asyncio.Future[Any]] = {}

    def __len__(self) -> int:
        """Return the number of requests that have not ended."""
        return len(self._calls)

    def number(self) -> int:
        return next(self._numbers)

    def add(self, number: int, request: Request, inbox: asyncio.Queue[Result]) -> None:
        self._calls[number], self._by_request[request.id] = InFlightRequest(request, inbox), number

    def number_of(self, request_id: str) -> int:
        """Return the number of a request; 0 if it is not in flight."""
        return self._by_request.get(request_id, 0)

    def remove(self, number: int) -> InFlightRequest | None:
        call = self._calls.pop(number, None)
        if call is not None and self._by_request.get(call.request.id) == number:
            del self._by_request[call.request.id]
        return call

    def ask(self, number: int) -> asyncio.Future[Any]:
        """Return a future of the answer to a question of the engine itself."""
        answer = self._questions[number] = asyncio.get_running_loop().create_future()
        return answer

    def receive(self, item: Delta | RequestAnswer | Refusal) -> None:
        question = self._questions.pop(item.id, None)
        if question is not None:
            if not question.done() and isinstance(item, RequestAnswer):
                question.set_result(item.value)
            elif not question.done() and isinstance(item, Refusal):
                question.set_exception(self._to_error(item))
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
            call.inbox.put_nowait(Failed(name, self._to_error(item)))
        else:
            call.inbox.put_nowait(Done(name, item.value, item.stats, cuts=item.cuts))
            self._on_answer(call.request, item.value)

    def fail(self, error: Callable[[], EngineError]) -> None:
        """Fail all calls and questions. `error` is called only if there are any."""
        calls, self._calls = self._calls, {}
        self._by_request.clear()
        questions, self._questions = self._questions, {}
        if not calls and not questions:
            return
        failure = error()
        for call in calls.values():  # one object: each port copies it for its callers
            call.inbox.put_nowait(Failed(call.request.id, failure))
        for question in questions.values():
            if not question.done():
                question.set_exception(failure)
