"""Tokens of the calls that running code makes, wherever below they are made: for whoever has to tell what it cost."""

from __future__ import annotations

import threading
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import aclosing, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, TypeVar

from teola_plugin.requests.payloads import Generation

T = TypeVar("T")
_END: Any = object()


@dataclass(frozen=True, slots=True)
class Tokens:
    """Of prompts, of those found in a prefix cache, and of answers."""

    prompt: int = 0
    cached: int = 0
    completion: int = 0


class Tally:
    """Of calls that have ended well: those that got what was asked for ahead of them, too. From any thread."""

    def __init__(self) -> None:
        self._under_way: set[Future[list[Any]]] = set()
        self._lock = threading.Lock()
        self._tokens = Tokens()

    def watch(self, call: Future[list[Any]]) -> None:
        with self._lock:
            self._under_way.add(call)
        call.add_done_callback(self._ended)

    @property
    def tokens(self) -> Tokens:
        """So far. Whoever has the values of a call finds it counted."""
        for call in [one for one in self._all() if one.done()]:
            self._ended(call)
        return self._tokens

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
            known = self._tokens
            self._tokens = Tokens(
                known.prompt + sum(one.prompt_tokens for one in made),
                known.cached + sum(one.cached_tokens for one in made),
                known.completion + sum(one.completion_tokens for one in made),
            )


current_tally: ContextVar[Tally | None] = ContextVar("teola_current_tally", default=None)


@contextmanager
def tallied(tally: Tally) -> Iterator[None]:
    """Calls in the body are counted."""
    token = current_tally.set(tally)
    try:
        yield
    finally:
        current_tally.reset(token)


async def atallied(tally: Tally, items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """The items; calls that are made for each are counted."""
    async with aclosing(items):  # type: ignore[type-var]
        while True:
            with tallied(tally):
                item = await anext(items, _END)
            if item is _END:
                return
            yield item
