"""A wrapper that takes the place of an accelerated part in the original chain.

It is one object, which no sequence takes apart.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.runnables import Runnable


class Itself(Runnable[Any, Any]):
    """Makes each call of the part with its own config. (A binding would add the context's callbacks to the config.)"""

    def __init__(self, bound: Runnable[Any, Any]) -> None:
        self.bound = bound

    def get_name(self, suffix: str | None = None, *, name: str | None = None) -> str:
        return self.bound.get_name(suffix, name=name)

    def invoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        return self.bound.invoke(input, config, **kwargs)

    async def ainvoke(self, input: Any, config: Any = None, **kwargs: Any) -> Any:
        return await self.bound.ainvoke(input, config, **kwargs)

    def batch(self, inputs: Any, config: Any = None, **kwargs: Any) -> Any:
        return self.bound.batch(inputs, config, **kwargs)

    async def abatch(self, inputs: Any, config: Any = None, **kwargs: Any) -> Any:
        return await self.bound.abatch(inputs, config, **kwargs)

    def stream(self, input: Any, config: Any = None, **kwargs: Any) -> Iterator[Any]:
        yield from self.bound.stream(input, config, **kwargs)

    async def astream(self, input: Any, config: Any = None, **kwargs: Any) -> AsyncIterator[Any]:
        async for chunk in self.bound.astream(input, config, **kwargs):
            yield chunk

    def transform(self, input: Any, config: Any = None, **kwargs: Any) -> Iterator[Any]:
        yield from self.bound.transform(input, config, **kwargs)

    async def atransform(self, input: Any, config: Any = None, **kwargs: Any) -> AsyncIterator[Any]:
        async for chunk in self.bound.atransform(input, config, **kwargs):
            yield chunk
