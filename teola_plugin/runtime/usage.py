"""Tokens of the calls that running code makes, wherever below they are made: for whoever has to tell what it cost.

Calls of the pool are counted as they are made. Of models outside the pool, a framework may tell: its listener counts
those calls of which nothing below was counted (`ModelRun`), so that none counts twice.
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
from teola_plugin.runtime.context import during

T = TypeVar("T")
_END: Any = object()


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of prompts, of those found in a prefix cache, and of answers."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0

    def __add__(self, other: Tokens) -> Tokens:
        return Tokens(self.prompt + other.prompt, self.cached + other.cached, self.completion + other.completion)


class ModelRun:
    """A call of a model that a framework tells of: from its begin on it is the `current_model_run` of its code."""

    def __init__(self, around: ModelRun | None = None, prompts: int = 1) -> None:
        self.around, self.prompts = around, prompts
        """The call that it is made by, if a model's own code makes it; prompts that have not begun yet."""
        self.counted = False
        """Whether tokens of it are counted already: by the pool, or as a call that it has made itself."""
        self.over = False

    def mark(self) -> None:
        """Calls of the pool, or of another model, that it has made are counted: its own figures would repeat theirs."""
        run: ModelRun | None = self
        while run is not None:
            run.counted, run = True, run.around


class Tally:
    """Of calls that have ended well: those that got what was asked for ahead of them, too. From any thread."""

    def __init__(self, listener: Any = None) -> None:
        """`listener`: hears what a framework tells of models while calls are counted; see `current_listener`."""
        self.listener = listener
        self._under_way: set[Future[list[Any]]] = set()
        self._lock = threading.Lock()
        self._tokens = Tokens()
        self._elsewhere = Tokens()

    def watch(self, call: Future[list[Any]]) -> None:
        run = current_model_run.get()
        if run is not None:
            run.mark()
        with self._lock:
            self._under_way.add(call)
        call.add_done_callback(self._ended)

    @property
    def tokens(self) -> Tokens:
        """So far. Whoever has the values of a call finds it counted."""
        for call in [one for one in self._all() if one.done()]:
            self._ended(call)
        return self._tokens + self._elsewhere

    @property
    def elsewhere(self) -> Tokens:
        """Those of `tokens` that are of models outside the pool."""
        return self._elsewhere

    def add(self, tokens: Tokens) -> None:
        """A model outside the pool has told what it took."""
        with self._lock:
            self._elsewhere += tokens

    def _all(self) -> list[Future[list[Any]]]:
        with self._lock:
            return list(self._under_way)

    def _ended(self, call: Future[list[Any]]) -> None:
        with self._lock:
            if call not in self._under_way:
                return
            self._under_way.discard(call)
            if call.cancelled() or call.exception() is not None:
                return
            made = [value for value in call.result() if isinstance(value, Generation)]
            for one in made:
                self._tokens += Tokens(one.prompt_tokens, one.cached_tokens, one.completion_tokens)


current_tally: ContextVar[Tally | None] = ContextVar("teola_current_tally", default=None)
current_listener: ContextVar[Any] = ContextVar("teola_current_listener", default=None)
"""What a framework tells of its models while calls are counted: of LangChain, a callback handler."""
current_model_run: ContextVar[ModelRun | None] = ContextVar("teola_current_model_run", default=None)


@contextmanager
def tallied(tally: Tally) -> Iterator[None]:
    """Count the calls in the body."""
    with during(current_tally, tally), during(current_listener, tally.listener):
        yield


async def atallied(tally: Tally, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """The items; calls that are made for each are counted."""
    async with aclosing(items):  # type: ignore[type-var]
        while True:
            with tallied(tally):
                item = await anext(items, _END)
            if item is _END:
                return
            yield item
