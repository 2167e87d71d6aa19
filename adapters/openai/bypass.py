"""Errors of the pool, and captured requests, past a client of the `openai` package: it retries or wraps every
`Exception` that it sees."""

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
_raising: ContextVar[bool] = ContextVar("teola_raising", default=False)


class Captured(BaseException):
    """A request that was asked for, in place of its answer. No `Exception`, so that no client retries it."""

    def __init__(self, asked: Generate) -> None:
        super().__init__()
        self.asked = asked


class Bypass(BaseException):
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
def raising_pool_errors() -> Iterator[None]:
    """The body uses a client: what the pool says of its requests is raised as it is, past what the client would do.

    Around whatever of an object's methods sends requests. Outside of it a client is told that the connection broke.
    """
    token = _raising.set(True)
    try:
        yield
    except Bypass as bypass:
        raise bypass.error from bypass.error.__cause__
    finally:
        _raising.reset(token)


def raising_pool_errors_in(items: Iterator[T]) -> Iterator[T]:
    """The items, each made inside `raising_pool_errors()`."""
    with contextlib.closing(items):  # type: ignore[type-var]
        while True:
            with raising_pool_errors():
                item = next(items, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]


async def araising_pool_errors_in(items: AsyncIterator[T]) -> AsyncGenerator[T, None]:
    """`raising_pool_errors_in` in a loop."""
    async with contextlib.aclosing(items):  # type: ignore[type-var]
        while True:
            with raising_pool_errors():
                item = await anext(items, _END)
            if item is _END:
                return
            yield item  # type: ignore[misc]


def raise_past_client(error: TeolaError) -> None:
    """Raises it past the client, inside of `raising_pool_errors()`; does nothing elsewhere."""
    if _raising.get():
        raise Bypass(error)


def raise_captured(asked: Generate) -> None:
    """Raises `Captured`, inside of `capturing()`; does nothing elsewhere."""
    if _capture.get():
        raise Captured(asked)
