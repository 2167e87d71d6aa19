"""How much work code does, without a clock: the lines of Python that it runs, loops of comprehensions included."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def steps(work: Callable[[], Any], within: str = "teola_plugin") -> int:
    """Lines that `work` runs in modules of this package, on this thread."""
    count = 0

    def line(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += 1
        return line

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        return line if frame.f_globals.get("__name__", "").startswith(within) else None

    before = sys.gettrace()
    sys.settrace(call)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def growth(work: Callable[[int], Any], small: int, times: int = 4) -> float:
    """How much more work it is `times` wider, divided by `times`: about 1 for linear work, `times` for quadratic."""
    work(2)  # whatever is made once
    return steps(lambda: work(small * times)) / steps(lambda: work(small)) / times
