"""Callback methods that run where they are called, whoever calls them: a manager in a thread or one on a loop."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import MethodType
from typing import Any


class InPlace:
    """Decorator of a handler's sync method, for handlers without `run_inline`.

    The framework's async managers know two other ways, and neither will do. They run a sync method on the loop's
    threads, which the user's code may occupy. And beside a handler with `run_inline`, the other handlers of
    `AsyncCallbackManager.on_llm_start` are not told at all (langchain-core 1.7). So it passes for a coroutine
    function: it is called and awaited on the loop. A sync manager calls it and finds nothing to await.
    """

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method

    def __get__(self, handler: Any, owner: type | None = None) -> Any:
        return self._method if handler is None else _Call(MethodType(self._method, handler))


class _Done:
    """An awaitable that is done, and is no coroutine."""

    def __await__(self) -> Iterator[None]:
        return iter(())


async def _async() -> None:
    """Lends its nature to `_Call`."""


class _Call:
    # What `inspect.iscoroutinefunction` looks at.
    __name__ = "in_place"
    __code__ = _async.__code__
    __defaults__ = __kwdefaults__ = None
    __annotations__ = {}

    def __init__(self, method: Callable[..., None]) -> None:
        self._method = method

    def __call__(self, *args: Any, **kwargs: Any) -> _Done:
        self._method(*args, **kwargs)
        return _DONE


_DONE = _Done()
