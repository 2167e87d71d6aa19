"""What the demo prints, in some 25 lines: each result as soon as it is there, times in seconds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from rich.console import Console
from rich.text import Text

_BAR = 40
"""Characters of the longer bar."""
_COLOURS = {"plain": "yellow", "accelerated": "green"}


class Compared(Protocol):
    """Medians in seconds, and whether every run gave the same answer."""

    @property
    def plain_s(self) -> float: ...
    @property
    def accelerated_s(self) -> float: ...
    @property
    def answers_equal(self) -> bool: ...


class Report:
    """Lines on stdout; `quiet` prints none of them."""

    def __init__(self, *, quiet: bool = False, console: Console | None = None) -> None:
        self.console = console or Console(quiet=quiet)

    def line(self, *parts: str | tuple[str, str]) -> None:
        """One line; parts may come with a style."""
        self.console.print(Text.assemble(*parts), soft_wrap=True)

    def question(self, text: str) -> None:
        self.line()
        self.line(("Question     ", "dim"), text)

    def first_answer(self, answer: Any, seconds: float) -> None:
        """Print the first answer of the original, which runs with cold caches."""
        self.line(("Answer       ", "dim"), f"{answer}", (f"  ({seconds:.1f} s, plain, the first run)", "dim"))

    def result(self, title: str, found: Compared, runs: int) -> None:
        """Two bars and whether the answers are the same."""
        self.line()
        self.line((title, "bold"))
        longest = max(found.plain_s, found.accelerated_s)
        for name, seconds in (("plain", found.plain_s), ("accelerated", found.accelerated_s)):
            bar = "█" * max(1, round(_BAR * seconds / longest))
            self.line(f"  {name:11} ", (f"{bar:{_BAR}}", _COLOURS[name]), f" {seconds:.2f} s")
        told = "same answer" if found.answers_equal else "DIFFERENT ANSWERS: this is a bug, please report it"
        self.line(
            "  ",
            (f"{compared(found.plain_s, found.accelerated_s)}, {told}", "bold"),
            f" (medians of {runs})" if runs > 1 else " (one run)",
        )

    def saved(self, parts: Mapping[str, float], rest: float) -> None:
        """Which overlaps saved how much, in seconds; `rest`: what all else saved, or lost where it is negative."""
        for told, seconds in parts.items():
            self.line(f"  saved {seconds:5.2f} s: {told}")
        if parts and rest <= -0.005:
            self.line(f"  lost  {-rest:5.2f} s: the other parts took longer while more ran at once")

    def nothing_to_gain(self, found: Compared) -> None:
        """A chain without slack, for comparison."""
        times = f"{found.plain_s:.2f} s plain, {found.accelerated_s:.2f} s accelerated"
        self.line(f"  for comparison, retrieve-prompt-answer has nothing to overlap: {times}")

    def end(self, pages: Sequence[str]) -> None:
        """Print where the timelines are, and what to do next."""
        self.line()
        self.line("Timelines (open in a browser): ", " ".join(pages))
        self.line(
            "Plans, every figure: teola demo --verbose. Your own chain: teola compare my_app:chain --inputs q.jsonl"
        )


def compared(plain_s: float, accelerated_s: float) -> str:
    """`1.14x faster`, or what else it is."""
    ratio = plain_s / accelerated_s
    if 0.98 <= ratio <= 1.02:
        return f"as fast ({ratio:.2f}x)"
    return f"{ratio:.2f}x faster" if ratio > 1 else f"{1 / ratio:.2f}x slower"
