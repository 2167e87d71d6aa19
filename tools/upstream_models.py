"""Puts an engine of a fake pool behind every chat model of the tests.

Each call of a model first asks the engine for the same messages, within the query that it is part of; then the model
answers, as it always does. So models are leaves like pool-backed ones: requests for them are begun ahead and claimed.
Since the engine never says what the model answers, all that follows from its words is a wrong guess.
"""

from __future__ import annotations

import functools
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from typing import Any

from langchain_core.language_models import BaseChatModel

Note = Callable[[str], None]


class Backed:
    """Chat models whose calls ask an engine, too."""

    def __init__(self, pool: Any, note: Note, engine: str = "llm") -> None:
        from teola_plugin.langchain import ChatTeola

        self._pool, self._note, self._engine = pool, note, engine
        self._leaf: Any = ChatTeola(pool=pool, engine=engine, max_tokens=8).__teola_leaf__({})

    def start(self) -> None:
        for name in ("__init__", "generate", "agenerate", "stream", "astream"):
            original = getattr(BaseChatModel, name)
            stand_in = getattr(self, "_" + name.strip("_"))(original)
            setattr(BaseChatModel, name, functools.wraps(original)(stand_in))

    def _init(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def __init__(model: Any, /, *args: Any, **kwargs: Any) -> None:
            original(model, *args, **kwargs)
            cls = type(model)
            if "__teola_leaf__" not in vars(cls) and not cls.__module__.startswith("teola_plugin."):
                cls.__teola_leaf__ = lambda model, kwargs: self._leaf  # of this class: others override what it does

        return __init__

    def _generate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def generate(model: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
            for call in self._asked(model, messages):
                call.result(10)
            return original(model, messages, *args, **kwargs)

        return generate

    def _agenerate(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def agenerate(model: Any, messages: Any, *args: Any, **kwargs: Any) -> Any:
            for call in self._asked(model, messages):
                await call
            return await original(model, messages, *args, **kwargs)

        return agenerate

    def _stream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def stream(model: Any, input: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
            for call in self._asked(model, [input]):
                call.result(10)
            yield from original(model, input, *args, **kwargs)

        return stream

    def _astream(self, original: Callable[..., Any]) -> Callable[..., Any]:
        async def astream(model: Any, input: Any, *args: Any, **kwargs: Any) -> AsyncIterator[Any]:
            for call in self._asked(model, [input]):
                await call
            async for chunk in original(model, input, *args, **kwargs):
                yield chunk

        return astream

    def _asked(self, model: Any, inputs: Sequence[Any]) -> list[Any]:
        """Calls of the engine, under way; none for messages that a text engine cannot take."""
        from teola_plugin.adapters.langchain.listening import call_context
        from teola_plugin.graph import PrimitiveKind

        if type(model).__module__.startswith("teola_plugin."):
            return []
        try:
            payloads = [self._leaf.payload(one) for one in inputs]
        except Exception:
            return []
        self._note("asked")
        run, request_context = call_context(self._pool)
        ask = functools.partial(
            self._pool.call, PrimitiveKind.PREFILLING, self._engine, run=run, request_context=request_context
        )
        return [ask([payload]) for payload in payloads]
