"""Tokens of the calls that running code makes, at any depth, for reports of what it cost.

Calls of the pool are counted as they are made. Calls of models outside the pool may be reported by a framework: its
listener counts those in which no call of the pool was counted (`ModelRun`), so that none counts twice.
"""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from teola_plugin.requests.payloads import Generation
from teola_plugin.runtime.query_run import during

T = TypeVar("T")
_END: Any = object()


@dataclass(frozen=True, slots=True)
class Tokens:
    """The numbers of tokens of prompts, of those found in a prefix cache, and of answers."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.prompt + other.prompt, self.cached + other.cached, self.completion + other.completion)


class ModelRun:
    """A call of a model that a framework reports: while its code runs, it is the `current_model_run`."""

    def __init__(self, outer: ModelRun | None = None, prompts: int = 1) -> None:
        """`outer`: the call whose model's own code makes this one. `prompts`: number of prompts yet to begin."""
        self.outer, self.prompts = outer, prompts
        self.is_counted = False
        """True if tokens of it are counted already: by the pool, or as a call that it has made itself."""
        self.is_over = False

    def mark_counted(self) -> None:
        """Note that a call which it has made is counted: its own figures, and those of outer calls, would repeat it."""
        run: ModelRun | None = self
        while run is not None:
            run.is_counted, run = True, run.outer


class Tally:
    """The tokens of calls that have ended well, prefetched ones included. Used from any thread."""

    def __init__(self, listener: Any = None) -> None:
        """`listener`: see `current_listener`."""
        self.listener = listener
        self._open_calls: set[Future[list[Any]]] = set()
        self._lock = threading.Lock()
        self._tokens = Tokens()
        self._elsewhere = Tokens()

    def watch(self, call: Future[list[Any]]) -> None:
        """Count a call of the pool once it has ended."""
        run = current_model_run.get()
        if run is not None:
            run.mark_counted()
        with self._lock:
            self._open_calls.add(call)
        call.add_done_callback(self._count)

    @property
    def tokens(self) -> Tokens:
        """All tokens so far. A call is counted before its caller has its values."""
        with self._lock:
            open_calls = list(self._open_calls)
        for call in open_calls:
            if call.done():
                self._count(call)
        return self._tokens + self._elsewhere

    @property
    def elsewhere(self) -> Tokens:
        """The part of `tokens` that is of models outside the pool."""
        return self._elsewhere

    def add(self, tokens: Tokens) -> None:
        """Add the tokens of a call of a model outside the pool."""
        with self._lock:
            self._elsewhere += tokens

    def _count(self, call: Future[list[Any]]) -> None:
        """Add the tokens of a call that has ended well, once. Called when it ends, and by `tokens`; from any thread."""
        with self._lock:
            if call not in self._open_calls:
                return
            self._open_calls.discard(call)
            if call.cancelled() or call.exception() is not None:
                return
            for value in call.result():
                if isinstance(value, Generation):
                    self._tokens += Tokens(value.prompt_tokens, value.cached_tokens, value.completion_tokens)


current_tally: ContextVar[Tally | None] = ContextVar("teola_current_tally", default=None)
current_listener: ContextVar[Any] = ContextVar("teola_current_listener", default=None)
"""The framework's listener to its models while calls are counted: for LangChain, a callback handler."""
current_model_run: ContextVar[ModelRun | None] = ContextVar("teola_current_model_run", default=None)


@contextmanager
def tallied(tally: Tally) -> Iterator[None]:
    """Count the calls in the body."""
    with during(current_tally, tally), during(current_listener, tally.listener):
        yield


async def atallied(tally: Tally, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """Yield the items, and count the calls that are made for each."""
    async with aclosing(items):  # type: ignore[type-var]
        while True:
            with tallied(tally):
                item = await anext(items, _END)
            if item is _END:
                return
            yield item
