"""What the steps of an abstract run need of the machine that walks through the function (see `bounded`)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import CodeType, FunctionType
from typing import Any, Protocol

from teola_plugin.tracer.purity.size_bounds import Loops, Size
from teola_plugin.tracer.purity.values import Data, Value


class Machine(Protocol):
    """Walks through one function, and through what it calls, with sizes in place of values."""

    loops: Loops

    def spend(self, size: Size) -> None:
        """So many steps are taken here. Raises `Unbounded` where that is too much."""

    def tick(self) -> None:
        """One step is taken here."""

    def made(self, size: Size, *, text: bool = ..., count: bool = ...) -> Data:
        """A value that is made here."""

    def each(self, over: Value, act: Callable[[Value], Size]) -> Size:
        """What `act` makes of the items, all together."""

    def function(self, func: FunctionType, given: list[Value], keywords: Mapping[str, Value]) -> Value:
        """What a call of the function gives. Raises `Unbounded`."""

    def run(
        self,
        code: CodeType,
        names: Mapping[str, Any],
        cells: Mapping[str, Value],
        given: list[Value],
        keywords: Mapping[str, Value],
        defaults: tuple[Any, ...] = ...,
    ) -> Value:
        """What the code returns. Raises `Unbounded`."""
