"""What is said past a client of the `openai` package, which retries and wraps every `Exception` that it sees."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextvars import ContextVar
from typing import TypeVar

from teola_plugin.errors import TeolaError
from teola_plugin.requests.payloads import Generate

T = TypeVar("T")
_END = object()
_capture: ContextVar[bool] = ContextVar("teola_capture", default=False)
_telling: ContextVar[bool] = ContextVar("teola_telling", default=False)


class Captured(BaseException):
    """A request that was asked for, in place of its answer. No `Exception`, so that no client retries it."""

    def __init__(self, asked: Generate) -> None:
        super().__init__()
        self.asked = asked


class Through(BaseException):
    """An error of the pool on its way through the client. No `Exception`, so that no client retries or wraps it."""

    def __init__(self, error: TeolaError) -> None:
        super().__init__()
        self.error = error


@contextlib.contextmanager
def capturing() -> Iterator[None]:
    """Requests in the body raise `Captured` and are not sent."""
    token = _capture.set(True)
    try:
        yield
    finally:
        _capture.reset(token)


@contextlib.contextmanager
def told() -> Iterator[None]:
    """The body uses a client: what the pool says of its requests is raised as it is, past what the client would do.

    Around whatever of an object's methods sends requests. Outside of it a client is told that the connection broke.
    """
    token = _telling.set(True)
    try:
        yield
    except Through as through:
        raise through.error from through.error.__cause__
    finally:
        _telling.reset(token)


def told_in(items: Iterator[T]) -> Iterator[T]:
    """The items, each made inside `told()`."""
    with contextlib.closing(items):  # type: ignore[type-var]
        while True:
            with told():
                item = next(items, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]


async def atold_in(items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """`told_in` in a loop."""
    async with contextlib.aclosing(items):  # type: ignore[type-var]
        while True:
            with told():
                item = await anext(items, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]


def said(error: TeolaError) -> None:
    """Raises it past the client, inside of `told()`; does nothing elsewhere."""
    if _telling.get():
        raise Through(error)


def caught(asked: Generate) -> None:
    """Raises `Captured`, inside of `capturing()`; does nothing elsewhere."""
    if _capture.get():
        raise Captured(asked)
