"""How much work code does, without a clock: the instructions that Python runs for it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def steps(work: Callable[[], Any], within: str = "teola_plugin") -> int:
    """Instructions that `work` runs in modules of this package, on this thread."""
    count = 0

    def step(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "opcode"
        return step

    def call(frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_globals.get("__name__", "").startswith(within):
            return None
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        return step

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
