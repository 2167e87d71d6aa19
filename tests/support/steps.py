"""Measures the work of code without a clock: by the number of instructions that Python runs."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any


def steps(work: Callable[[], Any], within: str = "teola_plugin") -> int:
    """Return the number of instructions that `work` runs in modules of this package, on this thread."""
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
    """Return how much the work grows for a `times` larger size, divided by `times`.

    The result is about 1 for linear work, and `times` for quadratic work.
    """
    work(2)  # whatever is made once
    return steps(lambda: work(small * times)) / steps(lambda: work(small)) / times
