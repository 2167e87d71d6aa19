"""An accelerated object of a bare generator function."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

from langchain_core.runnables import RunnableConfig

from teola_plugin.adapters.langchain.runnable import AcceleratedRunnable
from teola_plugin.shims.langchain import yields
from teola_plugin.shims.stack_levels import hide_from_stack_levels


class AcceleratedGenerator(AcceleratedRunnable):
    """Of a `RunnableGenerator`: that its function lacks a way, it says when called, not at the first chunk."""

    def stream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> Iterator[Any]:
        if not yields(self.bound, on_loop=False):
            return self.bound.stream(input, config, **kwargs)
        return super().stream(input, config, **kwargs)

    def astream(self, input: Any, config: RunnableConfig | None = None, **kwargs: Any) -> AsyncIterator[Any]:
        if not yields(self.bound, on_loop=True):
            return self.bound.astream(input, config, **kwargs)
        return super().astream(input, config, **kwargs)


hide_from_stack_levels(globals())
